"""The small operations between a decoder's matmuls, each one pass over its rows.

torch runs them as 20 calls a layer, which for a small model costs more than the arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from numba import carray, float32, float64, int64, uint16
from torch import Tensor

from lorad_kernels import cpu_activations
from lorad_kernels.cpu_simd import (
    add_scaled,
    element,
    largest,
    set_product,
    set_rotated,
    set_scaled,
    set_silu_product,
    sum_of_squares,
)
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel, float_bits
from lorad_kernels.cpu_work import array_at, float_from, work_items

if TYPE_CHECKING:
    from lorad_kernels.ops import AttentionBatch

_SCAN = 512  # elements of a row that row_max looks at between two comparisons


@numba.njit
def _add_norm(arguments, dtype):  # type: ignore[no-untyped-def]
    x = carray(array_at(arguments[FIRST], float32), 1)
    width, has_delta = arguments[FIRST + 1], arguments[FIRST + 2] != 0
    delta = carray(array_at(arguments[FIRST + 2], dtype), 1)
    weight = carray(array_at(arguments[FIRST + 3], float32), 1)
    eps = float_from(arguments[FIRST + 4])
    out = carray(array_at(arguments[FIRST + 5], dtype), 1)
    for row in work_items(arguments):
        start = row * width
        if has_delta:
            add_scaled(x, start, width, delta, start, float32(1.0))
        mean = float64(sum_of_squares(x, start, width)) / width
        inverse = float32(1.0 / math.sqrt(mean + eps))
        set_product(out, start, width, x, start, weight, 0, inverse)


def _add_norm_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _add_norm(carray(arguments, ARGUMENTS), uint16)


def _add_norm_float32(arguments):  # type: ignore[no-untyped-def]
    _add_norm(carray(arguments, ARGUMENTS), float32)


@numba.njit
def _silu_mul(arguments, dtype):  # type: ignore[no-untyped-def]
    gate_up = carray(array_at(arguments[FIRST], dtype), 1)
    width = arguments[FIRST + 1]
    out = carray(array_at(arguments[FIRST + 2], dtype), 1)
    for row in work_items(arguments):
        start = 2 * row * width
        set_silu_product(out, row * width, width, gate_up, start, gate_up, start + width)


def _silu_mul_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _silu_mul(carray(arguments, ARGUMENTS), uint16)


def _silu_mul_float32(arguments):  # type: ignore[no-untyped-def]
    _silu_mul(carray(arguments, ARGUMENTS), float32)


@numba.njit
def _rotate_and_store(arguments, dtype):  # type: ignore[no-untyped-def]
    qk = carray(array_at(arguments[FIRST], dtype), 1)
    k = carray(array_at(arguments[FIRST + 1], dtype), 1)
    v = carray(array_at(arguments[FIRST + 2], dtype), 1)
    q_stride, k_stride, v_stride = (
        arguments[FIRST + 3],
        arguments[FIRST + 4],
        arguments[FIRST + 5],
    )
    heads, kv_heads, dim = arguments[FIRST + 6], arguments[FIRST + 7], arguments[FIRST + 8]
    cos = carray(array_at(arguments[FIRST + 9], dtype), 1)
    sin = carray(array_at(arguments[FIRST + 10], dtype), 1)
    keys = carray(array_at(arguments[FIRST + 11], dtype), 1)
    values = carray(array_at(arguments[FIRST + 12], dtype), 1)
    page_stride, token_stride = arguments[FIRST + 13], arguments[FIRST + 14]
    pages = carray(array_at(arguments[FIRST + 15], int64), 1)
    offsets = carray(array_at(arguments[FIRST + 16], int64), 1)
    out = carray(array_at(arguments[FIRST + 17], dtype), 1)
    half = dim // 2
    for row in work_items(arguments):
        angle = row * dim
        for head in range(heads):
            source, target = row * q_stride + head * dim, (row * heads + head) * dim
            set_rotated(out, target, qk, source, cos, sin, angle, half)
        place = pages[row] * page_stride + offsets[row] * token_stride
        for head in range(kv_heads):
            source, target = row * k_stride + head * dim, place + head * dim
            set_rotated(keys, target, k, source, cos, sin, angle, half)
        for i in range(kv_heads * dim):
            values[place + i] = v[row * v_stride + i]


def _rotate_and_store_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _rotate_and_store(carray(arguments, ARGUMENTS), uint16)


def _rotate_and_store_float32(arguments):  # type: ignore[no-untyped-def]
    _rotate_and_store(carray(arguments, ARGUMENTS), float32)


@numba.njit
def _row_max(arguments, dtype):  # type: ignore[no-untyped-def]
    x = carray(array_at(arguments[FIRST], dtype), 1)
    width = arguments[FIRST + 1]
    values = carray(array_at(arguments[FIRST + 2], float32), 1)
    indices = carray(array_at(arguments[FIRST + 3], int64), 1)
    finite_only = arguments[FIRST + 4]
    for row in work_items(arguments):
        start = row * width
        best, where = largest(x, start, min(_SCAN, width)), 0
        for block in range(_SCAN, width, _SCAN):
            top = largest(x, start + block, min(_SCAN, width - block))
            # NaN, once seen, stays: no comparison with it is true.
            if top > best or top != top:
                best, where = top, block
        while element(x, start + where) != best and best == best:
            where += 1
        if finite_only and not abs(best) < np.inf:
            where = -1
        values[row], indices[row] = best, where


def _row_max_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _row_max(carray(arguments, ARGUMENTS), uint16)


def _row_max_float32(arguments):  # type: ignore[no-untyped-def]
    _row_max(carray(arguments, ARGUMENTS), float32)


@numba.njit
def _take_rows(arguments, dtype, out_dtype):  # type: ignore[no-untyped-def]
    x = carray(array_at(arguments[FIRST], dtype), 1)
    width = arguments[FIRST + 1]
    rows = carray(array_at(arguments[FIRST + 2], int64), 1)
    out = carray(array_at(arguments[FIRST + 3], out_dtype), 1)
    for row in work_items(arguments):
        set_scaled(out, row * width, width, x, rows[row] * width, float32(1.0))


def _take_rows_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _take_rows(carray(arguments, ARGUMENTS), uint16, uint16)


def _take_rows_float32(arguments):  # type: ignore[no-untyped-def]
    _take_rows(carray(arguments, ARGUMENTS), float32, float32)


def _take_rows_wider(arguments):  # type: ignore[no-untyped-def]
    _take_rows(carray(arguments, ARGUMENTS), uint16, float32)


_ADD_NORM = {torch.bfloat16: Kernel(_add_norm_bfloat16), torch.float32: Kernel(_add_norm_float32)}
_SILU = {torch.bfloat16: Kernel(_silu_mul_bfloat16), torch.float32: Kernel(_silu_mul_float32)}
_ROTATE = {
    torch.bfloat16: Kernel(_rotate_and_store_bfloat16),
    torch.float32: Kernel(_rotate_and_store_float32),
}
_ROW_MAX = {torch.bfloat16: Kernel(_row_max_bfloat16), torch.float32: Kernel(_row_max_float32)}


_TAKE_ROWS = {
    (torch.bfloat16, torch.bfloat16): Kernel(_take_rows_bfloat16),
    (torch.float32, torch.float32): Kernel(_take_rows_float32),
    (torch.bfloat16, torch.float32): Kernel(_take_rows_wider),
}

DTYPES = frozenset(_ADD_NORM)
KERNELS = {
    dtype: [
        *(each[dtype] for each in (_ADD_NORM, _SILU, _ROTATE, _ROW_MAX)),
        *(kernel for (source, _), kernel in _TAKE_ROWS.items() if source is dtype),
    ]
    for dtype in DTYPES
}


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    rows, width = x.shape
    out = cpu_activations.empty((rows, width), dtype)
    _ADD_NORM[dtype](
        rows, 3 * x.numel() * 4, x, width, 0 if delta is None else delta,
        weight, float_bits(eps), out,
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = cpu_activations.empty((rows, width), gate_up.dtype)
    # exp makes it dearer than its bytes.
    _SILU[gate_up.dtype](rows, 4 * out.numel() * out.element_size(), gate_up, width, out)
    return out


def rotates(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `rotate_and_store` computes this dtype and layout."""
    tensors = (q, k, v, k_cache, v_cache)
    dense = all(t.stride(-1) == 1 and t.stride(-2) == t.shape[-1] for t in tensors)
    return dense and q.dtype in DTYPES and k_cache.dtype is v_cache.dtype is q.dtype


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    rows, heads, dim = q.shape
    out = cpu_activations.empty((rows, heads, dim), q.dtype)
    _ROTATE[q.dtype](
        rows, 4 * out.numel() * out.element_size(),
        q, k, v, q.stride(0), k.stride(0), v.stride(0),
        heads, k.shape[1], dim, cos, sin,
        k_cache, v_cache, k_cache.stride(0), k_cache.stride(1),
        batch.kv_pages, batch.kv_offsets, out,
    )  # fmt: skip
    return out


def row_max(x: Tensor, *, finite_only: bool = False) -> tuple[Tensor, Tensor]:
    """With `finite_only`, the index is -1 where the greatest value is NaN or infinite."""
    rows, width = x.shape
    values, indices = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    _ROW_MAX[x.dtype](
        rows, x.numel() * x.element_size(), x, width,
        values, indices, int(finite_only),
    )  # fmt: skip
    return values, indices


def takes_rows(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `take_rows` copies this."""
    return (x.dtype, dtype) in _TAKE_ROWS and x.is_contiguous()


def take_rows(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    out = cpu_activations.empty((rows.shape[0], x.shape[1]), dtype)
    _TAKE_ROWS[x.dtype, dtype](
        rows.shape[0], 2 * out.numel() * out.element_size(), x, x.shape[1], rows, out
    )
    return out
