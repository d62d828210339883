"""LoRA deltas on the CPU: all segments and slices of a projection in two passes over the factors.

Shrink writes h = x A^T in float32, expand adds scaling * h B^T to y. The factors are read where
they lie in the slab, once per chunk of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from numba import carray, float32, float64, int64, uint16
from torch import Tensor

from lorad_kernels import cpu_activations
from lorad_kernels.cpu_dots import dot_strip, strip_rows
from lorad_kernels.cpu_simd import add_scaled
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel, constant
from lorad_kernels.cpu_work import array_at, work_items

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.segments import LoraSegments

_RANKS = 16  # rows of A that are computed together
_COLUMNS = 128  # columns of y
_AHEAD = 4096  # elements between what is read and what is fetched
_ITEMS = 4  # work items for each thread at least: they differ in size, as ranks do


@numba.njit
def _shrink(arguments, dtype):  # type: ignore[no-untyped-def]
    """h[t, s * max_rank + j] = x[t] . A[slot(t), s][j]."""
    x = carray(array_at(arguments[FIRST], dtype), 1)
    x_stride, width = arguments[FIRST + 1], arguments[FIRST + 2]
    slab = carray(array_at(arguments[FIRST + 3], dtype), 1)
    table = carray(array_at(arguments[FIRST + 4], int64), 1)
    table_slices, slices = arguments[FIRST + 5], arguments[FIRST + 6]
    chunks = carray(array_at(arguments[FIRST + 7], int64), 1)
    h = carray(array_at(arguments[FIRST + 8], float32), 1)
    max_rank, parts = arguments[FIRST + 9], arguments[FIRST + 10]
    blocks = (max_rank + _RANKS - 1) // _RANKS
    for item in work_items(arguments):
        chunk, part = item // parts, item % parts
        start, end = chunks[3 * chunk], chunks[3 * chunk + 1]
        rows = strip_rows(end - start)
        for unit in range(slices * blocks * part // parts, slices * blocks * (part + 1) // parts):
            s, first = unit // blocks, unit % blocks * _RANKS
            entry = (chunks[3 * chunk + 2] * table_slices + s) * 4
            rank, a_offset = table[entry], table[entry + 1]
            if first >= rank:
                continue
            for t in range(start, end, rows):
                dot_strip(
                    rows, x, t * x_stride, x_stride, end - t,
                    slab, a_offset + first * width, width, min(_RANKS, rank - first),
                    _AHEAD if t == start else 0, width,
                    h, (t * slices + s) * max_rank + first, slices * max_rank,
                )  # fmt: skip


@numba.njit
def _expand(arguments, dtype):  # type: ignore[no-untyped-def]
    """y[t, n] += scaling * h[t, s] . B[slot(t), s][n - start of s], for n in slice s."""
    y = carray(array_at(arguments[FIRST], dtype), 1)
    y_stride, width = arguments[FIRST + 1], arguments[FIRST + 2]
    slab = carray(array_at(arguments[FIRST + 3], dtype), 1)
    table = carray(array_at(arguments[FIRST + 4], int64), 1)
    scalings = carray(array_at(arguments[FIRST + 4], float64), 1)
    table_slices, slices = arguments[FIRST + 5], arguments[FIRST + 6]
    chunks = carray(array_at(arguments[FIRST + 7], int64), 1)
    h = carray(array_at(arguments[FIRST + 8], float32), 1)
    max_rank, parts = arguments[FIRST + 9], arguments[FIRST + 10]
    starts = carray(array_at(arguments[FIRST + 11], int64), 1)
    blocks = (width + _COLUMNS - 1) // _COLUMNS
    h_stride = slices * max_rank
    sums = np.empty(4 * _COLUMNS, np.float32)
    for item in work_items(arguments):
        chunk, part = item // parts, item % parts
        start, end = chunks[3 * chunk], chunks[3 * chunk + 1]
        rows = strip_rows(end - start)
        begin = blocks * part // parts * _COLUMNS
        stop = min(width, blocks * (part + 1) // parts * _COLUMNS)
        for s in range(slices):
            entry = (chunks[3 * chunk + 2] * table_slices + s) * 4
            rank, b_offset = table[entry], table[entry + 2]
            if rank == 0:
                continue
            scaling = float32(scalings[entry + 3])
            for first in range(max(begin, starts[s]), min(stop, starts[s + 1]), _COLUMNS):
                columns = min(_COLUMNS, min(stop, starts[s + 1]) - first)
                for t in range(start, end, rows):
                    dot_strip(
                        rows, h, t * h_stride + s * max_rank, h_stride, end - t,
                        slab, b_offset + (first - starts[s]) * rank, rank, columns,
                        _AHEAD if t == start else 0, rank, sums, 0, _COLUMNS,
                    )  # fmt: skip
                    for i in range(min(rows, end - t)):
                        place = (t + i) * y_stride + first
                        add_scaled(y, place, columns, sums, i * _COLUMNS, scaling)


def _shrink_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _shrink(carray(arguments, ARGUMENTS), uint16)


def _shrink_float32(arguments):  # type: ignore[no-untyped-def]
    _shrink(carray(arguments, ARGUMENTS), float32)


def _expand_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _expand(carray(arguments, ARGUMENTS), uint16)


def _expand_float32(arguments):  # type: ignore[no-untyped-def]
    _expand(carray(arguments, ARGUMENTS), float32)


KERNELS = {
    torch.bfloat16: (Kernel(_shrink_bfloat16), Kernel(_expand_bfloat16)),
    torch.float32: (Kernel(_shrink_float32), Kernel(_expand_float32)),
}


def serves(y: Tensor, x: Tensor, slab: Tensor) -> bool:
    """Whether `add_chunks` computes this dtype and layout."""
    alike = y.dtype is x.dtype is slab.dtype
    return alike and y.dtype in KERNELS and y.stride(1) == 1 and x.stride(1) == 1


def add_chunks(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    """`ops.add_lora` for the short segments of a batch; rows of y and x are contiguous."""
    shrink, expand = KERNELS[y.dtype]
    chunks, slices = segments.chunks, len(slice_starts) - 1
    if len(chunks) == 0:
        return
    h = cpu_activations.empty((x.shape[0], slices, table.max_rank), torch.float32)
    shared = (
        slab, table.address, table.packed.shape[1], slices, segments.chunks_address,
        h, table.max_rank,
    )  # fmt: skip
    work = len(chunks) * table.max_rank * y.element_size()
    # The factors of a chunk lie one behind the other: read by one thread if there are enough.
    wanted = -(-_ITEMS * torch.get_num_threads() // len(chunks))
    parts = min(wanted, slices * -(-table.max_rank // _RANKS))
    shrink(
        len(chunks) * parts, work * x.shape[1] * slices,
        x, x.stride(0), x.shape[1], *shared, parts, keep=(table, segments),
    )  # fmt: skip
    parts = min(wanted, -(-y.shape[1] // _COLUMNS))
    expand(
        len(chunks) * parts, work * y.shape[1],
        y, y.stride(0), y.shape[1], *shared, parts, constant(tuple(slice_starts)),
        keep=(table, segments),
    )  # fmt: skip
