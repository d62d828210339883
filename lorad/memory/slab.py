"""The one block of device memory that holds K and V and the resident adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lorad_kernels import empty_block
from torch import Tensor

from lorad.sizing.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Slab:
    """`num_pages` equal pages in one 1-D tensor; a page is one KV block over all layers.

    `scratch_page`, where there is one, lies behind them and belongs to nobody: the rows that pad
    a captured decode step write their K and V there.
    """

    data: Tensor  # [num_pages * page_elements], and the scratch page; serving dtype
    num_pages: int
    page_elements: int
    block_size: int  # tokens per page
    scratch_page: int | None = None

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.data.element_size()

    @classmethod
    def allocate(
        cls,
        shape: ModelShape,
        num_pages: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scratch_page: bool = False,
    ) -> Slab:
        page_elements = block_size * shape.kv_elements_per_token
        pages = num_pages + scratch_page
        data = empty_block(pages * page_elements, dtype, device)
        data[num_pages * page_elements :].zero_()
        return cls(data, num_pages, page_elements, block_size, num_pages if scratch_page else None)

    def kv_views(self, shape: ModelShape) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Per layer K and V, each `[pages, block_size, kv_heads, head_dim]`, without a copy.

        The scratch page is in them.
        """
        blocks = self.data.view(
            -1,
            shape.num_layers,
            2,
            self.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        layers = range(shape.num_layers)
        return tuple(blocks[:, i, 0] for i in layers), tuple(blocks[:, i, 1] for i in layers)

    def clear_page(self, page: int) -> None:
        """Zero a page, so that no earlier bytes (another adapter's, or NaN) can be read as KV."""
        start = page * self.page_elements
        self.data[start : start + self.page_elements].zero_()

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages; no target is also a source."""
        pages = self.data.view(-1, self.page_elements)
        pages[self._index(targets)] = pages[self._index(sources)]

    def move_run(self, source: int, target: int, length: int) -> None:
        """Move `length` pages down to `target` < `source`; the two may overlap."""
        distance = source - target
        for done in range(0, length, distance):
            count = min(distance, length - done)
            self._pages(target + done, count).copy_(self._pages(source + done, count))

    def _pages(self, first: int, count: int) -> Tensor:
        return self.data[first * self.page_elements : (first + count) * self.page_elements]

    def _index(self, pages: list[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.data.device)
