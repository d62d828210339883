"""Decode attention on the CPU, over the pages where they lie: no gathered copy of the cache.

One work item is one sequence with one or all of its KV heads; the query heads of a group share
each key and value that is read. Scores of a whole context are kept (float32), so the softmax is
exact and a row's result does not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from numba import carray, float32, int64, uint16
from torch import Tensor

from lorad_kernels.cpu_dots import add_weighted, dot_strip, strip_rows
from lorad_kernels.cpu_simd import exp_and_sum, largest, set_scaled
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel, float_bits
from lorad_kernels.cpu_work import array_at, float_from, work_items

if TYPE_CHECKING:
    from lorad_kernels.ops import AttentionBatch


@numba.njit
def _pages(  # type: ignore[no-untyped-def]
    begin, context, block, tables, table, page_stride, token_stride, offset
):
    """Yields (position, keys, place, distance to the next page's place) for each page."""
    position = begin
    row = tables[table + position // block] * page_stride + position % block * token_stride
    while position < context:
        count = min(block - position % block, context - position)
        following = position + count
        next_row = row
        if following < context:
            next_row = tables[table + following // block] * page_stride
        yield position, count, row + offset, next_row - row
        position, row = following, next_row


@numba.njit
def _score(  # type: ignore[no-untyped-def]
    q, q_first, group, dim, keys, row, token_stride, count, ahead, scores, place, length
):
    """scores[place + g * length + j] = q[g] . key j of a page, for a KV head's query heads."""
    rows = strip_rows(group)
    for g in range(0, group, rows):
        dot_strip(
            rows, q, q_first + g * dim, dim, group - g, keys, row, token_stride, count,
            ahead if g == 0 else 0, dim, scores, place + g * length, length,
        )  # fmt: skip


@numba.njit
def _decode(arguments, dtype):  # type: ignore[no-untyped-def]
    q = carray(array_at(arguments[FIRST], dtype), 1)
    q_stride, group, dim = arguments[FIRST + 1], arguments[FIRST + 2], arguments[FIRST + 3]
    keys = carray(array_at(arguments[FIRST + 4], dtype), 1)
    values = carray(array_at(arguments[FIRST + 5], dtype), 1)
    kv_heads, block = arguments[FIRST + 6], arguments[FIRST + 7]
    page_stride, token_stride = arguments[FIRST + 8], arguments[FIRST + 9]
    tables = carray(array_at(arguments[FIRST + 10], int64), 1)
    table_stride = arguments[FIRST + 11]
    contexts = carray(array_at(arguments[FIRST + 12], int64), 1)
    window = arguments[FIRST + 13]
    scale = float_from(arguments[FIRST + 14])
    out = carray(array_at(arguments[FIRST + 15], dtype), 1)
    item_heads = arguments[FIRST + 16]
    totals = np.empty(item_heads * group * dim, np.float32)
    inverses = np.empty(item_heads * group, np.float32)
    for item in work_items(arguments):
        sequence = item * item_heads // kv_heads
        head = item * item_heads % kv_heads
        context = contexts[sequence]
        begin = max(0, context - window) if window > 0 else 0
        length = (context - begin + 15) // 16 * 16
        scores = np.empty(item_heads * group * length, np.float32)
        table, q_first = sequence * table_stride, sequence * q_stride + head * group * dim
        for position, count, row, ahead in _pages(
            begin, context, block, tables, table, page_stride, token_stride, head * dim
        ):
            for h in range(item_heads):
                _score(
                    q, q_first + h * group * dim, group, dim, keys, row + h * dim, token_stride,
                    count, ahead, scores, h * group * length + position - begin, length,
                )  # fmt: skip
        totals[:] = 0.0
        for r in range(item_heads * group):
            top = largest(scores, r * length, context - begin)
            inverses[r] = float32(1.0) / exp_and_sum(
                scores, r * length, context - begin, top, scale
            )
        for position, count, row, ahead in _pages(
            begin, context, block, tables, table, page_stride, token_stride, head * dim
        ):
            for h in range(item_heads):
                r = h * group
                add_weighted(
                    group, scores, r * length + position - begin, length, count, values,
                    row + h * dim, token_stride, ahead, dim, totals, r * dim, dim,
                )  # fmt: skip
        first = (sequence * kv_heads + head) * group * dim
        for r in range(item_heads * group):
            set_scaled(out, first + r * dim, dim, totals, r * dim, inverses[r])


def _decode_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _decode(carray(arguments, ARGUMENTS), uint16)


def _decode_float32(arguments):  # type: ignore[no-untyped-def]
    _decode(carray(arguments, ARGUMENTS), float32)


KERNELS = {torch.bfloat16: Kernel(_decode_bfloat16), torch.float32: Kernel(_decode_float32)}


def serves(q: Tensor, k_cache: Tensor) -> bool:
    """Whether `decode` computes this dtype and layout."""
    dim = q.shape[2]
    packed = q.stride(2) == 1 and q.stride(1) == dim and k_cache.stride(2) == dim
    return packed and q.dtype is k_cache.dtype and q.dtype in KERNELS and dim % 16 == 0


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    """`ops.paged_attention` for the first sequences of a batch, one row each, into `out`.

    q: `[sequences, heads, head_dim]` with contiguous heads; out the same, contiguous.
    """
    sequences, heads, dim = q.shape
    kv_heads, block = k_cache.shape[2], k_cache.shape[1]
    # All heads of a page lie together: read them together when there are sequences enough.
    item_heads = kv_heads if sequences >= 2 * torch.get_num_threads() else 1
    tokens = sum(batch.context_lens[:sequences])
    KERNELS[q.dtype](
        sequences * kv_heads // item_heads, 2 * tokens * kv_heads * dim * q.element_size(),
        q, q.stride(0), heads // kv_heads, dim,
        k_cache, v_cache, kv_heads, block,
        k_cache.stride(0), k_cache.stride(1),
        batch.block_tables, batch.block_tables.stride(0),
        batch.context_lens_device, sliding_window or 0,
        float_bits(scale), out, item_heads,
    )  # fmt: skip
