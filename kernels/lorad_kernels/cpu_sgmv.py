"""LoRA of long segments on Intel's matrix unit (AMX), in bfloat16.

First the factors of each adapter are laid out as the unit takes them, once for all its rows. Then
a work item is some rows of one segment: x A^T, kept to 16 bits as the sum of two bfloat16, times
B^T, added to y with one rounding. A row's result has the same bits whatever is beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, float32, float64, int64, types, uint16, uint32
from numba.extending import intrinsic
from torch import Tensor

from lorad_kernels import cpu_activations
from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_simd import add_scaled, at, data_of
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel, constant
from lorad_kernels.cpu_tiles import (
    DEPTH,
    SIDE,
    available,
    configure,
    multiply,
    release,
    set_transposed,
)
from lorad_kernels.cpu_work import array_at, work_items

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.segments import LoraSegments

_ROWS = 64  # of a work item: what is read of B serves so many
_BLOCK = 4 * SIDE


@intrinsic
def _set_split(typingctx, out, high, low, count, x, x_offset):  # type: ignore[no-untyped-def]
    """out[high + i] + out[low + i] = x[i] to 16 bits, in bfloat16."""
    n = types.int64
    signature = types.void(out, n, n, n, x, n)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target, source = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 4))

        def step(k: Any, mask: Any) -> None:
            value = v.load(builder, at(builder, source, args[5], k), types.float32, mask)
            rounded = v.widen(builder, v.to_bfloat16(builder, value), types.uint16)
            v.put(builder, value, at(builder, target, args[1], k), types.uint16, mask)
            rest = builder.fsub(value, rounded)
            v.put(builder, rest, at(builder, target, args[2], k), types.uint16, mask)

        v.for_lanes(builder, args[3], step)
        return context.get_dummy_value()

    return signature, generate


def _lay_out(arguments):  # type: ignore[no-untyped-def]
    """A work item is one slice of one adapter's factors.

    a[16 ranks, q, m] = A[rank m, 2 q : 2 q + 2], b[16 columns, q, m] = B[column m, 2 q : 2 q + 2],
    the ranks of b filled up with zeros to a multiple of DEPTH.
    """
    block = carray(arguments, ARGUMENTS)
    slab = carray(array_at(block[FIRST], uint32), 1)
    table, table_slices = carray(array_at(block[FIRST + 1], int64), 1), block[FIRST + 2]
    slots = carray(array_at(block[FIRST + 3], int64), 1)
    slices, width = block[FIRST + 4], block[FIRST + 5]
    starts = carray(array_at(block[FIRST + 6], int64), 1)
    most_rank = block[FIRST + 7]
    a = carray(array_at(block[FIRST + 8], uint32), 1)
    b = carray(array_at(block[FIRST + 9], uint32), 1)
    for item in work_items(block):
        s = item % slices
        entry = (slots[item // slices] * table_slices + s) * 4
        rank, a_offset, b_offset = table[entry], table[entry + 1], table[entry + 2]
        target = item * most_rank * width // 2
        for first in range(0, rank, SIDE):
            for q in range(0, width // 2, SIDE):
                set_transposed(
                    a, target + first * width // 2 + q * SIDE,
                    slab, (a_offset + first * width) // 2 + q, width // 2, rank - first, SIDE,
                )  # fmt: skip
        depth = (rank + DEPTH - 1) // DEPTH * DEPTH
        target = (item // slices * starts[slices] + starts[s]) * most_rank // 2
        for first in range(0, starts[s + 1] - starts[s], SIDE):
            for q in range(0, depth // 2, SIDE):
                set_transposed(
                    b, target + first * depth // 2 + q * SIDE,
                    slab, (b_offset + first * rank) // 2 + q, rank // 2, SIDE, rank // 2 - q,
                )  # fmt: skip


def _apply(arguments):  # type: ignore[no-untyped-def]
    """A work item is up to _ROWS rows of a segment; y += scaling (x A^T) B^T, slice by slice."""
    block = carray(arguments, ARGUMENTS)
    x, x_stride = carray(array_at(block[FIRST], uint16), 1), block[FIRST + 1]
    width = block[FIRST + 2]
    y, y_stride = carray(array_at(block[FIRST + 3], uint16), 1), block[FIRST + 4]
    table = carray(array_at(block[FIRST + 5], int64), 1)
    scalings = carray(array_at(block[FIRST + 5], float64), 1)
    table_slices = block[FIRST + 6]
    pieces = carray(array_at(block[FIRST + 7], int64), 1)
    slices = block[FIRST + 8]
    starts = carray(array_at(block[FIRST + 9], int64), 1)
    most_rank = block[FIRST + 10]
    a = carray(array_at(block[FIRST + 11], uint32), 1)
    b = carray(array_at(block[FIRST + 12], uint32), 1)
    rows = np.zeros(SIDE * width, np.uint16)
    h = np.empty(SIDE * most_rank, np.float32)
    halves = np.zeros(_ROWS * 2 * most_rank, np.uint16)
    sums = np.empty(SIDE * _BLOCK, np.float32)
    configure()
    for item in work_items(block):
        start, end = pieces[4 * item], pieces[4 * item + 1]
        slot, place = pieces[4 * item + 2], pieces[4 * item + 3]
        for s in range(slices):
            entry = (slot * table_slices + s) * 4
            rank = table[entry]
            if rank == 0:
                continue
            scaling = float32(scalings[entry + 3])
            ranks = (rank + SIDE - 1) // SIDE * SIDE
            depth = (rank + DEPTH - 1) // DEPTH * DEPTH
            a_place = (place * slices + s) * most_rank * width // 2
            b_place = (place * starts[slices] + starts[s]) * most_rank // 2
            for t in range(start, end, SIDE):
                source, x_place, row_stride = x, t * x_stride, x_stride
                if t + SIDE > end:
                    for r in range(end - t):
                        for i in range(width):
                            rows[r * width + i] = x[(t + r) * x_stride + i]
                    source, x_place, row_stride = rows, 0, width
                multiply(
                    source, x_place, row_stride, width, a, a_place, SIDE, SIDE * width // 2,
                    SIDE * DEPTH // 2, width, h, 0, most_rank, ranks,
                )  # fmt: skip
                for r in range(SIDE):
                    high = (t - start + r) * 2 * depth
                    _set_split(halves, high, high + depth, rank, h, r * most_rank)
                    halves[high + rank : high + depth] = 0
                    halves[high + depth + rank : high + 2 * depth] = 0
            for n in range(starts[s], starts[s + 1], _BLOCK):
                columns = min(_BLOCK, starts[s + 1] - n)
                for t in range(start, end, SIDE):
                    high, there = (t - start) * 2 * depth, b_place + (n - starts[s]) * depth // 2
                    multiply(
                        halves, high, 2 * depth, 2 * depth, b, there, SIDE, SIDE * depth // 2,
                        SIDE * DEPTH // 2, depth, sums, 0, _BLOCK, columns,
                    )  # fmt: skip
                    for r in range(min(SIDE, end - t)):
                        target = (t + r) * y_stride + n
                        add_scaled(y, target, columns, sums, r * _BLOCK, scaling)
    release()


LAY_OUT, APPLY = Kernel(_lay_out), Kernel(_apply)


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What to compile for a serving dtype."""
    return (LAY_OUT, APPLY) if dtype is torch.bfloat16 and available() else ()


