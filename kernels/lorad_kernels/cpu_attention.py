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
from lorad_kernels.cpu_pages import first_place, pages
from lorad_kernels.cpu_scores import score_on_tiles
from lorad_kernels.cpu_simd import exp_and_sum, largest, set_scaled
from lorad_kernels.cpu_threads import ARGUMENTS, COUNT, FIRST, Kernel, float_bits
from lorad_kernels.cpu_tiles import DEPTH, SIDE, available
from lorad_kernels.cpu_work import array_at, float_from, work_items

if TYPE_CHECKING:
    from lorad_kernels.ops import AttentionBatch


@numba.njit
def _score(  # type: ignore[no-untyped-def]
    q, q_first, item_heads, group, dim, keys, first, begin, context, block, tables, table,
    page_stride, token_stride, then, scores, length
):  # fmt: skip
    """scores[h * group + g, position - begin rounded down to 16] = q[h, g] . key at position."""
    origin, rows = begin // SIDE * SIDE, strip_rows(group)
    for position, count, place, ahead in pages(
        begin, context, block, tables, table, page_stride, token_stride, then
    ):
        for h in range(item_heads):
            for g in range(0, group, rows):
                r = h * group + g
                dot_strip(
                    rows, q, q_first + r * dim, dim, group - g,
                    keys, first + place + h * dim, token_stride, count,
                    ahead if g == 0 else 0, dim,
                    scores, r * length + position - origin, length,
                )  # fmt: skip


@numba.njit
def _decode(arguments, dtype, tiles):  # type: ignore[no-untyped-def]
    q = carray(array_at(arguments[FIRST], dtype), 2)  # a view as pairs wants one at least
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
    item_heads, threads = arguments[FIRST + 16], arguments[FIRST + 17]
    from_keys = arguments[FIRST + 18]  # distance of the values
    totals = np.empty(item_heads * group * dim, np.float32)
    inverses = np.empty(item_heads * group, np.float32)
    for item in work_items(arguments):
        sequence = item * item_heads // kv_heads
        head = item * item_heads % kv_heads
        context = contexts[sequence]
        begin = max(0, context - window) if window > 0 else 0
        origin = begin // SIDE * SIDE
        # A row has room for what exp_and_sum zeroes behind its end.
        length = (context - origin + SIDE - 1) // SIDE * SIDE + SIDE
        scores = np.empty(item_heads * group * length, np.float32)
        table, q_first = sequence * table_stride, sequence * q_stride + head * group * dim
        first = head * dim
        place = first_place(begin, block, tables, table, page_stride, token_stride)
        if tiles is None:  # known when this is compiled: not every machine has the other
            _score(
                q, q_first, item_heads, group, dim, keys, first, begin, context, block,
                tables, table, page_stride, token_stride, from_keys + place, scores, length,
            )  # fmt: skip
        else:
            score_on_tiles(
                q, q_first, item_heads, group, dim, keys, first, begin, context, block,
                tables, table, page_stride, token_stride, from_keys + place, scores, length,
            )  # fmt: skip
        totals[:] = 0.0
        for r in range(item_heads * group):
            start = r * length + begin - origin
            top = largest(scores, start, context - begin)
            total = exp_and_sum(scores, start, context - begin, top, scale)
            inverses[r] = float32(1.0) / total
        # The item that this thread will most likely claim next.
        following = item + threads if item + threads < arguments[COUNT] else item
        then = following * item_heads // kv_heads
        then_begin = max(0, contexts[then] - window) if window > 0 else 0
        then_table = then * table_stride
        place = first_place(then_begin, block, tables, then_table, page_stride, token_stride)
        place += following * item_heads % kv_heads * dim - first - from_keys
        for position, count, row, ahead in pages(
            begin, context, block, tables, table, page_stride, token_stride, place
        ):
            for h in range(item_heads):
                r = h * group
                add_weighted(
                    group, scores, r * length + position - origin, length, count, values,
                    first + row + h * dim, token_stride, ahead, dim, totals, r * dim, dim,
                )  # fmt: skip
        target = (sequence * kv_heads + head) * group * dim
        for r in range(item_heads * group):
            set_scaled(out, target + r * dim, dim, totals, r * dim, inverses[r])


def _decode_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _decode(carray(arguments, ARGUMENTS), uint16, None)


def _decode_on_tiles(arguments):  # type: ignore[no-untyped-def]
    _decode(carray(arguments, ARGUMENTS), uint16, True)


def _decode_float32(arguments):  # type: ignore[no-untyped-def]
    _decode(carray(arguments, ARGUMENTS), float32, None)


ON_TILES = Kernel(_decode_on_tiles)
KERNELS = {torch.bfloat16: Kernel(_decode_bfloat16), torch.float32: Kernel(_decode_float32)}


def serves(q: Tensor, k_cache: Tensor) -> bool:
    """Whether `decode` computes this dtype and layout."""
    dim = q.shape[2]
    packed = q.stride(2) == 1 and q.stride(1) == dim and k_cache.stride(2) == dim
    return packed and q.dtype is k_cache.dtype and q.dtype in KERNELS and dim % 16 == 0


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What to compile for a serving dtype."""
    if dtype not in KERNELS:
        return ()
    on_tiles = dtype is torch.bfloat16 and available()
    return (KERNELS[dtype], ON_TILES) if on_tiles else (KERNELS[dtype],)


def _fits_tiles(q: Tensor, k_cache: Tensor) -> bool:
    even = q.shape[2] % DEPTH == 0 and k_cache.shape[1] % SIDE == 0 and q.stride(0) % 2 == 0
    return even and q.data_ptr() % 4 == 0 and q.dtype is torch.bfloat16 and available()


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
    kernel = ON_TILES if _fits_tiles(q, k_cache) else KERNELS[q.dtype]
    kernel(
        sequences * kv_heads // item_heads, 2 * tokens * kv_heads * dim * q.element_size(),
        q, q.stride(0), heads // kv_heads, dim,
        k_cache, v_cache, kv_heads, block,
        k_cache.stride(0), k_cache.stride(1),
        batch.block_tables, batch.block_tables.stride(0),
        batch.context_lens_device, sliding_window or 0,
        float_bits(scale), out, item_heads, torch.get_num_threads(),
        (v_cache.data_ptr() - k_cache.data_ptr()) // q.element_size(),
    )  # fmt: skip
