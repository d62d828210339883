"""Tiles of Intel's matrix unit (AMX), in bfloat16, as numba functions use them.

A tile holds 16 rows of 64 bytes. TDPBF16PS multiplies 16 rows of 32 elements by 16 rows of 16
pairs, neighbours along the summed dimension, and adds to 16 x 16 float32 sums (Intel SDM).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_simd import clamped, data_of

SIDE = 16  # rows of a tile
DEPTH = 32  # bfloat16 elements in a row of a tile
I8 = ir.IntType(8)
_BYTES = I8.as_pointer()


def emit(builder: Any, name: str, arguments: list[Any]) -> None:
    """An instruction of the tiles; those that name a tile take its number as an I8."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)


def place_at(builder: Any, data: Any, offset: Any) -> Any:
    """The address of an element, as loads and stores of tiles take it."""
    return builder.bitcast(builder.gep(data, [offset]), _BYTES)


@intrinsic
def configure(typingctx):  # type: ignore[no-untyped-def]
    """All eight tiles of this thread as 16 rows of 64 bytes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        setting = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])
        constant = ir.Constant(ir.ArrayType(I8, 64), bytearray(setting))
        place = cgutils.alloca_once_value(builder, constant)
        emit(builder, "ldtilecfg", [builder.bitcast(place, _BYTES)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release(typingctx):  # type: ignore[no-untyped-def]
    """Tiles left in use would be saved at each switch of threads."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


def _multiply_tiles(columns: int) -> Callable[..., None]:
    """`columns` tiles side by side: out[m, n] = sum over k of a[m, k] b[k, n].

    a: 16 rows of bfloat16. b: pairs of neighbours along k as uint32, of which a row is `b_row`
    long, a tile begins `b_tile` after the one before it, and the next DEPTH of k `b_step` after;
    past `b_depth` it begins again. out: float32. Strides in elements, depths multiples of DEPTH.
    """

    @intrinsic
    def multiply(  # type: ignore[no-untyped-def]
        typingctx, a, a_offset, a_row, depth, b, b_offset, b_row, b_tile, b_step, b_depth,
        out, out_offset, out_row,
    ):  # fmt: skip
        n = types.int64
        signature = types.void(a, n, n, n, b, n, n, n, n, n, out, n, n)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a_data, b_data, sums = (
                data_of(context, builder, sig.args[i], args[i]) for i in (0, 4, 10)
            )
            a_bytes = builder.mul(args[2], v.I64(2))
            b_bytes, out_bytes = (builder.mul(args[i], v.I64(4)) for i in (6, 12))
            for j in range(columns):
                emit(builder, "tilezero", [I8(j)])
            with cgutils.for_range_slice(builder, v.I64(0), args[3], v.I64(DEPTH)) as (k, _):
                a_place = place_at(builder, a_data, builder.add(args[1], k))
                emit(builder, "tileloadd64", [I8(4), a_place, a_bytes])
                step = builder.udiv(builder.urem(k, args[9]), v.I64(DEPTH))
                step = builder.mul(step, args[8])
                for j in range(columns):
                    offset = builder.add(args[5], builder.mul(args[7], v.I64(j)))
                    b_place = place_at(builder, b_data, builder.add(offset, step))
                    tile = 5 + j % 3
                    emit(builder, "tileloadd64", [I8(tile), b_place, b_bytes])
                    emit(builder, "tdpbf16ps", [I8(j), I8(4), I8(tile)])
            for j in range(columns):
                place = place_at(builder, sums, builder.add(args[11], v.I64(j * SIDE)))
                emit(builder, "tilestored64", [I8(j), place, out_bytes])
            return context.get_dummy_value()

        return signature, generate

    return multiply  # type: ignore[no-any-return]


_multiply_one, _multiply_four = _multiply_tiles(1), _multiply_tiles(4)


@numba.njit
def multiply(  # type: ignore[no-untyped-def]
    a, a_offset, a_row, depth, b, b_offset, b_row, b_tile, b_step, b_depth,
    out, out_offset, out_row, columns,
):  # fmt: skip
    """`_multiply_tiles` for any multiple of SIDE columns."""
    done = 0
    while done < columns:
        place = b_offset + done // SIDE * b_tile
        if done + 4 * SIDE <= columns:
            _multiply_four(
                a, a_offset, a_row, depth, b, place, b_row, b_tile, b_step, b_depth,
                out, out_offset + done, out_row,
            )  # fmt: skip
            done += 4 * SIDE
        else:
            _multiply_one(
                a, a_offset, a_row, depth, b, place, b_row, b_tile, b_step, b_depth,
                out, out_offset + done, out_row,
            )  # fmt: skip
            done += SIDE


@intrinsic
def set_transposed(typingctx, out, offset, x, x_offset, x_stride, count, columns):  # type: ignore[no-untyped-def]
    """out[q, m] = x[m, q] for 16 rows and columns of 32 bits.

    Past `count` rows the last one again; columns past `columns` are zero and never read.
    """
    integer = types.int64
    signature = types.void(out, integer, x, integer, integer, integer, integer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = data_of(context, builder, sig.args[0], args[0])
        source = data_of(context, builder, sig.args[2], args[2])
        mask = v.first_lanes(builder, args[6])
        rows = [
            builder.gep(source, [clamped(builder, args[3], m, args[4], args[5])])
            for m in range(SIDE)
        ]
        loaded = [v.load(builder, row, types.float32, mask) for row in rows]
        for q, column in enumerate(v.transposed(builder, loaded)):
            place = builder.add(args[1], v.I64(q * SIDE))
            v.store(builder, column, builder.gep(target, [place]))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def put_transposed(typingctx, tile, first, bias, bias_offset, y, y_offset, y_stride, count):  # type: ignore[no-untyped-def]
    """y[m, n] = tile[n, m] + bias[n] for m < count, n < 16, rounded once.

    `tile` starts at element `first`, float32; a negative `bias_offset` means no bias.
    """
    integer = types.int64
    signature = types.void(tile, integer, bias, integer, y, integer, integer, integer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source = data_of(context, builder, sig.args[0], args[0])
        biases = data_of(context, builder, sig.args[2], args[2])
        target = data_of(context, builder, sig.args[4], args[4])
        rows = [
            v.load(
                builder,
                builder.gep(source, [builder.add(args[1], v.I64(SIDE * n))]),
                types.float32,
            )
            for n in range(SIDE)
        ]
        place = cgutils.alloca_once_value(builder, ir.Constant(v.VECTOR, None))
        with builder.if_then(builder.icmp_signed(">=", args[3], v.I64(0))):
            pointer = builder.gep(biases, [args[3]])
            builder.store(v.load(builder, pointer, sig.args[2].dtype), place)
        added = builder.load(place)
        for m, column in enumerate(v.transposed(builder, rows)):
            with builder.if_then(builder.icmp_signed("<", v.I64(m), args[7])):
                offset = builder.add(args[5], builder.mul(v.I64(m), args[6]))
                pointer = builder.gep(target, [offset])
                v.put(builder, builder.fadd(column, added), pointer, sig.args[4].dtype, None)
        return context.get_dummy_value()

    return signature, generate


@cache
def available() -> bool:
    """Whether this processor has AMX for bfloat16 and the system lets this process use it."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return {"amx_tile", "amx_bf16", "avx512bw"} <= set(flags) and _request_tiles()


def _request_tiles() -> bool:
    """Linux gives the tiles' registers to a process that asks (x86, arch_prctl)."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)
    return not refused
