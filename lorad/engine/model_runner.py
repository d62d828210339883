"""Turns a scheduled batch into tensors, runs the decoder, and samples. Holds no policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from lorad_kernels import (
    AdapterFactors,
    AttentionBatch,
    FactorTable,
    group_rows,
    pack_adapter,
    step_tables,
)
from numpy.typing import NDArray

from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.probe import DeltaRecorder, RecordedDelta, probe_batch, scratch_kv
from lorad.engine.sampler import Sampled, sample
from lorad.engine.scheduler import ScheduledBatch, ScheduledSequence
from lorad.memory.slab import Slab
from lorad.model.decoder import Decoder, KVCacheViews
from lorad.model.forward_batch import ForwardBatch, LoraBatch


class _StepTables:
    """The packed factor tables of the steps' adapters, made again only when those change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._adapters: Sequence[AdapterFactors] = ()
        self._packed: list[NDArray[np.int64]] = []
        self._tables: tuple[tuple[FactorTable, ...], ...] = ()

    def of(self, adapters: Sequence[AdapterFactors]) -> tuple[tuple[FactorTable, ...], ...]:
        """`[layer][projection]`, by slot. An adapter that moved has other factors objects."""
        if not _same(adapters, self._adapters):
            # Objects are told apart by identity, and kept here so that none is reused.
            known = {id(a): p for a, p in zip(self._adapters, self._packed, strict=True)}
            self._packed = [known[id(a)] if id(a) in known else pack_adapter(a) for a in adapters]
            self._adapters = adapters
            self._tables = step_tables(adapters, self._packed, self._device)
        return self._tables

    def beside(self, adapter: AdapterFactors) -> tuple[tuple[tuple[FactorTable, ...], ...], int]:
        """The last step's tables with one more adapter, if it is not in them, and its slot.

        So the next step needs no new packing.
        """
        slots = [slot for slot, known in enumerate(self._adapters) if known is adapter]
        if slots:
            return self._tables, slots[0]
        return self.of([*self._adapters, adapter]), len(self._adapters) - 1


def _same(left: Sequence[AdapterFactors], right: Sequence[AdapterFactors]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class ModelRunner:
    def __init__(self, decoder: Decoder, slab: Slab, adapters: AdapterTiers) -> None:
        self._decoder = decoder
        self._slab = slab
        self._adapters = adapters
        self._kv = KVCacheViews(*slab.kv_views(decoder.config.shape))
        self._tables = _StepTables(decoder.device)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> list[Sampled]:
        """One result per item of `batch.sampled`, in that order."""
        logits = self._decoder.forward(self._forward_batch(batch), self._kv)
        return sample(logits, [item.sequence for item in batch.sampled])

    @torch.inference_mode()
    def probe(self, adapter: AdapterFactors, token_ids: Sequence[int]) -> tuple[RecordedDelta, ...]:
        """Every delta of an adapter for one prompt. Takes no page, and touches none but to read."""
        tables, slot = self._tables.beside(adapter)
        recorder = DeltaRecorder(self._slab.data, tables, slot, len(token_ids))
        batch = probe_batch(token_ids, recorder, self._decoder.device)
        self._decoder.forward(batch, scratch_kv(self._decoder, len(token_ids)))
        return tuple(recorder.recorded)

    def _forward_batch(self, batch: ScheduledBatch) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        logits_rows: list[int] = []
        for item in batch.items:
            end = item.start + item.count
            token_ids += item.sequence.tokens[item.start : end]
            positions += range(item.start, end)
            if item.samples:
                logits_rows.append(len(token_ids) - 1)
        return ForwardBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            attention=self._attention(batch.items, positions),
            logits_rows=self._tensor(logits_rows),
            lora=self._lora(batch.items),
        )

    def _attention(
        self, items: tuple[ScheduledSequence, ...], positions: list[int]
    ) -> AttentionBatch:
        size = self._slab.block_size
        tables = [item.sequence.block_table for item in items]
        longest = max(map(len, tables))
        padded = [table + table[:1] * (longest - len(table)) for table in tables]
        starts = [0]
        pages: list[int] = []
        for item in items:
            starts.append(starts[-1] + item.count)
            table = item.sequence.block_table
            pages += [table[p // size] for p in range(item.start, item.start + item.count)]
        context_lens = tuple(item.start + item.count for item in items)
        return AttentionBatch(
            query_starts=tuple(starts),
            context_lens=context_lens,
            num_decodes=sum(item.count == 1 for item in items),
            block_tables=self._tensor(padded),
            context_lens_device=self._tensor(context_lens),
            kv_pages=self._tensor(pages),
            kv_offsets=self._tensor([p % size for p in positions]),
        )

    def _lora(self, items: tuple[ScheduledSequence, ...]) -> LoraBatch | None:
        digests = list(dict.fromkeys(i.sequence.digest for i in items if i.sequence.digest))
        if not digests:
            return None
        factors = [a.factors for digest in digests if (a := self._adapters.get(digest))]
        if len(factors) < len(digests):
            raise RuntimeError("a running adapter is not on the device")
        slots = {digest: slot for slot, digest in enumerate(digests)}
        segments = group_rows(
            [slots[i.sequence.digest] if i.sequence.digest else None for i in items],
            [i.count for i in items],
        )
        return LoraBatch(self._slab.data, self._tables.of(factors), segments)

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._decoder.device)
