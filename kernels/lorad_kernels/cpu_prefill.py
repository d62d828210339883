"""Attention of prompts on Intel's matrix unit (AMX), in bfloat16.

First the keys and values of each sequence are copied from their pages as the unit takes them, once
for all query heads of a group. Then a work item is 16 query rows of one KV head: scores of all keys
they see, an exact softmax in float32, and the weighted sum, with weights rounded to bfloat16. Sums
over keys and dimensions run in the same order whatever rows are beside a row, so its result has the
same bits in any batch and any chunk of its prompt (but for a chunk of one row, which is a decode).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, float32, int64, types, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lorad_kernels import cpu_activations
from lorad_kernels import cpu_vectors as v
from lorad_kernels.cpu_simd import data_of, exp_and_sum, largest, set_scaled
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel, float_bits
from lorad_kernels.cpu_tiles import (
    DEPTH,
    SIDE,
    available,
    configure,
    multiply,
    release,
    set_transposed,
)
from lorad_kernels.cpu_work import array_at, float_from, work_items

if TYPE_CHECKING:
    from lorad_kernels.ops import AttentionBatch

# What is known of a sequence: its first row, its rows, its context, its first token and its
# tokens (rounded up to DEPTH) in the laid-out keys and values, and its block table.
_ROW, _ROWS, _CONTEXT, _START, _PADDED, _TABLE, _KNOWN = range(7)
# Tokens of several sequences that are laid out at once: enough work items for any CPU, and no more
# memory than a step of the default size takes elsewhere.
_TOGETHER = 8192


@intrinsic
def _set_pairs(typingctx, out, out_offset, x, first, second, count):  # type: ignore[no-untyped-def]
    """out[i] = (x[first + i], x[second + i]), for a multiple of 16; zeros for a negative index."""
    n = types.int64
    signature = types.void(out, n, x, n, n, n)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target, source = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 2))

        def upper(offset: Any, k: Any) -> Any:
            """16 elements in the upper halves of 32 bits; zeros for a negative offset."""
            there = builder.icmp_signed(">=", offset, v.I64(0))
            place = builder.gep(source, [builder.add(offset, k)])
            mask = v.first_lanes(builder, builder.select(there, v.I64(v.LANES), v.I64(0)))
            value = v.load(builder, place, types.uint16, mask)
            return builder.bitcast(value, v.splat_i32(0).type)

        with cgutils.for_range_slice(builder, v.I64(0), args[5], v.I64(v.LANES)) as (k, _):
            low = builder.lshr(upper(args[3], k), v.splat_i32(16))
            pairs = builder.bitcast(builder.or_(low, upper(args[4], k)), v.VECTOR)
            v.store(builder, pairs, builder.gep(target, [builder.add(args[1], k)]))
        return context.get_dummy_value()

    return signature, generate


def _lay_out(arguments):  # type: ignore[no-untyped-def]
    """A work item is DEPTH tokens of a sequence, all heads.

    keys[16 tokens, q, m] = k[token m, 2 q : 2 q + 2]; values[pair, d] = v[tokens of the pair, d].
    """
    block = carray(arguments, ARGUMENTS)
    k = carray(array_at(block[FIRST], uint32), 1)
    v_ = carray(array_at(block[FIRST + 1], uint16), 1)
    kv_heads, dim, page = block[FIRST + 2], block[FIRST + 3], block[FIRST + 4]
    page_stride, token_stride = block[FIRST + 5], block[FIRST + 6]
    tables, table_stride = carray(array_at(block[FIRST + 7], int64), 1), block[FIRST + 8]
    known = carray(array_at(block[FIRST + 9], int64), 1)
    items = carray(array_at(block[FIRST + 10], int64), 1)
    keys = carray(array_at(block[FIRST + 11], uint32), 1)
    values = carray(array_at(block[FIRST + 12], uint32), 1)
    for item in work_items(block):
        about, first = items[2 * item] * _KNOWN, items[2 * item + 1]
        context, table = known[about + _CONTEXT], known[about + _TABLE] * table_stride
        for head in range(kv_heads):
            region = known[about + _START] * kv_heads + head * known[about + _PADDED]
            for token in range(first, first + DEPTH, SIDE):
                count = context - token
                place = 0
                if count > 0:
                    place = tables[table + token // page] * page_stride
                    place += token % page * token_stride + head * dim
                    target = (region + token) * dim // 2
                    for q in range(0, dim // 2, SIDE):
                        pair_place = place // 2 + q
                        set_transposed(
                            keys, target + q * SIDE, k, pair_place, token_stride // 2, count, SIDE
                        )
                for pair in range(0, SIDE, 2):
                    _set_pairs(
                        values, (region + token + pair) // 2 * dim, v_,
                        place + pair * token_stride if pair < count else -1,
                        place + (pair + 1) * token_stride if pair + 1 < count else -1, dim,
                    )  # fmt: skip


def _attend(arguments):  # type: ignore[no-untyped-def]
    """A work item is 16 query rows of a sequence with one KV head."""
    block = carray(arguments, ARGUMENTS)
    q, q_stride = carray(array_at(block[FIRST], uint16), 1), block[FIRST + 1]
    kv_heads, group, dim = block[FIRST + 2], block[FIRST + 3], block[FIRST + 4]
    known = carray(array_at(block[FIRST + 5], int64), 1)
    items = carray(array_at(block[FIRST + 6], int64), 1)
    keys = carray(array_at(block[FIRST + 7], uint32), 1)
    values = carray(array_at(block[FIRST + 8], uint32), 1)
    longest, window = block[FIRST + 9], block[FIRST + 10]
    scale = float_from(block[FIRST + 11])
    out = carray(array_at(block[FIRST + 12], uint16), 1)
    rows = np.zeros(SIDE * dim, np.uint16)
    totals = np.empty(SIDE * dim, np.float32)
    scores = np.empty(SIDE * (longest + SIDE), np.float32)
    weights = np.empty(SIDE * longest, np.uint16)
    configure()
    for item in work_items(block):
        about, first = items[item // kv_heads * 2] * _KNOWN, items[item // kv_heads * 2 + 1]
        head = item % kv_heads
        count = min(SIDE, known[about + _ROWS] - first)
        position = known[about + _CONTEXT] - known[about + _ROWS] + first
        begin = max(0, position + 1 - window) // DEPTH * DEPTH if window > 0 else 0
        length = (position + count - begin + DEPTH - 1) // DEPTH * DEPTH
        # A row has room for what exp_and_sum zeroes behind its end.
        stride = length + SIDE
        region = known[about + _START] * kv_heads + head * known[about + _PADDED] + begin
        key_place, value_place = region * dim // 2, region // 2 * dim
        for g in range(group):
            heads = kv_heads * group
            for r in range(count):
                source = (known[about + _ROW] + first + r) * q_stride + (head * group + g) * dim
                for d in range(dim):
                    rows[r * dim + d] = q[source + d]
            multiply(
                rows, 0, dim, dim, keys, key_place, SIDE, SIDE * dim // 2, SIDE * DEPTH // 2, dim,
                scores, 0, stride, length,
            )  # fmt: skip
            for r in range(count):
                end = position + r + 1 - begin
                start = max(0, end - window) if window > 0 else 0
                top = largest(scores, r * stride + start, end - start)
                total = exp_and_sum(scores, r * stride + start, end - start, top, scale)
                weights[r * length : r * length + start] = 0
                set_scaled(
                    weights, r * length + start, end - start, scores, r * stride + start,
                    float32(1.0),
                )  # fmt: skip
                weights[r * length + end : (r + 1) * length] = 0
                scores[r * stride] = total
            multiply(
                weights, 0, length, length, values, value_place, dim, SIDE, DEPTH // 2 * dim,
                length, totals, 0, dim, dim,
            )  # fmt: skip
            for r in range(count):
                row = known[about + _ROW] + first + r
                inverse = float32(1.0) / scores[r * stride]
                place = (row * heads + head * group + g) * dim
                set_scaled(out, place, dim, totals, r * dim, inverse)
    release()


LAY_OUT, ATTEND = Kernel(_lay_out), Kernel(_attend)


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What to compile for a serving dtype."""
    return (LAY_OUT, ATTEND) if dtype is torch.bfloat16 and available() else ()


