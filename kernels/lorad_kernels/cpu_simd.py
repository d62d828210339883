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
from typing import Any

import numba
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


@intrinsic
def add_to(typingctx, x, x_offset, y, y_offset, count):  # type: ignore[no-untyped-def]
    """x[i] += y[i] for i < count; x is float32."""
    integer = types.int64

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = data_of(context, builder, sig.args[0], args[0])
        source = data_of(context, builder, sig.args[2], args[2])

        def step(k: Any, mask: Any) -> None:
            pointer = at(builder, target, args[1], k)
            old = v.load(builder, pointer, types.float32, mask)
            added = v.load(builder, at(builder, source, args[3], k), sig.args[2].dtype, mask)
            v.put(builder, builder.fadd(old, added), pointer, types.float32, mask)

        v.for_lanes(builder, args[4], step)
        return context.get_dummy_value()

    return types.void(x, integer, y, integer, integer), generate


@intrinsic
def copy(typingctx, out, offset, x, x_offset, count):  # type: ignore[no-untyped-def]
    """out[i] = x[i] for i < count, as out's dtype."""
    integer = types.int64

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = data_of(context, builder, sig.args[0], args[0])
        source = data_of(context, builder, sig.args[2], args[2])

        def step(k: Any, mask: Any) -> None:
            value = v.load(builder, at(builder, source, args[3], k), sig.args[2].dtype, mask)
            v.put(builder, value, at(builder, target, args[1], k), sig.args[0].dtype, mask)

        v.for_lanes(builder, args[4], step)
        return context.get_dummy_value()

    return types.void(out, integer, x, integer, integer), generate


@intrinsic
def set_product(typingctx, out, offset, x, x_offset, factor, weights, count):  # type: ignore[no-untyped-def]
    """out[i] = x[i] * factor * weights[i] for i < count, rounded once; x, weights are float32."""
    integer = types.int64
    signature = types.void(out, integer, x, integer, types.float32, weights, integer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = data_of(context, builder, sig.args[0], args[0])
        xs = data_of(context, builder, sig.args[2], args[2])
        ws = data_of(context, builder, sig.args[5], args[5])
        factor = v.splat(builder, args[4])

        def step(k: Any, mask: Any) -> None:
            value = v.load(builder, at(builder, xs, args[3], k), types.float32, mask)
            weight = v.load(builder, builder.gep(ws, [k]), types.float32, mask)
            value = builder.fmul(builder.fmul(value, factor), weight)
            v.put(builder, value, at(builder, target, args[1], k), sig.args[0].dtype, mask)

        v.for_lanes(builder, args[6], step)
        return context.get_dummy_value()

    return signature, generate


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
def silu_times(typingctx, gate, gate_offset, up, up_offset, count, out, out_offset):  # type: ignore[no-untyped-def]
    """out[i] = silu(gate[i]) * up[i] for i < count, rounded once."""
    integer = types.int64
    signature = types.void(gate, integer, up, integer, integer, out, integer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        gates = data_of(context, builder, sig.args[0], args[0])
        ups = data_of(context, builder, sig.args[2], args[2])
        target = data_of(context, builder, sig.args[5], args[5])

        def step(k: Any, mask: Any) -> None:
            def at(data: Any, offset: Any, dtype: types.Type) -> Any:
                return v.load(builder, builder.gep(data, [builder.add(offset, k)]), dtype, mask)

            x, y = at(gates, args[1], sig.args[0].dtype), at(ups, args[3], sig.args[2].dtype)
            # Below -88, e^-x would leave float32; there silu(x) is 0 to its precision.
            power = builder.fneg(x)
            high = builder.fcmp_ordered(">", power, v.splat_f32(88.0))
            power = v.exp(builder, builder.select(high, v.splat_f32(88.0), power))
            one = v.splat_f32(1.0)
            value = builder.fmul(builder.fdiv(x, builder.fadd(one, power)), y)
            pointer = builder.gep(target, [builder.add(args[6], k)])
            v.put(builder, value, pointer, sig.args[5].dtype, mask)

        v.for_lanes(builder, args[4], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_scaled(typingctx, y, y_offset, x, x_offset, count, factor):  # type: ignore[no-untyped-def]
    """y[i] += factor * x[i] for i < count, rounded once; x is float32."""
    integer = types.int64
    signature = types.void(y, integer, x, integer, integer, types.float32)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ys = data_of(context, builder, sig.args[0], args[0])
        xs = data_of(context, builder, sig.args[2], args[2])
        scale = v.splat(builder, args[5])

        def step(k: Any, mask: Any) -> None:
            pointer = builder.gep(ys, [builder.add(args[1], k)])
            old = v.load(builder, pointer, sig.args[0].dtype, mask)
            value = v.load(builder, builder.gep(xs, [builder.add(args[3], k)]), types.float32, mask)
            value = v.fma(builder, scale, value, old)
            v.put(builder, value, pointer, sig.args[0].dtype, mask)

        v.for_lanes(builder, args[4], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def set_scaled(typingctx, y, y_offset, x, x_offset, count, factor):  # type: ignore[no-untyped-def]
    """y[i] = factor * x[i] for i < count, rounded once; x is float32."""
    integer = types.int64
    signature = types.void(y, integer, x, integer, integer, types.float32)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ys = data_of(context, builder, sig.args[0], args[0])
        xs = data_of(context, builder, sig.args[2], args[2])
        scale = v.splat(builder, args[5])

        def step(k: Any, mask: Any) -> None:
            value = v.load(builder, builder.gep(xs, [builder.add(args[3], k)]), types.float32, mask)
            pointer = builder.gep(ys, [builder.add(args[1], k)])
            v.put(builder, builder.fmul(scale, value), pointer, sig.args[0].dtype, mask)

        v.for_lanes(builder, args[4], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def array_at(typingctx, address, like):  # type: ignore[no-untyped-def]
    """A pointer to what lies at an address, of the type of the dtype `like`."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@intrinsic
def claim(typingctx, counters, index):  # type: ignore[no-untyped-def]
    """counters[index] += 1, atomically among threads; returns what was there before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.gep(data_of(context, builder, sig.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", pointer, v.I64(1), "monotonic")

    return types.int64(counters, types.int64), generate


@intrinsic
def arrive(typingctx, counters, index):  # type: ignore[no-untyped-def]
    """counters[index] += 1; what this thread has written is seen by whoever sees that."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.gep(data_of(context, builder, sig.args[0], args[0]), [args[1]])
        builder.atomic_rmw("add", pointer, v.I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counters, types.int64), generate


@intrinsic
def arrived(typingctx, counters, index):  # type: ignore[no-untyped-def]
    """counters[index] as other threads have left it."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.gep(data_of(context, builder, sig.args[0], args[0]), [args[1]])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counters, types.int64), generate


@intrinsic
def call_with(typingctx, function, argument):  # type: ignore[no-untyped-def]
    """Call the C function of one integer or pointer at an address; what it returns is dropped."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        block = v.I64.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [block]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], block)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def float_from(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 whose bits are the lower half of an int64; see `cpu_threads.float_bits`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], v.I32), v.F32)

    return types.float32(types.int64), generate


@intrinsic
def _float_of(typingctx, bits):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], v.F32)

    return types.float32(types.uint32), generate


def get(array: Any, index: Any) -> Any:
    """One element as float32."""
    raise NotImplementedError("compiled code only")


@numba.extending.overload(get)
def _get_one(array, index):  # type: ignore[no-untyped-def]
    if array.dtype == types.float32:
        return lambda array, index: array[index]
    return lambda array, index: _float_of(numba.uint32(numba.uint32(array[index]) << 16))
