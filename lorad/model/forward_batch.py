"""The input of one forward pass: plain values and tensors, no requests and no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lorad_kernels import AttentionBatch, FactorTable, LoraSegments
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which rows use which resident adapter. A base-only batch has none of this."""

    slab: Tensor  # 1-D, serving dtype
    tables: Sequence[Sequence[FactorTable]]  # [layer][projection], each by slot and slice
    segments: LoraSegments


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows: the scheduled tokens of all sequences of a step, decodes first."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch
    logits_rows: Tensor  # [S] int64: rows whose next token is wanted
    lora: LoraBatch | None
