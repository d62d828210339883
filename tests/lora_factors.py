"""Random adapters in a slab, and what they add to a projection, in float64."""

from __future__ import annotations

import numpy as np
import torch
from lorad_kernels import LoraFactors

# Error of one rounding to the dtype, relative to the magnitudes that were summed.
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


class RandomAdapters:
    """Random factors packed into a slab whose free bytes are NaN: reading them would show."""

    def __init__(self, ranks, width, outs, dtype, align=1):
        """Every factor begins at a multiple of `align` elements."""
        self.table, parts, position = [], [], 0

        def place(tensor):
            nonlocal position
            first, gap = position, 5 + -(tensor.numel() + 5) % align
            parts.append(tensor.reshape(-1))
            parts.append(torch.full((gap,), torch.nan, dtype=dtype))
            position += tensor.numel() + gap
            return first

        self.outs = outs
        for rank in ranks:
            row = []
            for out in outs:
                a = torch.randn(rank, width).to(dtype) / width**0.5
                b = torch.randn(out, rank).to(dtype)
                row.append(LoraFactors(rank, 1.7, place(a), place(b)))
            self.table.append(row)
        self.slab = torch.cat(parts)
        self.width = width

    @property
    def starts(self):
        return [0, *np.cumsum(self.outs).tolist()]

    def expected(self, y, x, slots):
        """In float64, and the size of what was summed."""
        want, size = y.double(), y.double().abs()
        for t, slot in enumerate(slots):
            if slot is None:
                continue
            for s, f in enumerate(self.table[slot]):
                out = self.outs[s]
                a = self.slab[f.a_offset :][: f.rank * self.width].view(f.rank, self.width)
                b = self.slab[f.b_offset :][: out * f.rank].view(out, f.rank)
                a, b, row = a.double(), b.double(), x[t].double()
                columns = slice(self.starts[s], self.starts[s + 1])
                want[t, columns] += f.scaling * (b @ (a @ row))
                size[t, columns] += f.scaling * (b.abs() @ (a.abs() @ row.abs()))
        return want, size
