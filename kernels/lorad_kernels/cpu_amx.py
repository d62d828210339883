"""Base projections of up to 256 rows on Intel's matrix unit (AMX), in bfloat16.

The product of 16 rows of the weight, read where they lie, and 16 rows of x takes 16 cycles per 32
columns: as fast as any memory delivers the weight. What is computed is the transpose,
y^T = W x^T, so that only x, which is small, must be laid out anew: as pairs of neighbours along
k, the rows of x beside each other. A row of y comes out with the same bits whatever rows are
beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray, types, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lorad_kernels import cpu_activations
from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_simd import data_of
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel
from lorad_kernels.cpu_tiles import (
    DEPTH,
    I8,
    SIDE,
    available,
    configure,
    emit,
    place_at,
    put_transposed,
    release,
    set_transposed,
)
from lorad_kernels.cpu_work import array_at, work_items

_WEIGHT_TILES = 2  # beside each other in one pass
_COLUMNS = SIDE * _WEIGHT_TILES  # rows of the weight in a work item


def _weight_tiles(weights: int, inputs: int) -> Callable[..., None]:
    """sums[i, j] = W_i x_j^T for `weights` tiles of 16 rows of W, `inputs` of 16 rows of x."""

    @intrinsic
    def multiply(  # type: ignore[no-untyped-def]
        typingctx, w, w_offset, width, x, x_offset, ahead, sums
    ):
        integer = types.int64
        signature = types.void(w, integer, integer, x, integer, integer, sums)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            w_data = data_of(context, builder, sig.args[0], args[0])
            x_data = data_of(context, builder, sig.args[3], args[3])
            out = data_of(context, builder, sig.args[6], args[6])
            width, w_stride = args[2], builder.mul(args[2], v.I64(2))
            x_tile = builder.mul(width, v.I64(SIDE // 2))  # pairs in a tile's rows of x
            sum_tiles = [(i, j) for i in range(weights) for j in range(inputs)]

            def load(tile: int, pointer: Any, stride: Any) -> None:
                emit(builder, "tileloadd64", [I8(tile), pointer, stride])

            for n in range(len(sum_tiles)):
                emit(builder, "tilezero", [I8(n)])
            with cgutils.for_range_slice(builder, v.I64(0), width, v.I64(DEPTH)) as (k, _):
                for j in range(inputs):
                    first = builder.add(args[4], builder.mul(x_tile, v.I64(j)))
                    place = builder.add(first, builder.mul(k, v.I64(SIDE // 2)))
                    load(4 + _WEIGHT_TILES + j, place_at(builder, x_data, place), v.I64(64))
                for i in range(weights):
                    row = builder.add(args[1], builder.mul(width, v.I64(i * SIDE)))
                    load(4 + i, place_at(builder, w_data, builder.add(row, k)), w_stride)
                    # In the order of memory, which the processor's own prefetchers go along with.
                    there = builder.add(row, builder.mul(k, v.I64(SIDE)))
                    there = builder.add(there, args[5])
                    for step in range(SIDE):
                        line = builder.add(there, v.I64(step * DEPTH))
                        v.prefetch(builder, builder.gep(w_data, [line]))
                for n, (i, j) in enumerate(sum_tiles):
                    tiles = [I8(n), I8(4 + i), I8(4 + _WEIGHT_TILES + j)]
                    emit(builder, "tdpbf16ps", tiles)
            for n in range(len(sum_tiles)):
                emit(
                    builder,
                    "tilestored64",
                    [I8(n), place_at(builder, out, v.I64(n * 256)), v.I64(64)],
                )
            return context.get_dummy_value()

        return signature, generate

    return multiply  # type: ignore[no-any-return]


_multiply_1x1, _multiply_1x2 = _weight_tiles(1, 1), _weight_tiles(1, 2)
_multiply_2x1, _multiply_2x2 = _weight_tiles(2, 1), _weight_tiles(2, 2)


def _lay_out(arguments):  # type: ignore[no-untyped-def]
    """pairs[j, q, m] = x[16 j + m, 2 q : 2 q + 2]."""
    block = carray(arguments, ARGUMENTS)
    x = carray(array_at(block[FIRST], uint32), 1)
    x_stride, count, pairs = block[FIRST + 1], block[FIRST + 2], block[FIRST + 3]
    out = carray(array_at(block[FIRST + 4], uint32), 1)
    for item in work_items(block):
        first, target = item * SIDE, item * pairs * SIDE
        for q in range(0, pairs, SIDE):
            set_transposed(
                out, target + q * SIDE, x, first * x_stride + q, x_stride, count - first, SIDE
            )


def _multiply(arguments):  # type: ignore[no-untyped-def]
    """A work item is 32 rows of the weight, for all rows of x."""
    block = carray(arguments, ARGUMENTS)
    x = carray(array_at(block[FIRST], uint32), 1)
    count, width = block[FIRST + 1], block[FIRST + 2]
    weight = carray(array_at(block[FIRST + 3], uint16), 1)
    features = block[FIRST + 4]
    y = carray(array_at(block[FIRST + 5], uint16), 1)
    bias = carray(array_at(block[FIRST + 6], uint16), 1)
    has_bias = block[FIRST + 6] != 0
    # What this thread will most likely claim next: the others take the items between.
    next_item = block[FIRST + 7] * _COLUMNS * width
    sums = np.empty(4 * 256, np.float32)
    configure()
    for item in work_items(block):
        first = item * _COLUMNS
        weights = min(_COLUMNS, features - first) // SIDE
        for row in range(0, count, 2 * SIDE):
            inputs = (min(2 * SIDE, count - row) + SIDE - 1) // SIDE
            ahead = next_item if row == 0 else 0
            start, x_start = first * width, row * width // 2
            if weights == 2 and inputs == 2:
                _multiply_2x2(weight, start, width, x, x_start, ahead, sums)
            elif weights == 2:
                _multiply_2x1(weight, start, width, x, x_start, ahead, sums)
            elif inputs == 2:
                _multiply_1x2(weight, start, width, x, x_start, ahead, sums)
            else:
                _multiply_1x1(weight, start, width, x, x_start, ahead, sums)
            for n in range(weights * inputs):
                column = first + n // inputs * SIDE
                m = row + n % inputs * SIDE
                put_transposed(
                    sums, n * 256, bias, column if has_bias else -1,
                    y, m * features + column, features, count - m,
                )  # fmt: skip
    release()


LAY_OUT, MULTIPLY = Kernel(_lay_out), Kernel(_multiply)


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What to compile for a serving dtype."""
    return (LAY_OUT, MULTIPLY) if dtype is torch.bfloat16 and available() else ()


def serves(weight: Tensor) -> bool:
    """Whether `multiply` computes products with this weight on this machine."""
    features, width = weight.shape
    fits = features % SIDE == 0 and width % DEPTH == 0 and weight.is_contiguous()
    return fits and weight.dtype is torch.bfloat16 and available()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[T, in]` times weight `[out, in]` transposed, plus bias: `[T, out]`."""
    (features, width), count = weight.shape, x.shape[0]
    tiles = -(-count // SIDE)
    pairs = cpu_activations.empty((tiles, width // 2, SIDE), torch.int32)
    y = cpu_activations.empty((count, features), x.dtype)
    LAY_OUT(tiles, 2 * x.numel(), x, x.stride(0) // 2, count, width // 2, pairs)
    MULTIPLY(
        -(-features // _COLUMNS), 2 * weight.numel(), pairs, count, width, weight, features, y,
        0 if bias is None else bias, torch.get_num_threads(),
    )  # fmt: skip
    return y
