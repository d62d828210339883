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
from lorad_kernels.cpu_threads import ARGUMENTS, COUNT, FIRST, Kernel, constant
from lorad_kernels.cpu_work import array_at, work_items

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.segments import LoraSegments

_RANKS = 16  # rows of A that are computed together
_COLUMNS = 128  # columns of y
_AHEAD = 4096  # elements between what is read and what is fetched
_ITEMS = 4  # work items for each thread
_COLUMN_COST = 8  # of a column of y, whatever its rank, in elements of B


@numba.njit
def _extent(chunks, c, table, table_slices, starts, s, of_columns):  # type: ignore[no-untyped-def]
    """How many rows of A, or columns of y, a chunk has in a slice, and what each costs."""
    rank = table[(chunks[3 * c + 2] * table_slices + s) * 4]
    strips = 1 + (chunks[3 * c + 1] - chunks[3 * c] + 3) // 4  # the first one waits for memory
    if rank == 0:
        return 0, strips
    if of_columns:
        return starts[s + 1] - starts[s], (rank + _COLUMN_COST) * strips
    return rank, strips


@numba.njit
def _blocks(arguments, chunks, table, starts, of_columns):  # type: ignore[no-untyped-def]
    """Yields (chunk, slice, first) of the blocks of each work item that this thread claims.

    A block is some rows of A, or columns of y, of one chunk in one slice. A work item is an
    equal share of all there is to do, in the order of memory: ranks differ so much that with a
    chunk for an item, threads would wait for the one that took the largest rank last.
    """
    table_slices, slices, count = arguments[FIRST + 5], arguments[FIRST + 6], arguments[FIRST + 8]
    block = _COLUMNS if of_columns else _RANKS
    total = 0
    for c in range(count):
        for s in range(slices):
            length, cost = _extent(chunks, c, table, table_slices, starts, s, of_columns)
            total += length * cost
    for item in work_items(arguments):
        low = total * item // arguments[COUNT]
        high = total * (item + 1) // arguments[COUNT]
        place = 0
        for c in range(count):
            if place >= high:
                break
            for s in range(slices):
                length, cost = _extent(chunks, c, table, table_slices, starts, s, of_columns)
                end = place + length * cost
                if low < end:
                    # The first block that begins in this share; the last may end behind it.
                    step = block * cost
                    first = (max(0, low - place) + step - 1) // step * block
                    while first < length and place + first * cost < high:
                        yield c, s, first
                        first += block
                place = end


@numba.njit
def _shrink(arguments, dtype):  # type: ignore[no-untyped-def]
    """h[t, s * max_rank + j] = x[t] . A[slot(t), s][j]."""
    x = carray(array_at(arguments[FIRST], dtype), 1)
    x_stride, width = arguments[FIRST + 1], arguments[FIRST + 2]
    slab = carray(array_at(arguments[FIRST + 3], dtype), 1)
    table = carray(array_at(arguments[FIRST + 4], int64), 1)
    table_slices, slices = arguments[FIRST + 5], arguments[FIRST + 6]
    chunks = carray(array_at(arguments[FIRST + 7], int64), 1)
    starts = carray(array_at(arguments[FIRST + 9], int64), 1)
    h = carray(array_at(arguments[FIRST + 10], float32), 1)
    max_rank = arguments[FIRST + 11]
    for c, s, first in _blocks(arguments, chunks, table, starts, False):
        start, end = chunks[3 * c], chunks[3 * c + 1]
        entry = (chunks[3 * c + 2] * table_slices + s) * 4
        rank, a_offset = table[entry], table[entry + 1]
        rows = strip_rows(end - start)
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
    y_stride = arguments[FIRST + 1]
    slab = carray(array_at(arguments[FIRST + 3], dtype), 1)
    table = carray(array_at(arguments[FIRST + 4], int64), 1)
    scalings = carray(array_at(arguments[FIRST + 4], float64), 1)
    table_slices, slices = arguments[FIRST + 5], arguments[FIRST + 6]
    chunks = carray(array_at(arguments[FIRST + 7], int64), 1)
    starts = carray(array_at(arguments[FIRST + 9], int64), 1)
    h = carray(array_at(arguments[FIRST + 10], float32), 1)
    max_rank = arguments[FIRST + 11]
    h_stride = slices * max_rank
    sums = np.empty(4 * _COLUMNS, np.float32)
    for c, s, first in _blocks(arguments, chunks, table, starts, True):
        start, end = chunks[3 * c], chunks[3 * c + 1]
        entry = (chunks[3 * c + 2] * table_slices + s) * 4
        rank, b_offset = table[entry], table[entry + 2]
        scaling = float32(scalings[entry + 3])
        columns = min(_COLUMNS, starts[s + 1] - starts[s] - first)
        rows = strip_rows(end - start)
        for t in range(start, end, rows):
            dot_strip(
                rows, h, t * h_stride + s * max_rank, h_stride, end - t,
                slab, b_offset + first * rank, rank, columns,
                _AHEAD if t == start else 0, rank, sums, 0, _COLUMNS,
            )  # fmt: skip
            for i in range(min(rows, end - t)):
                place = (t + i) * y_stride + starts[s] + first
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
        slab, table.address, table.packed.shape[1], slices, segments.chunks_address, len(chunks),
        constant(tuple(slice_starts)), h, table.max_rank,
    )  # fmt: skip
    items = _ITEMS * torch.get_num_threads()
    work = len(chunks) * table.max_rank * y.element_size()
    keep = (table, segments)
    shrink(items, work * x.shape[1] * slices, x, x.stride(0), x.shape[1], *shared, keep=keep)
    expand(items, work * y.shape[1], y, y.stride(0), y.shape[1], *shared, keep=keep)
