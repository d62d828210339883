"""The CPU path: which kernels of our own serve what, and what is left to torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorad_kernels import (
    cpu_activations,
    cpu_amx,
    cpu_attention,
    cpu_draw,
    cpu_fused,
    cpu_linear,
    cpu_lora,
    cpu_prefill,
    cpu_queue,
    cpu_sgmv,
    reference,
    torch_paths,
)
from lorad_kernels.cpu_threads import finish

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.ops import AttentionBatch, Draws
    from lorad_kernels.segments import LoraSegments


def compile_kernels(dtype: torch.dtype) -> None:
    kernels = [
        cpu_queue.QUEUE,
        *cpu_amx.kernels(dtype),
        *cpu_prefill.kernels(dtype),
        *cpu_sgmv.kernels(dtype),
        *cpu_lora.KERNELS.get(dtype, ()),
        *cpu_fused.KERNELS.get(dtype, ()),
        *cpu_attention.kernels(dtype),
        *cpu_draw.kernels(dtype),
        *cpu_linear.kernels(dtype),
    ]
    for kernel in kernels:
        kernel.compile()


def add_lora(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    if table.max_rank == 0:
        return
    in_place = cpu_lora.serves(y, x, slab)
    others = segments.long if in_place else segments.segments
    if in_place:
        cpu_lora.add_chunks(y, x, slab, table, slice_starts, segments)
    if in_place and others and cpu_sgmv.serves(y, x, slab, slice_starts):
        cpu_sgmv.add_long(y, x, slab, table, slice_starts, segments)
        others = tuple(segment for segment in others if segment.slot in table.odd_slots)
    if others:
        finish()
    for segment in others:
        torch_paths.add_segment(y, x, slab, table[segment.slot], slice_starts, segment)


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
    if softcap or not cpu_attention.serves(q, k_cache):
        finish()
        return reference.paged_attention(
            q, k_cache, v_cache, batch, scale=scale, sliding_window=sliding_window, softcap=softcap
        )
    out = cpu_activations.empty(q.shape, q.dtype)
    decodes = batch.num_decodes
    if decodes:
        cpu_attention.decode(
            q[:decodes], k_cache, v_cache, batch, out, scale=scale, sliding_window=sliding_window
        )
    if decodes == len(batch.context_lens):
        return out
    if cpu_prefill.serves(q, k_cache):
        cpu_prefill.prefill(
            q, k_cache, v_cache, batch, out, scale=scale, sliding_window=sliding_window
        )
        return out
    finish()
    torch_paths.prefill_all(q, k_cache, v_cache, batch, out, scale, sliding_window)
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    if dtype in cpu_fused.DTYPES and (delta is None or delta.dtype is dtype):
        return cpu_fused.add_rms_norm(x, delta, weight, eps, dtype)
    finish()
    return reference.add_rms_norm(x, delta, weight, eps, dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype in cpu_fused.DTYPES and gate_up.is_contiguous():
        return cpu_fused.silu_mul(gate_up)
    finish()
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
    if cpu_fused.rotates(q, k, v, k_cache, v_cache):
        return cpu_fused.rotate_and_store(q, k, v, cos, sin, k_cache, v_cache, batch)
    finish()
    return reference.rotate_and_store(q, k, v, cos, sin, k_cache, v_cache, batch)


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype in cpu_fused.DTYPES and x.is_contiguous():
        return cpu_fused.row_max(x)
    finish()
    return reference.row_max(x)


def greedy_tokens(logits: Tensor) -> Tensor:
    if logits.dtype in cpu_fused.DTYPES and logits.is_contiguous():
        return cpu_fused.row_max(logits, finite_only=True)[1]
    finish()
    return reference.greedy_tokens(logits)


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    if cpu_draw.serves(logits):
        return cpu_draw.draw_tokens(logits, draws)
    finish()
    return reference.draw_tokens(logits, draws)


def take_rows(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if cpu_fused.takes_rows(x, dtype):
        return cpu_fused.take_rows(x, rows, dtype)
    finish()
    return reference.take_rows(x, rows, dtype)
