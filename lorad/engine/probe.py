"""One short prompt under one adapter, with every delta that the engine adds written down.

The deltas are those of the step loop: its slab, its factor tables, its kernels. They are added
to zeros to be written down, as the difference of two large numbers would be mostly rounding, and
then to the base's output as always, so that the next layer's input is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lorad_kernels import AttentionBatch, FactorTable, LoraSegments, Segment, finish
from torch import Tensor

from lorad.model.decoder import Decoder, KVCacheViews
from lorad.model.forward_batch import Deltas, ForwardBatch, LoraBatch


@dataclass(frozen=True, slots=True)
class RecordedDelta:
    """What was added to one projection, in host memory. `deltas` are of the same rows by
    different kernels: as decodes and short prompts are computed, and as long prompts are."""

    layer: int
    projection: int  # position in ModelShape.projections
    x: Tensor  # [T, in], serving dtype
    deltas: tuple[Tensor, Tensor]  # each [T, out]


class DeltaRecorder:
    """The `Deltas` of a batch whose rows all use the adapter in one slot of the tables."""

    def __init__(
        self, slab: Tensor, tables: Sequence[Sequence[FactorTable]], slot: int, rows: int
    ) -> None:
        # The first row by itself: kernels have another tile for a single one.
        short = LoraSegments((Segment(0, 1, slot), Segment(1, rows, slot)), rows)
        self._short = LoraBatch(slab, tables, short)
        long = LoraSegments((Segment(0, rows, slot, is_long=True),), rows)
        self._long = replace(self._short, segments=long)
        self.recorded: list[RecordedDelta] = []

    def add(
        self, y: Tensor, x: Tensor, layer: int, projection: int, slice_starts: Sequence[int]
    ) -> None:
        def delta(lora: LoraBatch) -> Tensor:
            added = torch.zeros_like(y)
            lora.add(added, x, layer, projection, slice_starts)
            finish(y.device)
            return added.to("cpu")

        finish(y.device)
        kept = x.to("cpu", copy=True)
        deltas = (delta(self._short), delta(self._long))
        self.recorded.append(RecordedDelta(layer, projection, kept, deltas))
        self._short.add(y, x, layer, projection, slice_starts)


def probe_batch(token_ids: Sequence[int], lora: Deltas, device: torch.device) -> ForwardBatch:
    """One prompt in one block; nobody wants its logits."""
    count = len(token_ids)

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    attention = AttentionBatch(
        query_starts=(0, count),
        context_lens=(count,),
        num_decodes=int(count == 1),
        block_tables=tensor([[0]]),
        context_lens_device=tensor([count]),
        kv_pages=tensor([0] * count),
        kv_offsets=tensor(range(count)),
    )
    return ForwardBatch(tensor(token_ids), tensor(range(count)), attention, tensor([]), lora)


def scratch_kv(decoder: Decoder, tokens: int) -> KVCacheViews:
    """One block outside the slab. All layers write it in turn: each reads its own K and V only."""
    shape = decoder.config.shape
    size = (1, tokens, shape.num_kv_heads, shape.head_dim)
    k, v = torch.zeros(2, *size, dtype=decoder.dtype, device=decoder.device)
    return KVCacheViews((k,) * shape.num_layers, (v,) * shape.num_layers)
