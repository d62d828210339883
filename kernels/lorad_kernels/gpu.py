"""The CUDA path: own Triton kernels for LoRA and decode attention, torch for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorad_kernels import reference, torch_paths, triton_attention, triton_lora
from lorad_kernels.reference import add_rms_norm, rotate_and_store, row_max, silu_mul

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.ops import AttentionBatch
    from lorad_kernels.segments import LoraSegments

__all__ = [
    "add_lora",
    "add_rms_norm",
    "paged_attention",
    "rotate_and_store",
    "row_max",
    "silu_mul",
]


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
    torch_paths.prefill_all(q, k_cache, v_cache, batch, out, scale, sliding_window)
    return out
