"""How a kernel gets at its arguments, hands out its work, and is called."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_simd import data_of
from lorad_kernels.cpu_threads import COUNT, DONE, NEXT


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


@numba.njit
def work_items(arguments):  # type: ignore[no-untyped-def]
    """The work items that this thread claims, until none is left; each is done at the next."""
    while True:
        item = claim(arguments, NEXT)
        if item >= arguments[COUNT]:
            return
        yield item
        arrive(arguments, DONE)
