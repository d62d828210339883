"""Building blocks of LLVM vector code: 16 float32 lanes, bfloat16 in memory, fixed orders.

Functions here emit instructions through an llvmlite builder; `cpu_simd` makes numba functions of
them. Elements of `types.uint16` are bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16
I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
MASK = ir.VectorType(I1, LANES)


def constant(element: ir.Type, values: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, len(values)), values)


def splat(builder: Any, value: Any) -> Any:
    """A scalar in all lanes."""
    return _splat(builder, value, LANES)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, constant(I32, [0] * lanes))


def splat_f32(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def splat_i32(value: int) -> ir.Constant:
    return constant(I32, [value] * LANES)


def first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first `count` (int64) lanes."""
    lanes = constant(I64, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, count))


def widen(builder: Any, value: Any, dtype: types.Type) -> Any:
    """Loaded elements of `dtype` as float32."""
    if dtype == types.float32:
        return value
    wide = builder.zext(value, ir.VectorType(I32, LANES))
    return builder.bitcast(builder.shl(wide, splat_i32(16)), VECTOR)


def load(builder: Any, pointer: Any, dtype: types.Type, mask: Any = None) -> Any:
    """16 elements at `pointer` as float32; lanes outside the mask are zero and never read."""
    element = F32 if dtype == types.float32 else I16
    kind = ir.VectorType(element, LANES)
    source = builder.bitcast(pointer, kind.as_pointer())
    align = 4 if dtype == types.float32 else 2
    if mask is None:
        value = builder.load(source, align=align)
    else:
        suffix = "f32" if dtype == types.float32 else "i16"
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [source.type, I32, MASK, kind]),
            f"llvm.masked.load.v16{suffix}.p0",
        )
        zero = ir.Constant(kind, None)
        value = builder.call(function, [source, I32(align), mask, zero])
    return widen(builder, value, dtype)


def prefetch(builder: Any, pointer: Any) -> None:
    source = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [source.type, I32, I32, I32]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [source, I32(0), I32(2), I32(1)])  # for reading, data


def store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)


def store_part(
    builder: Any, value: Any, first: int, lanes: int, pointer: Any, count: Any = None
) -> None:
    """Store `lanes` float32 lanes of a vector from `first` on; with `count` only so many."""
    if lanes < LANES:
        picked = constant(I32, list(range(first, first + lanes)))
        value = builder.shuffle_vector(value, value, picked)
    target = builder.bitcast(pointer, value.type.as_pointer())
    if count is None:
        builder.store(value, target, align=4)
        return
    mask_type = ir.VectorType(I1, lanes)
    mask = builder.icmp_signed(
        "<", constant(I64, list(range(lanes))), _splat(builder, count, lanes)
    )
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [value.type, target.type, I32, mask_type]),
        f"llvm.masked.store.v{lanes}f32.p0",
    )
    builder.call(function, [value, target, I32(4), mask])


def put(builder: Any, value: Any, pointer: Any, dtype: types.Type, mask: Any) -> None:
    """Store float32 lanes as elements of `dtype`, rounded to nearest even, where the mask says."""
    if dtype != types.float32:
        value = to_bfloat16(builder, value)
    target = builder.bitcast(pointer, value.type.as_pointer())
    align = 4 if dtype == types.float32 else 2
    if mask is None:
        builder.store(value, target, align=align)
        return
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [value.type, target.type, I32, MASK]),
        f"llvm.masked.store.v16{'f32' if dtype == types.float32 else 'i16'}.p0",
    )
    builder.call(function, [value, target, I32(align), mask])


def to_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, ir.VectorType(I32, LANES))
    odd = builder.and_(builder.lshr(bits, splat_i32(16)), splat_i32(1))
    rounded = builder.add(builder.add(bits, splat_i32(0x7FFF)), odd)
    # Rounding could carry a NaN into infinity: it keeps its upper bits and is made quiet.
    quiet = builder.or_(bits, splat_i32(0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(kept, splat_i32(16)), ir.VectorType(I16, LANES))


def for_lanes(builder: Any, count: Any, step: Callable[[Any, Any], None]) -> None:
    """`step(k, mask)` for k = 0, 16, ... below count; the mask is None but for a partial end."""
    whole = builder.and_(count, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES)) as (k, _):
        step(k, None)
    left = builder.sub(count, whole)
    with builder.if_then(builder.icmp_signed(">", left, I64(0))):
        step(whole, first_lanes(builder, left))


