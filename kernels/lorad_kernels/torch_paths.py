"""What the CPU leaves to torch, long segments and prefill attention; the walk over prefills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lorad_kernels.reference import visible

if TYPE_CHECKING:
    from lorad_kernels.factors import LoraFactors
    from lorad_kernels.ops import AttentionBatch
    from lorad_kernels.segments import Segment

# torch's causal attention turns NaN into zeros when there are fewer keys than lanes in a vector
# (16 with AVX-512), and the request that computed it would get an answer instead of an error.
_CAUSAL_FROM = 64

# Attention of rows `[n, heads, dim]` at the end of K and V `[keys, kv_heads, dim]`, of which each
# row sees those up to its own; then scale and window.
Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]


def add_segment(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    factors: Sequence[LoraFactors],
    slice_starts: Sequence[int],
    segment: Segment,
) -> None:
    """`ops.add_lora` for one segment, as two matmuls a slice in the serving dtype."""
    rows_x, rows_y = x[segment.start : segment.end], y[segment.start : segment.end]
    for s, places in enumerate(factors[: len(slice_starts) - 1]):
        if places.rank:
            _add_slice(rows_y[:, slice_starts[s] : slice_starts[s + 1]], rows_x, slab, places)


def _add_slice(y: Tensor, x: Tensor, slab: Tensor, factors: LoraFactors) -> None:
    rank, width = factors.rank, x.shape[1]
    base = slab.storage_offset()  # as_strided counts from the storage, the factors from the slab
    a = torch.as_strided(slab, (rank, width), (width, 1), base + factors.a_offset)
    b = torch.as_strided(slab, (y.shape[1], rank), (rank, 1), base + factors.b_offset)
    y.addmm_(x @ a.T, b.T, alpha=factors.scaling)


def gather(k_cache: Tensor, v_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of `pages [..., blocks]` as `[..., blocks * block_size, kv_heads, head_dim]`."""
    return k_cache[pages].flatten(-4, -3), v_cache[pages].flatten(-4, -3)


def prefill(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """`Attend`, by the kernel that torch chooses."""
    context = k.shape[0]
    whole = q.shape[0] == context and window is None and context >= _CAUSAL_FROM
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=None if whole else visible(q.shape[0], context, window, q.device),
        is_causal=whole,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def prefill_all(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    scale: float,
    window: int | None,
    attend: Attend = prefill,
) -> None:
    """`ops.paged_attention` for the sequences behind the decodes, one after the other.

    K and V are gathered from the pages that a window can see.
    """
    block = k_cache.shape[1]
    for i in range(batch.num_decodes, len(batch.context_lens)):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        context = batch.context_lens[i]
        first = first_visible(rows.stop - rows.start, context, window)
        pages = batch.block_tables[i, first // block : -(-context // block)]
        seen = slice(first % block, first % block + context - first)
        k, v = gather(k_cache, v_cache, pages)
        out[rows] = attend(q[rows], k[seen], v[seen], scale, window)


def first_visible(rows: int, context: int, window: int | None) -> int:
    """The first position of a context that one of its last `rows` rows may look at."""
    return max(0, context - rows - window + 1) if window else 0
