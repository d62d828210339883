"""Micro-kernels of the CPU path, as LLVM vector code that numba functions call.

Plain loops would leave the order of a sum to the compiler, which chooses it per loop. Here the
order is written down: every dot product is one chain of 16-lane fused multiply-adds over k, then
a fixed tree over the lanes. So a row's result has the same bits whatever rows are computed
beside it, on any number of threads, and no `fastmath` is needed. LLVM splits the 16 lanes for
narrower machines, with the same result.

Arrays of uint16 hold bfloat16; everything is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_vectors import LANES


def data_of(context: Any, builder: Any, array_type: types.Type, value: Any) -> Any:
    """The pointer to an array's first element."""
    return context.make_array(array_type)(context, builder, value).data


def at(builder: Any, data: Any, offset: Any, index: Any) -> Any:
    return builder.gep(data, [builder.add(offset, index)])


def clamped(builder: Any, offset: Any, index: int, stride: Any, count: Any) -> Any:
    """offset + min(index, count - 1) * stride: a strip's missing rows repeat the last one."""
    last = builder.sub(count, v.I64(1))
    inside = builder.icmp_signed("<", v.I64(index), count)
    row = builder.select(inside, v.I64(index), last)
    return builder.add(offset, builder.mul(row, stride))


@intrinsic
def sum_of_squares(typingctx, x, offset, length):  # type: ignore[no-untyped-def]
    """The sum of x[i]^2 for i < length."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = data_of(context, builder, sig.args[0], args[0])
        place = cgutils.alloca_once(builder, v.VECTOR)
        builder.store(ir.Constant(v.VECTOR, None), place)

        def step(k: Any, mask: Any) -> None:
            value = v.load(builder, at(builder, data, args[1], k), sig.args[0].dtype, mask)
            builder.store(v.fma(builder, value, value, builder.load(place)), place)

        v.for_lanes(builder, args[2], step)
        return v.sum_lanes(builder, builder.load(place))

    return types.float32(x, types.int64, types.int64), generate


def _set_each(
    context: Any,
    builder: Any,
    sig: Any,
    args: Any,
    sources: tuple[int, ...],
    value: Callable[..., Any],
) -> Any:
    """out[i] = value(the sources' elements i) for i < count, rounded once.

    The first arguments are out, its offset and the count; a source is the index of an array
    among them, whose offset follows it.
    """
    arrays = [
        (data_of(context, builder, sig.args[i], args[i]), args[i + 1], sig.args[i].dtype)
        for i in (0, *sources)
    ]

    def step(k: Any, mask: Any) -> None:
        values = [
            v.load(builder, at(builder, data, offset, k), dtype, mask)
            for data, offset, dtype in arrays[1:]
        ]
        out, offset, dtype = arrays[0]
        v.put(builder, value(*values), at(builder, out, offset, k), dtype, mask)

    v.for_lanes(builder, args[2], step)
    return context.get_dummy_value()


@intrinsic
def set_scaled(typingctx, out, out_offset, count, x, x_offset, factor):  # type: ignore[no-untyped-def]
    """out[i] = factor * x[i] for i < count, rounded once."""
    integer = types.int64

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        scale = v.splat(builder, args[5])
        return _set_each(context, builder, sig, args, (3,), lambda x: builder.fmul(scale, x))

    return types.void(out, integer, integer, x, integer, types.float32), generate


@intrinsic
def add_scaled(typingctx, out, out_offset, count, x, x_offset, factor):  # type: ignore[no-untyped-def]
    """out[i] += factor * x[i] for i < count, rounded once."""
    integer = types.int64

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        scale = v.splat(builder, args[5])

        def value(old: Any, x: Any) -> Any:
            return v.fma(builder, scale, x, old)

        return _set_each(context, builder, sig, args, (0, 3), value)

    return types.void(out, integer, integer, x, integer, types.float32), generate


@intrinsic
def set_product(typingctx, out, out_offset, count, x, x_offset, y, y_offset, factor):  # type: ignore[no-untyped-def]
    """out[i] = factor * x[i] * y[i] for i < count, rounded once."""
    integer = types.int64

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        scale = v.splat(builder, args[7])

        def value(x: Any, y: Any) -> Any:
            return builder.fmul(builder.fmul(x, scale), y)

        return _set_each(context, builder, sig, args, (3, 5), value)

    return types.void(out, integer, integer, x, integer, y, integer, types.float32), generate


@intrinsic
def set_silu_product(typingctx, out, out_offset, count, gate, gate_offset, up, up_offset):  # type: ignore[no-untyped-def]
    """out[i] = silu(gate[i]) * up[i] for i < count, rounded once."""
    integer = types.int64

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def value(x: Any, y: Any) -> Any:
            # Below -88, e^-x would leave float32; there silu(x) is 0 to its precision.
            power = builder.fneg(x)
            high = builder.fcmp_ordered(">", power, v.splat_f32(88.0))
            power = v.exp(builder, builder.select(high, v.splat_f32(88.0), power))
            one = v.splat_f32(1.0)
            return builder.fmul(builder.fdiv(x, builder.fadd(one, power)), y)

        return _set_each(context, builder, sig, args, (3, 5), value)

    return types.void(out, integer, integer, gate, integer, up, integer), generate


@intrinsic
def set_rotated(typingctx, out, offset, x, x_offset, cos, sin, angle, half):  # type: ignore[no-untyped-def]
    """Pairs (i, i + half) of x turned by the angles of cos and sin from `angle` on, into out."""
    integer = types.int64
    signature = types.void(out, integer, x, integer, cos, sin, integer, integer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target, xs, cosines, sines = (
            data_of(context, builder, sig.args[i], args[i]) for i in (0, 2, 4, 5)
        )
        half = args[7]

        def step(k: Any, mask: Any) -> None:
            def get(data: Any, offset: Any, dtype: types.Type) -> Any:
                return v.load(builder, at(builder, data, offset, k), dtype, mask)

            a = get(xs, args[3], sig.args[2].dtype)
            b = get(xs, builder.add(args[3], half), sig.args[2].dtype)
            c, s = get(cosines, args[6], sig.args[4].dtype), get(sines, args[6], sig.args[5].dtype)
            first = builder.fsub(builder.fmul(a, c), builder.fmul(b, s))
            second = builder.fadd(builder.fmul(b, c), builder.fmul(a, s))
            place = at(builder, target, args[1], k)
            v.put(builder, first, place, sig.args[0].dtype, mask)
            v.put(builder, second, builder.gep(place, [half]), sig.args[0].dtype, mask)

        v.for_lanes(builder, half, step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exp_and_sum(typingctx, x, offset, count, largest, scale):  # type: ignore[no-untyped-def]
    """x[j] = exp(scale * (x[j] - largest)) for j < count, in place; returns their sum.

    x is float32 and has room for `count` rounded up to 16; what lies behind `count` is zeroed.
    """
    signature = types.float32(x, types.int64, types.int64, types.float32, types.float32)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = data_of(context, builder, sig.args[0], args[0])
        place = cgutils.alloca_once(builder, v.VECTOR)
        builder.store(ir.Constant(v.VECTOR, None), place)
        with cgutils.for_range_slice(builder, v.I64(0), args[2], v.I64(LANES)) as (k, _):
            pointer = builder.gep(data, [builder.add(args[1], k)])
            mask = v.first_lanes(builder, builder.sub(args[2], k))
            value = builder.fsub(v.load(builder, pointer, types.float32), v.splat(builder, args[3]))
            value = builder.fmul(value, v.splat(builder, args[4]))
            # Lanes behind the end hold anything, NaN too.
            value = builder.select(mask, v.exp(builder, value), ir.Constant(v.VECTOR, None))
            v.store(builder, value, pointer)
            builder.store(builder.fadd(builder.load(place), value), place)
        return v.sum_lanes(builder, builder.load(place))

    return signature, generate


def _sum_of(context: Any, builder: Any, sig: Any, args: Any, value: Callable[[Any], Any]) -> Any:
    """The sum over x[offset : offset + count] of value(x) where x >= least."""
    data, least = data_of(context, builder, sig.args[0], args[0]), v.splat(builder, args[3])
    place = cgutils.alloca_once(builder, v.VECTOR)
    builder.store(ir.Constant(v.VECTOR, None), place)

    def step(k: Any, mask: Any) -> None:
        x = v.load(builder, at(builder, data, args[1], k), sig.args[0].dtype, mask)
        is_in = builder.fcmp_ordered(">=", x, least)
        part = builder.select(is_in, value(x), ir.Constant(v.VECTOR, None))
        builder.store(builder.fadd(builder.load(place), part), place)

    v.for_lanes(builder, args[2], step)
    return v.sum_lanes(builder, builder.load(place))


@intrinsic
def sum_from(typingctx, x, offset, count, least):  # type: ignore[no-untyped-def]
    """The sum of those of x[offset : offset + count] that are at least `least` > 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _sum_of(context, builder, sig, args, lambda x: x)

    return types.float32(x, types.int64, types.int64, types.float32), generate


@intrinsic
def count_from(typingctx, x, offset, count, least):  # type: ignore[no-untyped-def]
    """How many of x[offset : offset + count], up to 2^24, are at least `least` > 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _sum_of(context, builder, sig, args, lambda x: v.splat_f32(1.0))

    return types.float32(x, types.int64, types.int64, types.float32), generate


@intrinsic
def largest(typingctx, x, offset, count):  # type: ignore[no-untyped-def]
    """The greatest of `x[offset : offset + count]`, count >= 1; NaN if one of them is."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data, lowest = data_of(context, builder, sig.args[0], args[0]), v.splat_f32(-math.inf)
        place = cgutils.alloca_once(builder, v.VECTOR)
        builder.store(lowest, place)

        def step(k: Any, mask: Any) -> None:
            pointer = builder.gep(data, [builder.add(args[1], k)])
            value = v.load(builder, pointer, sig.args[0].dtype, mask)
            if mask is not None:
                value = builder.select(mask, value, lowest)
            builder.store(v.call(builder, "maximum", [value, builder.load(place)]), place)

        v.for_lanes(builder, args[2], step)
        vector, half = builder.load(place), LANES // 2
        while half:
            other = [lane ^ half for lane in range(LANES)]
            swapped = builder.shuffle_vector(vector, vector, v.constant(v.I32, other))
            vector = v.call(builder, "maximum", [vector, swapped])
            half //= 2
        return builder.extract_element(vector, v.I32(0))

    return types.float32(x, types.int64, types.int64), generate


@intrinsic
def element(typingctx, x, index):  # type: ignore[no-untyped-def]
    """x[index] as float32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.gep(data_of(context, builder, sig.args[0], args[0]), [args[1]])
        value = builder.load(pointer)
        if sig.args[0].dtype == types.float32:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, v.I32), v.I32(16)), v.F32)

    return types.float32(x, types.int64), generate
