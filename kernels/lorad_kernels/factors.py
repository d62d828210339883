"""Where adapters' factors lie in the slab: per slice for people, packed for kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A packed entry: rank, offset of A, offset of B, the bits of scaling as a float64.
FIELDS = 4


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """Where one adapter's factors for one slice lie in the slab, in elements.

    `A [rank, in]` starts at `a_offset`, `B [out, rank]` at `b_offset`, both row-major. Rank 0
    means this adapter leaves the slice alone.
    """

    rank: int
    scaling: float
    a_offset: int
    b_offset: int


# Factors of one adapter, `[layer][projection][slice]`, absolute in the slab.
AdapterFactors = Sequence[Sequence[Sequence[LoraFactors]]]


class FactorTable:
    """`table[slot][slice]` of one projection for the adapters of a step.

    `packed` is the same as int64 `[slots, slices, FIELDS]`, contiguous; rows with fewer slices
    than the widest projection end in rank 0. With `fixed_rank`, the contents of `packed` may
    change between uses, within that rank and with offsets that divide by 16.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[LoraFactors]],
        packed: NDArray[np.int64],
        on_device: Tensor | None = None,
        fixed_rank: int | None = None,
    ) -> None:
        self._rows = rows
        self.packed = packed
        self.address: int = packed.ctypes.data
        self.max_rank = int(packed[:, :, 0].max(initial=0)) if fixed_rank is None else fixed_rank
        self._fixed = fixed_rank is not None
        self._on_device = on_device

    @classmethod
    def of(cls, rows: Sequence[Sequence[LoraFactors]] | FactorTable) -> FactorTable:
        if isinstance(rows, FactorTable):
            return rows
        return cls(rows, _pack(rows, max(map(len, rows), default=0)))

    @cached_property
    def alignment(self) -> int:
        """What divides every offset."""
        return 16 if self._fixed else alignment(self.packed)

    @cached_property
    def odd_slots(self) -> tuple[int, ...]:
        """Adapters of which a factor, or a row of B, begins between two pairs of elements."""
        odd = (self.packed[:, :, :3] & 1).any(axis=(1, 2))
        return tuple(np.flatnonzero(odd).tolist())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, slot: int) -> Sequence[LoraFactors]:
        return self._rows[slot]

    def __iter__(self) -> Iterator[Sequence[LoraFactors]]:
        return iter(self._rows)

    def on(self, device: torch.device) -> Tensor:
        """The packed table as a tensor of the device, copied at most once."""
        if self._on_device is None:
            self._on_device = torch.from_numpy(self.packed).to(device)
        return self._on_device


def alignment(packed: NDArray[np.int64]) -> int:
    """What divides every offset: it lets a GPU read several elements at once. 16, 8 or 1."""
    return next(n for n in (16, 8, 1) if not (packed[..., 1:3] % n).any())


def pack_adapter(factors: AdapterFactors) -> NDArray[np.int64]:
    """One adapter as int64 `[layers, projections, slices, FIELDS]`: made once, at its upload."""
    widest = max(len(slices) for layer in factors for slices in layer)
    return np.stack([_pack(layer, widest) for layer in factors])


def step_tables(
    adapters: Sequence[AdapterFactors],
    packed: Sequence[NDArray[np.int64]],
    device: torch.device,
) -> tuple[tuple[FactorTable, ...], ...]:
    """`[layer][projection]`: the tables of a step, by slot, with one copy to the device."""
    whole = np.ascontiguousarray(np.stack(packed, axis=2))
    layers, projections = whole.shape[:2]
    on_device = None if device.type == "cpu" else torch.from_numpy(whole).to(device)
    return tuple(
        tuple(
            FactorTable(
                [adapter[layer][projection] for adapter in adapters],
                whole[layer, projection],
                None if on_device is None else on_device[layer, projection],
            )
            for projection in range(projections)
        )
        for layer in range(layers)
    )


def _pack(rows: Sequence[Sequence[LoraFactors]], slices: int) -> NDArray[np.int64]:
    packed = np.zeros((len(rows), slices, FIELDS), dtype=np.int64)
    for i, row in enumerate(rows):
        for s, factors in enumerate(row):
            packed[i, s, :3] = factors.rank, factors.a_offset, factors.b_offset
            packed[i, s, 3] = np.float64(factors.scaling).view(np.int64)
    return packed
