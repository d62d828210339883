"""The public operations. They check shapes and call the implementation chosen for the device.

Notation: T rows of a batch, `a(t)` the adapter of row t, s a slice of a fused projection
(q|k|v, gate|up), r the adapter's own rank for that slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorad_kernels.auto import implementation
from lorad_kernels.factors import FactorTable, LoraFactors
from lorad_kernels.segments import LoraSegments


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows belong to which sequence, and where each sequence's K and V are.

    Sequence i has rows `query_starts[i]:query_starts[i + 1]`. Its newest token is at position
    `context_lens[i] - 1`, so its rows are the last ones of its context. `block_tables` is
    `[sequences, blocks]` int64: pages in token order, padded with any page of the same
    sequence. The first `num_decodes` sequences have exactly one row each.
    """

    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    block_tables: Tensor
    context_lens_device: Tensor  # [sequences] int64
    kv_pages: Tensor  # [T] int64: the page that takes each row's K and V
    kv_offsets: Tensor  # [T] int64: the row's place in that page


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def add_lora(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: Sequence[Sequence[LoraFactors]] | FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    """`y[t, slice s] += scaling * (x[t] @ A[a(t), s].T) @ B[a(t), s].T`, in place.

    y: `[T, out]`, the base projection's output. x: `[T, in]`, the same input. slab: 1-D, the
    memory all factors lie in. table: `table[slot][s]` for the adapters of the step; a
    FactorTable saves packing it in each call.
    slice_starts: output column where each slice begins, and the end of the last one.
    Rows outside every segment are not touched. Raises ValueError on shapes that do not fit.
    """
    _check(y.ndim == 2 and x.ndim == 2 and y.shape[0] == x.shape[0], "y and x must be [T, *]")
    _check(slab.ndim == 1, "the slab must be one-dimensional")
    _check(x.shape[0] == segments.num_rows, "segments are of another batch")
    _check(slice_starts[-1] == y.shape[1], "slices do not cover the projection")
    implementation(y.device).add_lora(y, x, slab, FactorTable.of(table), slice_starts, segments)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """Store the rows' K and V, each `[T, kv_heads, head_dim]`, where the batch says.

    k_cache and v_cache are views `[pages, block_size, kv_heads, head_dim]` of the slab.
    """
    k_cache[batch.kv_pages, batch.kv_offsets] = k
    v_cache[batch.kv_pages, batch.kv_offsets] = v


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
    """Rotary embedding of q and k; k and v go to the cache, the new q `[T, heads, dim]` comes back.

    q: `[T, heads, head_dim]`; k, v: `[T, kv_heads, head_dim]`; cos, sin: `[T, head_dim]`, whose
    halves are equal. Pairs (i, i + head_dim / 2) turn by the row's angles, in float32.
    """
    return implementation(q.device).rotate_and_store(q, k, v, cos, sin, k_cache, v_cache, batch)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """`x += delta` in place, then `x / sqrt(mean(x^2) + eps) * weight` as `dtype`.

    x: `[T, width]` float32, the residual stream; delta the same shape in the serving dtype, or
    None for nothing to add; weight: `[width]` float32. Zhang and Sennrich, arXiv:1910.07467.
    """
    _check(x.dtype is torch.float32 and x.is_contiguous(), "x must be contiguous float32")
    return implementation(x.device).add_rms_norm(x, delta, weight, eps, dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up [T, 2 * width]`: `[T, width]`, rounded once."""
    return implementation(gate_up.device).silu_mul(gate_up)


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest value of each row of `x [T, width]` (float32) and its first index (int64).

    A row that holds NaN has the value NaN; its index means nothing.
    """
    return implementation(x.device).row_max(x)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row of `[S, vocab]`: `[S]` int64, -1 for a row with NaN or
    infinity. It stays on the device: a step has one number a row to copy back."""
    return implementation(logits.device).greedy_tokens(logits)


@dataclass(frozen=True, slots=True)
class Draws:
    """How a token of each row is drawn; all `[S]` on the host, top_k int64, the others float64."""

    temperature: Tensor
    top_k: Tensor  # 0 = all tokens
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor  # in [0, 1): the number that decides


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """One token for each row of `logits [S, vocab]`, by the inverse of its distribution: `[S]`.

    A token's weight is `exp((logit - max) / temperature)`. Kept are the `top_k` largest, of these
    as many of the largest as hold `top_p` of their sum, and of these what is at least `min_p` times
    the largest; whatever equals the last one kept is kept too. The token is the first where the
    kept weights up to it hold more than `uniform` of their sum. So a row's token depends on nothing
    beside it.

    Logits may be -inf, not NaN or +inf. Tokens stay on the device.
    """
    settings = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
    _check(all(each.shape == logits.shape[:1] for each in settings), "a setting for each row")
    return implementation(logits.device).draw_tokens(logits, draws)


def take_rows(x: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows `rows [n]` (int64) of `x [m, width]`: `[n, width]`, as `dtype`, else x's own."""
    return implementation(x.device).take_rows(x, rows, dtype or x.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each row over its own sequence's pages: `[T, heads, head_dim]`.

    q: `[T, heads, head_dim]`; k_cache, v_cache: `[pages, block_size, kv_heads, head_dim]`,
    where heads is a multiple of kv_heads (grouped-query attention). The rows' own K and V must
    already be written. With `sliding_window` w, a row at position p sees p-w+1 ... p.
    With `softcap` c, a score is `c * tanh(score / c)`.
    """
    _check(q.ndim == 3 and k_cache.ndim == 4, "q must be [T, heads, dim], caches 4-D")
    _check(q.shape[1] % k_cache.shape[2] == 0, "heads must be a multiple of kv_heads")
    return implementation(q.device).paged_attention(
        q, k_cache, v_cache, batch, scale=scale, sliding_window=sliding_window, softcap=softcap
    )
