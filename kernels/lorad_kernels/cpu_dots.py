"""Sums of products on the CPU: many rows of a matrix with a few vectors, without a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_simd import at, clamped, data_of
from lorad_kernels.cpu_vectors import LANES

# Columns of a strip that are read side by side: more streams than that the hardware does not
# fetch ahead, and fewer would wait for the multiply-adds.
_STREAMS = 4


def _dot_strip(rows: int) -> Callable[..., None]:
    columns = LANES // rows

    @intrinsic
    def strip(  # type: ignore[no-untyped-def]
        typingctx,
        x,
        x_offset,
        x_stride,
        x_count,
        w,
        w_offset,
        w_stride,
        w_count,
        ahead,
        length,
        out,
        out_offset,
        out_stride,
    ):
        integer = types.int64
        signature = types.void(
            *(x, integer, integer, integer, w, integer, integer, integer, integer, integer),
            *(out, integer, integer),
        )

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_data = data_of(context, builder, sig.args[0], args[0])
            w_data = data_of(context, builder, sig.args[4], args[4])
            out_data = data_of(context, builder, sig.args[10], args[10])
            w_stride, w_count = args[6], args[7]
            xs = [clamped(builder, args[1], i, args[2], args[3]) for i in range(rows)]
            places = [cgutils.alloca_once(builder, v.VECTOR) for _ in range(_STREAMS * rows)]

            def dots(ws: list[Any]) -> list[Any]:
                """Sums over k, by lane, of each x with each of a few columns."""
                sums = places[: len(ws) * rows]
                for place in sums:
                    builder.store(ir.Constant(v.VECTOR, None), place)

                is_wide = sig.args[4].dtype == types.float32  # a vector fills a cache line

                def step(k: Any, mask: Any, starts_line: bool) -> None:
                    values = [
                        v.load(builder, at(builder, x_data, offset, k), sig.args[0].dtype, mask)
                        for offset in xs
                    ]
                    for column, offset in enumerate(ws):
                        pointer = at(builder, w_data, offset, k)
                        weight = v.load(builder, pointer, sig.args[4].dtype, mask)
                        if starts_line or is_wide:
                            v.prefetch(builder, builder.gep(pointer, [args[8]]))
                        for row, value in enumerate(values):
                            place = sums[row * len(ws) + column]
                            builder.store(v.fma(builder, value, weight, builder.load(place)), place)

                v.for_lines(builder, args[9], step)
                return [builder.load(place) for place in sums]

            def column(start: Any, index: Any, left: Any) -> Any:
                if left is not None:  # missing columns repeat the last one
                    last = builder.sub(left, v.I64(1))
                    inside = builder.icmp_signed("<", index, left)
                    index = builder.select(inside, index, last)
                return builder.add(start, builder.mul(index, w_stride))

            def products(ws: list[Any], mask: Any) -> list[Any]:
                """`dots` of a length that fits in one vector."""
                values = [
                    v.load(builder, at(builder, x_data, offset, v.I64(0)), sig.args[0].dtype, mask)
                    for offset in xs
                ]
                weights = [
                    v.load(builder, at(builder, w_data, offset, v.I64(0)), sig.args[4].dtype, mask)
                    for offset in ws
                ]
                v.prefetch(builder, builder.gep(w_data, [builder.add(ws[0], args[8])]))
                v.prefetch(builder, builder.gep(w_data, [builder.add(ws[-1], args[8])]))
                return [builder.fmul(value, weight) for value in values for weight in weights]

            found = cgutils.alloca_once(builder, v.VECTOR, size=v.I32(LANES))

            def tile(n: Any, left: Any, mask: Any = None) -> None:
                """`columns` columns from n on; with `left` only so many of them exist."""
                start = builder.add(args[5], builder.mul(n, w_stride))
                with cgutils.for_range_slice(
                    builder, v.I64(0), v.I64(columns), v.I64(_STREAMS)
                ) as (first, _):
                    ws = [
                        column(start, builder.add(first, v.I64(i)), left) for i in range(_STREAMS)
                    ]
                    sums = dots(ws) if mask is None else products(ws, mask)
                    for i, value in enumerate(sums):
                        row, c = divmod(i, _STREAMS)
                        place = builder.add(first, v.I64(row * columns + c))
                        builder.store(value, builder.gep(found, [place]))
                total = v.sum_each(
                    builder, [builder.load(builder.gep(found, [v.I64(i)])) for i in range(LANES)]
                )
                for row in range(rows):
                    place = builder.add(args[11], builder.mul(v.I64(row), args[12]))
                    pointer = at(builder, out_data, place, n)
                    with builder.if_then(builder.icmp_signed("<", v.I64(row), args[3])):
                        v.store_part(builder, total, row * columns, columns, pointer, left)

            whole = builder.and_(w_count, v.I64(-columns))
            left = builder.sub(w_count, whole)

            def tiles(mask: Any) -> None:
                with cgutils.for_range_slice(builder, v.I64(0), whole, v.I64(columns)) as (n, _):
                    tile(n, None, mask)
                with builder.if_then(builder.icmp_signed(">", left, v.I64(0))):
                    tile(whole, left, mask)

            with builder.if_else(builder.icmp_signed(">", args[9], v.I64(LANES))) as (long, short):
                with long:
                    tiles(None)
                with short:
                    tiles(v.first_lanes(builder, args[9]))
            return context.get_dummy_value()

        return signature, generate

    return strip  # type: ignore[no-any-return]


_dot_strip_1, _dot_strip_2, _dot_strip_4 = (_dot_strip(rows) for rows in (1, 2, 4))


@numba.njit
def strip_rows(count):  # type: ignore[no-untyped-def]
    """How many rows of x a strip takes when `count` are left."""
    return 4 if count > 2 else count


@numba.njit
def dot_strip(  # type: ignore[no-untyped-def]
    rows, x, x_offset, x_stride, x_count, w, w_offset, w_stride, w_count, ahead, length,
    out, out_offset, out_stride,
):  # fmt: skip
    """out[i, j] = sum over k < length of x[i, k] * w[j, k], for i < rows, j < w_count.

    `rows` is 1, 2 or 4; of them only the first `x_count` exist. Row i of x starts at
    `x_offset + i * x_stride`, elements; row j of w and row i of out (float32) likewise. What
    lies `ahead` elements behind each piece of w is fetched into the cache: rows of w are more
    streams than the hardware foresees.
    """
    if rows == 1:
        _dot_strip_1(
            x, x_offset, x_stride, x_count, w, w_offset, w_stride, w_count, ahead, length,
            out, out_offset, out_stride,
        )  # fmt: skip
    elif rows == 2:
        _dot_strip_2(
            x, x_offset, x_stride, x_count, w, w_offset, w_stride, w_count, ahead, length,
            out, out_offset, out_stride,
        )  # fmt: skip
    else:
        _dot_strip_4(
            x, x_offset, x_stride, x_count, w, w_offset, w_stride, w_count, ahead, length,
            out, out_offset, out_stride,
        )  # fmt: skip


def _add_weighted(rows: int, vectors: int) -> Callable[..., None]:
    @intrinsic
    def add(  # type: ignore[no-untyped-def]
        typingctx,
        weights,
        w_offset,
        w_stride,
        count,
        x,
        x_offset,
        x_stride,
        ahead,
        out,
        out_offset,
        out_stride,
    ):
        integer = types.int64
        signature = types.void(
            *(weights, integer, integer, integer, x, integer, integer, integer),
            *(out, integer, integer),
        )

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            weights_data = data_of(context, builder, sig.args[0], args[0])
            x_data = data_of(context, builder, sig.args[4], args[4])
            out_data = data_of(context, builder, sig.args[8], args[8])

            def row_of(offset: Any, row: int, stride: Any) -> Any:
                return builder.add(offset, builder.mul(v.I64(row), stride))

            steps = [v.I64(LANES * i) for i in range(vectors)]
            targets = [
                at(builder, out_data, row_of(args[9], row, args[10]), step)
                for row in range(rows)
                for step in steps
            ]
            sums = [cgutils.alloca_once(builder, v.VECTOR) for _ in targets]
            for place, target in zip(sums, targets, strict=True):
                builder.store(v.load(builder, target, types.float32), place)
            with cgutils.for_range(builder, args[3]) as loop:
                first = builder.add(args[5], builder.mul(loop.index, args[6]))
                pointers = [at(builder, x_data, first, step) for step in steps]
                values = [v.load(builder, pointer, sig.args[4].dtype) for pointer in pointers]
                # A cache line holds two vectors of bfloat16, one of float32.
                for pointer in pointers[:: 1 if sig.args[4].dtype == types.float32 else 2]:
                    v.prefetch(builder, builder.gep(pointer, [args[7]]))
                for row in range(rows):
                    where = at(builder, weights_data, row_of(args[1], row, args[2]), loop.index)
                    weight = v.splat(builder, builder.load(where))
                    for i, value in enumerate(values):
                        place = sums[row * vectors + i]
                        builder.store(v.fma(builder, weight, value, builder.load(place)), place)
            for place, target in zip(sums, targets, strict=True):
                v.store(builder, builder.load(place), target)
            return context.get_dummy_value()

        return signature, generate

    return add  # type: ignore[no-any-return]


_add_1x64, _add_2x64, _add_3x64, _add_4x64 = (_add_weighted(rows, 4) for rows in (1, 2, 3, 4))
_add_1x16 = _add_weighted(1, 1)


@numba.njit
def add_weighted(  # type: ignore[no-untyped-def]
    rows, weights, w_offset, w_stride, count, x, x_offset, x_stride, ahead, width,
    out, out_offset, out_stride,
):  # fmt: skip
    """out[r, d] += sum over j < count of weights[r, j] * x[j, d], for r < rows, d < width.

    j ascends. Row r of weights starts at `w_offset + r * w_stride`, rows of x and out likewise;
    `ahead` as in `dot_strip`. width is a multiple of 16; out and weights are float32.
    """
    for r in range(0, rows, 4):
        w, o, fetch = w_offset + r * w_stride, out_offset + r * out_stride, ahead if r == 0 else 0
        d = 0
        while d + 64 <= width:
            if rows - r >= 4:
                _add_4x64(weights, w, w_stride, count, x, x_offset + d, x_stride, fetch,
                          out, o + d, out_stride)  # fmt: skip
            elif rows - r == 3:
                _add_3x64(weights, w, w_stride, count, x, x_offset + d, x_stride, fetch,
                          out, o + d, out_stride)  # fmt: skip
            elif rows - r == 2:
                _add_2x64(weights, w, w_stride, count, x, x_offset + d, x_stride, fetch,
                          out, o + d, out_stride)  # fmt: skip
            else:
                _add_1x64(weights, w, w_stride, count, x, x_offset + d, x_stride, fetch,
                          out, o + d, out_stride)  # fmt: skip
            d += 64
        while d < width:
            for i in range(min(4, rows - r)):
                _add_1x16(weights, w + i * w_stride, 0, count, x, x_offset + d, x_stride, fetch,
                          out, o + i * out_stride + d, 0)  # fmt: skip
            d += 16