def for_lines(builder: Any, count: Any, step: Callable[[Any, Any, bool], None]) -> None:
    """`for_lanes` that also tells `step` where a cache line of bfloat16, two vectors, begins."""
    lines = builder.and_(count, I64(-2 * LANES))
    with cgutils.for_range_slice(builder, I64(0), lines, I64(2 * LANES)) as (k, _):
        step(k, None, True)
        step(builder.add(k, I64(LANES)), None, False)

    def rest(k: Any, mask: Any) -> None:
        step(builder.add(lines, k), mask, True)

    for_lanes(builder, builder.sub(count, lines), rest)


def call(builder: Any, name: str, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v16f32")
    return builder.call(function, arguments)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "fma", [a, b, c])


def sum_each(builder: Any, vectors: list[Any]) -> Any:
    """16 vectors to one: lane i is the sum of vector i's lanes, always by the same tree.

    Each round adds the two halves of every lane group of a pair of vectors: 16 vectors of one
    16-lane group, 8 vectors of two 8-lane groups, ..., 1 vector of sixteen 1-lane groups.
    """
    group = LANES
    while len(vectors) > 1:
        half = group // 2
        # Vector i pairs with i + n, so that the sums end up in the order of the vectors.
        n = len(vectors) // 2
        low: list[int] = []
        high: list[int] = []
        for start in range(0, LANES, group):
            for vector in (0, LANES):
                low += range(vector + start, vector + start + half)
                high += range(vector + start + half, vector + start + group)
        vectors = [
            builder.fadd(
                builder.shuffle_vector(vectors[i], vectors[i + n], constant(I32, low)),
                builder.shuffle_vector(vectors[i], vectors[i + n], constant(I32, high)),
            )
            for i in range(n)
        ]
        group = half
    return vectors[0]


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors as a 16 x 16 matrix, its columns as vectors.

    Each round swaps the off-diagonal quarters of all blocks of one size: of 16, 8, 4, 2.
    """
    half = LANES // 2
    while half:
        swapped = list(rows)
        for i in range(LANES):
            if not i & half:
                low = [c if not c & half else LANES + c - half for c in range(LANES)]
                high = [c + half if not c & half else LANES + c for c in range(LANES)]
                pair = rows[i], rows[i + half]
                swapped[i] = builder.shuffle_vector(*pair, constant(I32, low))
                swapped[i + half] = builder.shuffle_vector(*pair, constant(I32, high))
        rows, half = swapped, half // 2
    return rows


def sum_lanes(builder: Any, vector: Any) -> Any:
    """The sum of one vector's lanes, by the tree of `_sum_each`."""
    half = LANES // 2
    while half:
        other = [lane ^ half for lane in range(LANES)]
        swapped = builder.shuffle_vector(vector, vector, constant(I32, other))
        vector = builder.fadd(vector, swapped)
        half //= 2
    return builder.extract_element(vector, I32(0))


def exp(builder: Any, x: Any) -> Any:
    """e^x to 2 units in the last place, for x <= 88; as at -87 below that.

    x = n ln 2 + f with |f| <= ln 2 / 2; e^f by its Taylor polynomial of degree 7, times 2^n
    through the exponent's bits. Adding 1.5 * 2^23 rounds to an integer, left in the low bits.
    NaN stays NaN.
    """
    low = builder.fcmp_ordered("<", x, splat_f32(-87.0))
    x = builder.select(low, splat_f32(-87.0), x)
    shifter = splat_f32(12582912.0)
    shifted = builder.fadd(builder.fmul(x, splat_f32(1.4426950408889634)), shifter)
    n = builder.fsub(shifted, shifter)
    f = fma(builder, n, splat_f32(-0.693359375), x)
    f = fma(builder, n, splat_f32(2.1219444e-4), f)
    y = splat_f32(1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        y = fma(builder, y, f, splat_f32(coefficient))
    bits = builder.bitcast(shifted, ir.VectorType(I32, LANES))
    power = builder.shl(builder.add(bits, splat_i32(127)), splat_i32(23))
    return builder.fmul(y, builder.bitcast(power, VECTOR))