def serves(y: Tensor, x: Tensor, slab: Tensor, slice_starts: Sequence[int]) -> bool:
    """Whether `add_long` computes this dtype and layout on this machine."""
    if not available():
        return False
    alike = y.dtype is x.dtype is slab.dtype is torch.bfloat16
    fits = y.stride(1) == x.stride(1) == 1 and x.shape[1] % DEPTH == 0
    whole = all(start % SIDE == 0 for start in slice_starts)
    return alike and fits and whole


def add_long(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    """`ops.add_lora` for the long segments of a batch; rows of y and x are contiguous.

    Leaves out the `odd_slots` of the table.
    """
    slots, pieces = segments.long_pieces(_ROWS, table.odd_slots)
    if not len(slots):
        return
    slices, width = len(slice_starts) - 1, x.shape[1]
    most_rank = -(-int(table.packed[slots.numpy(), :, 0].max()) // DEPTH) * DEPTH
    if most_rank == 0:
        return
    a = cpu_activations.empty((len(slots), slices, most_rank, width // 2), torch.int32)
    b = cpu_activations.empty((len(slots), y.shape[1], most_rank // 2), torch.int32)
    starts = constant(tuple(slice_starts))
    LAY_OUT(
        len(slots) * slices, a.nbytes + b.nbytes, slab, table.address, table.packed.shape[1],
        slots, slices, width, starts, most_rank, a, b, keep=table,
    )  # fmt: skip
    APPLY(
        len(pieces), 2 * y.nbytes, x, x.stride(0), width, y, y.stride(0), table.address,
        table.packed.shape[1], pieces, slices, starts, most_rank, a, b, keep=(table, segments),
    )  # fmt: skip
