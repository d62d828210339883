"""The input of one forward pass: plain values and tensors, no requests and no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lorad_kernels import AttentionBatch, FactorTable, LoraSegments, add_lora
from torch import Tensor


class Deltas(Protocol):
    """What adapters add to a projection's output."""

    def add(
        self, y: Tensor, x: Tensor, layer: int, projection: int, slice_starts: Sequence[int]
    ) -> None:
        """Add the rows' deltas to y `[T, out]`, in place, for the input x `[T, in]`."""
        ...


class Arriving(Protocol):
    """An adapter of which not all layers may be on the device yet."""

    def order_after(self, layer: int) -> None:
        """Have the device do what it is given next after it has that layer."""
        ...


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which rows use which resident adapter. A base-only batch has none of this."""

    slab: Tensor  # 1-D, serving dtype
    tables: Sequence[Sequence[FactorTable]]  # [layer][projection], each by slot and slice
    segments: LoraSegments
    arriving: Sequence[Arriving] = ()

    def add(
        self, y: Tensor, x: Tensor, layer: int, projection: int, slice_starts: Sequence[int]
    ) -> None:
        if projection == 0:  # the first of a layer
            for upload in self.arriving:
                upload.order_after(layer)
        add_lora(y, x, self.slab, self.tables[layer][projection], slice_starts, self.segments)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows: the scheduled tokens of all sequences of a step, decodes first."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch
    logits_rows: Tensor  # [S] int64: rows whose next token is wanted
    lora: Deltas | None
