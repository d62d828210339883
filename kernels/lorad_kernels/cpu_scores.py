"""Scores of decode attention on Intel's matrix unit (AMX): keys are read where they lie.

A tile takes 16 keys at once, in the order of memory, for all query heads of their group.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_pages import pages
from lorad_kernels.cpu_simd import data_of
from lorad_kernels.cpu_tiles import (
    DEPTH,
    I8,
    SIDE,
    configure,
    emit,
    place_at,
    put_transposed,
    release,
    set_transposed,
)

_SUMS, _KEYS, _QUERIES = I8(0), I8(1), I8(2)


@intrinsic
def _multiply_keys(  # type: ignore[no-untyped-def]
    typingctx, keys, place, stride, dim, pairs, first_pair, fetch, fetch_step, fetch_line, sums
):
    """sums[i, m] = key i . query m for 16 keys, which begin at `place` and lie `stride` apart.

    pairs: `[dim / 2, 16]`, neighbours of queries as uint32. For each 16 lines of keys it reads,
    it fetches lines from `fetch` on that lie `fetch_line` apart, the next ones `fetch_step` on.
    """
    n = types.int64
    signature = types.void(keys, n, n, n, pairs, n, n, n, n, sums)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        key_data = data_of(context, builder, sig.args[0], args[0])
        pair_data = data_of(context, builder, sig.args[4], args[4])
        out = data_of(context, builder, sig.args[9], args[9])
        key_bytes = builder.mul(args[2], v.I64(2))
        emit(builder, "tilezero", [_SUMS])
        with cgutils.for_range_slice(builder, v.I64(0), args[3], v.I64(DEPTH)) as (k, _):
            keys_at = place_at(builder, key_data, builder.add(args[1], k))
            emit(builder, "tileloadd64", [_KEYS, keys_at, key_bytes])
            pairs_at = builder.add(args[5], builder.mul(k, v.I64(SIDE // 2)))
            pairs_at = place_at(builder, pair_data, pairs_at)
            emit(builder, "tileloadd64", [_QUERIES, pairs_at, v.I64(SIDE * 4)])
            step = builder.mul(builder.udiv(k, v.I64(DEPTH)), args[7])
            start = builder.add(args[6], step)
            for i in range(SIDE):
                line = builder.add(start, builder.mul(args[8], v.I64(i)))
                v.prefetch(builder, builder.gep(key_data, [line]))
            emit(builder, "tdpbf16ps", [_SUMS, _KEYS, _QUERIES])
        place = place_at(builder, out, v.I64(0))
        emit(builder, "tilestored64", [_SUMS, place, v.I64(SIDE * 4)])
        return context.get_dummy_value()

    return signature, generate


@numba.njit
def score_on_tiles(  # type: ignore[no-untyped-def]
    q, q_first, item_heads, group, dim, keys, first, begin, context, block, tables, table,
    page_stride, token_stride, then, scores, length
):  # fmt: skip
    """`cpu_attention._score`, for bfloat16, whole tiles of a head, and pages of whole tiles."""
    origin = begin // SIDE * SIDE
    head_tiles = (group + SIDE - 1) // SIDE
    tile_pairs = dim // 2 * SIDE
    pairs = np.empty(item_heads * head_tiles * tile_pairs, np.uint32)
    sums = np.empty(SIDE * SIDE, np.float32)
    in_pairs = q.view(np.uint32)
    for tile in range(item_heads * head_tiles):
        h, g = tile // head_tiles, tile % head_tiles * SIDE
        source = (q_first + (h * group + g) * dim) // 2
        for pair in range(0, dim // 2, SIDE):
            set_transposed(
                pairs, tile * tile_pairs + pair * SIDE, in_pairs, source + pair, dim // 2,
                group - g, SIDE,
            )  # fmt: skip
    # All heads of a page lie together, and are fetched in that order.
    is_whole = token_stride == item_heads * dim
    fetch_line = DEPTH if is_whole else token_stride
    fetch_step = SIDE * DEPTH if is_whole else DEPTH
    fetch_head = SIDE * dim if is_whole else dim
    configure()
    for position, count, place, ahead in pages(
        origin, context, block, tables, table, page_stride, token_stride, then
    ):
        for token in range(0, count, SIDE):
            row = first + place + token * token_stride
            target = position + token - origin
            for tile in range(item_heads * head_tiles):
                h, g = tile // head_tiles, tile % head_tiles * SIDE
                _multiply_keys(
                    keys, row + h * dim, token_stride, dim, pairs, tile * tile_pairs,
                    row + ahead + h * fetch_head, fetch_step, fetch_line, sums,
                )  # fmt: skip
                put_transposed(
                    sums, 0, sums, -1, scores, (h * group + g) * length + target, length,
                    min(SIDE, group - g),
                )  # fmt: skip
    release()
