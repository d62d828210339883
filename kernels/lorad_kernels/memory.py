"""Large blocks of memory, laid out as their device reads them fastest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


def empty_block(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised 1-D tensor; on the CPU, in huge pages where the system has them."""
    if device.type == "cpu":
        from lorad_kernels import cpu_memory

        return cpu_memory.empty(elements, dtype)
    return torch.empty(elements, dtype=dtype, device=device)


class Arena:
    """Tensors cut one after the other from one block, each on a multiple of 64 bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        """Room for tensors of these shapes."""
        self._step = _ALIGNMENT // dtype.itemsize
        room = sum(self._padded(torch.Size(shape).numel()) for shape in shapes)
        self._block = empty_block(room, dtype, device)
        self._used = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised."""
        elements = torch.Size(shape).numel()
        taken = self._block[self._used : self._used + elements].view(shape)
        self._used += self._padded(elements)
        return taken

    def _padded(self, elements: int) -> int:
        return -(-elements // self._step) * self._step
