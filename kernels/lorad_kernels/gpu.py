"""The CUDA path: own Triton kernels for all but matmuls and the attention of prefills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorad_kernels import (
    gpu_prefill,
    reference,
    torch_paths,
    triton_attention,
    triton_fused,
    triton_lora,
)

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.ops import AttentionBatch, Draws
    from lorad_kernels.segments import LoraSegments


def add_lora(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    triton_lora.add_lora(y, x, slab, table, slice_starts, segments)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    decodes = batch.num_decodes
    if not triton_attention.serves(q, k_cache) or (softcap and decodes < q.shape[0]):
        return reference.paged_attention(
            q, k_cache, v_cache, batch, scale=scale, sliding_window=sliding_window, softcap=softcap
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decodes:
        triton_attention.decode(
            q[:decodes],
            k_cache,
            v_cache,
            batch,
            out,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    torch_paths.prefill_all(
        q, k_cache, v_cache, batch, out, scale, sliding_window, gpu_prefill.attention(q)
    )
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    if triton_fused.norms(x, delta, weight):
        return triton_fused.add_rms_norm(x, delta, weight, eps, dtype)
    return reference.add_rms_norm(x, delta, weight, eps, dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    if gate_up.is_contiguous():
        return triton_fused.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


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
    if triton_fused.rotates(q, k, v, cos, k_cache, v_cache):
        return triton_fused.rotate_and_store(q, k, v, cos, sin, k_cache, v_cache, batch)
    return reference.rotate_and_store(q, k, v, cos, sin, k_cache, v_cache, batch)


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_contiguous():
        return triton_fused.row_max(x)
    return reference.row_max(x)


def greedy_tokens(logits: Tensor) -> Tensor:
    return reference.no_token_unless_finite(*row_max(logits))


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    return reference.draw_tokens(logits, draws)


def take_rows(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return reference.take_rows(x, rows, dtype)
