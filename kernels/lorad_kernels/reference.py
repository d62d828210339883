"""The oracle: plain torch, float32 inside, one sequence and one segment at a time.

Written to be read and believed, not to be fast. Every other implementation is tested
against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable, LoraFactors
    from lorad_kernels.ops import AttentionBatch, Draws
    from lorad_kernels.segments import LoraSegments

_DRAWN = 16  # rows at a time: sorted weights and their sums take some 50 bytes a token


def add_lora(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: Sequence[Sequence[LoraFactors]] | FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    width = x.shape[1]
    for segment in segments.segments:
        rows = slice(segment.start, segment.end)
        for s, factors in enumerate(table[segment.slot]):
            if factors.rank == 0:
                continue
            columns = slice(slice_starts[s], slice_starts[s + 1])
            out_features = columns.stop - columns.start
            a = _matrix(slab, factors.a_offset, factors.rank, width).float()
            b = _matrix(slab, factors.b_offset, out_features, factors.rank).float()
            delta = factors.scaling * ((x[rows].float() @ a.T) @ b.T)
            y[rows, columns] = (y[rows, columns].float() + delta).to(y.dtype)


def _matrix(slab: Tensor, offset: int, rows: int, columns: int) -> Tensor:
    return slab[offset : offset + rows * columns].view(rows, columns)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    groups = q.shape[1] // k_cache.shape[2]
    for i, context in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        pages = batch.block_tables[i]
        k = k_cache[pages].flatten(0, 1)[:context].float().repeat_interleave(groups, 1)
        v = v_cache[pages].flatten(0, 1)[:context].float().repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(
            ~visible(rows.stop - rows.start, context, sliding_window, q.device), -torch.inf
        )
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out


def visible(queries: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """`[queries, context]` bool: which keys the last `queries` positions may look at."""
    keys = torch.arange(context, device=device)
    positions = torch.arange(context - queries, context, device=device)[:, None]
    mask = keys <= positions
    return mask if window is None else mask & (keys > positions - window)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    if delta is not None:
        x += delta
    return rms_norm(x, weight.shape, weight, eps).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


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
    k_cache[batch.kv_pages, batch.kv_offsets] = _rotate(k, cos, sin)
    v_cache[batch.kv_pages, batch.kv_offsets] = v
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos[:, None].float() + turned * sin[:, None].float()).to(x.dtype)


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.max(dim=-1)
    return values.float(), indices


def greedy_tokens(logits: Tensor) -> Tensor:
    return no_token_unless_finite(*row_max(logits))


def no_token_unless_finite(best: Tensor, tokens: Tensor) -> Tensor:
    return tokens.masked_fill(~best.isfinite(), -1)


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    settings = torch.stack(
        [draws.temperature, draws.top_k.double(), draws.top_p, draws.min_p, draws.uniform]
    ).to(logits.device)
    truncates = (draws.top_k > 0) | (draws.top_p < 1)
    parts = [
        _draw(logits[rows], settings[:, rows], bool(truncates[rows].any()))
        for rows in (slice(first, first + _DRAWN) for first in range(0, len(logits), _DRAWN))
    ]
    return torch.cat(parts)


def _draw(logits: Tensor, settings: Tensor, truncates: bool) -> Tensor:
    """`[S]` int64 of logits `[S, vocab]`; settings: `[5, S]` float64, the fields of `Draws`."""
    temperature, top_k, top_p, min_p, uniform = settings[:, :, None]
    scores = logits.float()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.float()
    weights = scores.exp()
    least = min_p.float()
    if truncates:
        least = torch.maximum(least, _least_kept(weights, top_k.long(), top_p))
    mass = weights.where(weights >= least, 0).double().cumsum(-1)
    # Below the last sum, however u times it is rounded.
    target = torch.minimum(uniform * mass[:, -1:], mass[:, -1:].nextafter(mass.new_zeros(())))
    return torch.searchsorted(mass, target, right=True)[:, 0]


def _least_kept(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`[S, 1]`: the least weight that top-k and top-p leave."""
    ordered, width = weights.sort(-1, descending=True).values, weights.shape[1]
    last = top_k.clamp(max=width).where(top_k > 0, width) - 1
    kept = ordered >= ordered.gather(-1, last)
    mass = ordered.where(kept, 0).double()
    sums = mass.cumsum(-1)
    target = (top_p * sums[:, -1:]).clamp(min=torch.finfo(torch.float64).tiny)
    kept &= sums - mass < target
    return ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)


def take_rows(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return x[rows].to(dtype)
