"""Decode attention on a GPU over the pages where they lie, split along the context.

Long contexts of few sequences fill the device, since a context is cut into splits (flash
decoding, Dao et al. 2023). How follows from its own length alone, and the splits are combined in
order, so a row's result does not depend on the batch. Splits grow once there are `MAX_SPLITS`: a
captured graph launches so many for every sequence, whatever its length will be, and those beyond
the context leave at once. The query heads of a group share the keys and values that are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from lorad_kernels.ops import AttentionBatch

SPLIT = 256  # positions in one program, or a multiple of it
MAX_SPLITS = 32  # of one sequence
KEYS = 16  # positions in one step of a program
LEAST_GROUP = 16  # rows of the least tensor-core tile
WIDEST_HEAD = 256
STAGES = 2

# As in triton_lora: these vary from step to step, and are not to be compiled for.
DECODE_VARIES = ("table_stride", "splits")
COMBINE_VARIES = ("splits",)


@triton.jit  # type: ignore[untyped-decorator]
def _split_length(context, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.cdiv(tl.cdiv(context, SPLIT), MAX_SPLITS) * SPLIT


@triton.jit(do_not_specialize=DECODE_VARIES)  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    tables,
    contexts,
    partial,
    limits,
    scale,
    q_stride,
    page_stride,
    token_stride,
    table_stride,
    splits,
    window,
    group,
    dim,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[t, p, h] = sum of e^(score - max) * V over split p; limits: that max, sum of e."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence).to(tl.int32)
    length = _split_length(context, SPLIT, MAX_SPLITS)
    first = split * length
    begin = first
    if window > 0:
        begin = tl.maximum(begin, context - window)
    end = tl.minimum(first + length, context)
    if begin < end:
        rows = tl.arange(0, GROUP)
        dims = tl.arange(0, DIM)
        in_group = rows < group
        in_dim = dims < dim
        heads = head * group + rows
        queries = tl.load(
            q + sequence * q_stride + heads[:, None] * dim + dims[None, :],
            mask=in_group[:, None] & in_dim[None, :],
            other=0.0,
        )
        top = tl.full((GROUP,), float("-inf"), tl.float32)
        weight = tl.zeros((GROUP,), tl.float32)
        total = tl.zeros((GROUP, DIM), tl.float32)
        # Whole splits before a window are left out, but steps start at a split's first position
        # even if the window begins later: the order of sums is then the same for all contexts
        # of up to SPLIT * MAX_SPLITS.
        for position in range(first, end, KEYS):
            positions = position + tl.arange(0, KEYS)
            inside = (positions >= begin) & (positions < end)
            pages = tl.load(
                tables + sequence * table_stride + positions // BLOCK, mask=inside, other=0
            )
            places = pages * page_stride + (positions % BLOCK) * token_stride + head * dim
            k = tl.load(
                keys + places[None, :] + dims[:, None],
                mask=inside[None, :] & in_dim[:, None],
                other=0.0,
            )
            scores = tl.dot(queries, k, input_precision=PRECISION) * scale
            if SOFTCAP > 0:
                # tanh by exp, which is what the hardware has.
                scores = SOFTCAP * (1 - 2 / (tl.exp(2 * scores / SOFTCAP) + 1))
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            kept = tl.exp(top - safe)
            e = tl.exp(scores - safe[:, None])
            v = tl.load(
                values + places[:, None] + dims[None, :],
                mask=inside[:, None] & in_dim[None, :],
                other=0.0,
            )
            weight = weight * kept + tl.sum(e, 1)
            total = total * kept[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
            top = higher
        place = (sequence.to(tl.int64) * splits + split) * tl.num_programs(1) * group + heads
        tl.store(
            partial + place[:, None] * dim + dims[None, :],
            total,
            mask=in_group[:, None] & in_dim[None, :],
        )
        tl.store(limits + place * 2, top, mask=in_group)
        tl.store(limits + place * 2 + 1, weight, mask=in_group)


@triton.jit(do_not_specialize=COMBINE_VARIES)  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    partial,
    limits,
    contexts,
    out,
    splits,
    window,
    heads,
    dim,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """out[t, h] = the splits' sums, each scaled to the greatest score of all, over their weight."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(contexts + sequence).to(tl.int32)
    length = _split_length(context, SPLIT, MAX_SPLITS)
    first = 0
    if window > 0:
        first = tl.maximum(context - window, 0) // length
    dims = tl.arange(0, DIM)
    top = float("-inf")
    weight = 0.0
    total = tl.zeros((DIM,), tl.float32)
    for split in range(first, tl.cdiv(context, length)):
        place = (sequence.to(tl.int64) * splits + split) * heads + head
        own = tl.load(limits + place * 2)
        higher = tl.maximum(top, own)
        kept, added = tl.exp(top - higher), tl.exp(own - higher)
        part = tl.load(partial + place * dim + dims, mask=dims < dim, other=0.0)
        total = total * kept + part * added
        weight = weight * kept + tl.load(limits + place * 2 + 1) * added
        top = higher
    value = (total / weight).to(out.dtype.element_ty)
    tl.store(out + (sequence * heads + head) * dim + dims, value, mask=dims < dim)


def serves(q: Tensor, k_cache: Tensor) -> bool:
    """Whether `decode` computes this dtype and layout."""
    dim = q.shape[2]
    packed = q.stride(2) == 1 and q.stride(1) == dim and k_cache.stride(2) == dim
    return packed and q.dtype is k_cache.dtype and dim <= WIDEST_HEAD


def warps(dtype: torch.dtype) -> int:
    """Found by compiling: with these no variant spills (docs/benchmarks.md)."""
    return 4 if dtype is torch.float32 else 2


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> None:
    """`ops.paged_attention` for the first sequences of a batch, one row each, into `out`.

    q: `[sequences, heads, head_dim]` with contiguous heads; out the same, contiguous. The host's
    `batch.context_lens` may be upper bounds: they only size the launch.
    """
    sequences, heads, dim = q.shape
    block, kv_heads = k_cache.shape[1:3]
    splits = min(MAX_SPLITS, -(-max(batch.context_lens[:sequences]) // SPLIT))
    shape = (sequences, splits, heads)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
    limits = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    window, group = sliding_window or 0, heads // kv_heads
    run: Any = decode_kernel[(sequences, kv_heads, splits)]
    run(
        q, k_cache, v_cache, batch.block_tables, batch.context_lens_device, partial, limits,
        scale, q.stride(0), k_cache.stride(0), k_cache.stride(1), batch.block_tables.stride(0),
        splits, window, group, dim,
        BLOCK=block, SPLIT=SPLIT, MAX_SPLITS=MAX_SPLITS, KEYS=KEYS,
        GROUP=max(LEAST_GROUP, triton.next_power_of_2(group)),
        DIM=max(16, triton.next_power_of_2(dim)), SOFTCAP=softcap or 0.0, PRECISION="ieee",
        num_warps=warps(q.dtype), num_stages=STAGES, enable_fp_fusion=True,
    )  # fmt: skip
    combine: Any = combine_kernel[(sequences, heads)]
    combine(
        partial, limits, batch.context_lens_device, out, splits, window, heads, dim,
        SPLIT=SPLIT, MAX_SPLITS=MAX_SPLITS, DIM=triton.next_power_of_2(dim), num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
