"""What one step computes, as plain lists: the same for a captured step and for any other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from lorad_kernels import AdapterFactors, LoraSegments, group_rows, pack_adapter
from numpy.typing import NDArray

from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.scheduler import ScheduledBatch, ScheduledSequence
from lorad.memory.adapter_pool import ResidentAdapter
from lorad.memory.upload import Upload

_PACKED_KEPT = 256


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T rows of S sequences, decodes first; see ForwardBatch and AttentionBatch for the parts."""

    token_ids: list[int]  # [T]
    positions: list[int]  # [T]
    kv_pages: list[int]  # [T]
    kv_offsets: list[int]  # [T]
    query_starts: list[int]  # [S + 1]
    context_lens: list[int]  # [S]
    block_tables: list[list[int]]  # [S], each as long as its sequence
    logits_rows: list[int]
    segments: LoraSegments | None  # None when all rows are the base model's
    adapters: list[AdapterFactors]  # by slot
    arriving: tuple[Upload, ...] = ()  # of adapters whose last layers are still being copied

    @property
    def num_decodes(self) -> int:
        """Sequences with one row; they come first."""
        return sum(end == start + 1 for start, end in pairwise(self.query_starts))

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence has one row, and its next token is wanted."""
        return len(self.logits_rows) == len(self.token_ids) == len(self.context_lens)


def step_inputs(
    batch: ScheduledBatch, tiers: AdapterTiers, block_size: int, most_rows: int
) -> StepInputs:
    """`most_rows` is of `group_rows`. Raises RuntimeError if an adapter is not on the device."""
    token_ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    starts = [0]
    logits_rows: list[int] = []
    for item in batch.items:
        sequence, end = item.sequence, item.start + item.count
        token_ids += sequence.tokens[item.start : end]
        positions += range(item.start, end)
        pages += [sequence.block_table[p // block_size] for p in range(item.start, end)]
        starts.append(len(token_ids))
        if item.samples:
            logits_rows.append(len(token_ids) - 1)
    segments, resident = _lora(batch.items, tiers, most_rows)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        kv_pages=pages,
        kv_offsets=[p % block_size for p in positions],
        query_starts=starts,
        context_lens=[item.start + item.count for item in batch.items],
        block_tables=[item.sequence.block_table for item in batch.items],
        logits_rows=logits_rows,
        segments=segments,
        adapters=[adapter.factors for adapter in resident],
        arriving=tuple(adapter.upload for adapter in resident if not adapter.upload.done),
    )


def _lora(
    items: tuple[ScheduledSequence, ...], tiers: AdapterTiers, most_rows: int
) -> tuple[LoraSegments | None, list[ResidentAdapter]]:
    digests = list(dict.fromkeys(i.sequence.digest for i in items if i.sequence.digest))
    if not digests:
        return None, []
    resident = [adapter for digest in digests if (adapter := tiers.get(digest))]
    if len(resident) < len(digests):
        raise RuntimeError("a running adapter is not on the device")
    slots = {digest: slot for slot, digest in enumerate(digests)}
    segments = group_rows(
        [slots[i.sequence.digest] if i.sequence.digest else None for i in items],
        [i.count for i in items],
        most_rows,
    )
    return segments, resident


class PackedAdapters:
    """Packed factors by the adapters' identity: one that moved has other factors objects."""

    def __init__(self) -> None:
        # The factors are kept beside, so that no identity is used again.
        self._known: dict[int, tuple[AdapterFactors, NDArray[np.int64]]] = {}

    def of(self, adapters: list[AdapterFactors]) -> list[NDArray[np.int64]]:
        for adapter in adapters:
            if id(adapter) not in self._known:
                self._known[id(adapter)] = (adapter, pack_adapter(adapter))
        packed = [self._known[id(adapter)][1] for adapter in adapters]
        if len(self._known) > max(_PACKED_KEPT, len(adapters)):
            self._known = {id(adapter): self._known[id(adapter)] for adapter in adapters}
        return packed


def same_adapters(left: list[AdapterFactors], right: list[AdapterFactors]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