def serves(q: Tensor, k_cache: Tensor) -> bool:
    """Whether `prefill` computes this dtype and layout on this machine."""
    dim = q.shape[2]
    packed = q.stride(2) == 1 and q.stride(1) == dim and k_cache.stride(2) == dim
    fits = packed and dim % DEPTH == 0 and k_cache.shape[1] % SIDE == 0
    return fits and q.dtype is k_cache.dtype is torch.bfloat16 and available()


@dataclass(frozen=True)
class _Work:
    """Sequences that are laid out together."""

    known: Tensor
    pieces: Tensor  # (sequence, first token), to lay out
    blocks: Tensor  # (sequence, first row), to attend
    tokens: int  # rounded up to DEPTH each
    longest: int  # context, rounded up


def _padded(tokens: int) -> int:
    return -(-tokens // DEPTH) * DEPTH


@lru_cache(maxsize=4)
def _work(
    query_starts: tuple[int, ...],
    context_lens: tuple[int, ...],
    num_decodes: int,
    window: int | None,
) -> tuple[_Work, ...]:
    """All sequences behind the decodes, in groups of _TOGETHER tokens at most, or of one."""
    groups: list[list[int]] = []
    tokens = _TOGETHER
    for i in range(num_decodes, len(context_lens)):
        if tokens + context_lens[i] > _TOGETHER:
            groups.append([])
            tokens = 0
        groups[-1].append(i)
        tokens += context_lens[i]
    return tuple(_together(group, query_starts, context_lens, window) for group in groups)


def _together(
    sequences: Sequence[int],
    query_starts: tuple[int, ...],
    context_lens: tuple[int, ...],
    window: int | None,
) -> _Work:
    known: list[tuple[int, ...]] = []
    pieces: list[tuple[int, int]] = []
    blocks: list[tuple[int, int]] = []
    tokens = 0
    for i in sequences:
        row, context = query_starts[i], context_lens[i]
        rows = query_starts[i + 1] - row
        seen = max(0, context - rows + 1 - window) // DEPTH * DEPTH if window else 0
        pieces += [(len(known), token) for token in range(seen, context, DEPTH)]
        blocks += [(len(known), first) for first in range(0, rows, SIDE)]
        known.append((row, rows, context, tokens, _padded(context), i))
        tokens += _padded(context)
    longest = max(_padded(context_lens[i]) for i in sequences)
    tensors = torch.tensor(known), torch.tensor(pieces), torch.tensor(blocks)
    return _Work(*tensors, tokens, longest)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    """`ops.paged_attention` for the sequences behind the decodes of a batch, into `out`.

    q: `[rows, heads, head_dim]` with contiguous heads; out the same, contiguous.
    """
    (kv_heads, dim), group = k_cache.shape[2:], q.shape[1] // k_cache.shape[2]
    for work in _work(batch.query_starts, batch.context_lens, batch.num_decodes, sliding_window):
        keys, values = (
            cpu_activations.empty((work.tokens, kv_heads, dim // 2), torch.int32) for _ in range(2)
        )
        LAY_OUT(
            len(work.pieces), 4 * keys.nbytes, k_cache, v_cache, kv_heads, dim, k_cache.shape[1],
            k_cache.stride(0), k_cache.stride(1),
            batch.block_tables, batch.block_tables.stride(0),
            work.known, work.pieces, keys, values,
        )  # fmt: skip
        ATTEND(
            len(work.blocks) * kv_heads, out.nbytes * 8, q, q.stride(0), kv_heads, group, dim,
            work.known, work.blocks, keys, values, work.longest, sliding_window or 0,
            float_bits(scale), out,
        )  # fmt: skip
