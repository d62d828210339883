"""Steps of any kind, launched kernel by kernel: prefills, and decodes that are not captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lorad_kernels import (
    AdapterFactors,
    AttentionBatch,
    FactorTable,
    greedy_tokens,
    step_tables,
)
from torch import Tensor

from lorad.engine.probe import DeltaRecorder, RecordedDelta, probe_batch, scratch_kv
from lorad.engine.step_inputs import PackedAdapters, StepInputs, same_adapters
from lorad.memory.slab import Slab
from lorad.model.decoder import Decoder, KVCacheViews
from lorad.model.forward_batch import ForwardBatch, LoraBatch


class _StepTables:
    """The packed factor tables of the steps' adapters, made again only when those change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._packed = PackedAdapters()
        self._adapters: list[AdapterFactors] = []
        self._tables: tuple[tuple[FactorTable, ...], ...] = ()

    def of(self, adapters: list[AdapterFactors]) -> tuple[tuple[FactorTable, ...], ...]:
        """`[layer][projection]`, by slot."""
        if not same_adapters(adapters, self._adapters):
            self._adapters = adapters
            self._tables = step_tables(adapters, self._packed.of(adapters), self._device)
        return self._tables

    def beside(self, adapter: AdapterFactors) -> tuple[tuple[tuple[FactorTable, ...], ...], int]:
        """The last step's tables with one more adapter, if it is not in them, and its slot.

        So the next step needs no new packing.
        """
        slots = [slot for slot, known in enumerate(self._adapters) if known is adapter]
        if slots:
            return self._tables, slots[0]
        return self.of([*self._adapters, adapter]), len(self._adapters) - 1


class EagerSteps:
    def __init__(self, decoder: Decoder, slab: Slab) -> None:
        self._decoder = decoder
        self._slab = slab
        self._kv = KVCacheViews(*slab.kv_views(decoder.config.shape))
        self._tables = _StepTables(decoder.device)

    def run(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Logits `[S, vocab]` of the rows that want them, and their `greedy_tokens`."""
        logits = self._decoder.forward(self._forward_batch(step), self._kv)
        return logits, greedy_tokens(logits)

    def probe(self, adapter: AdapterFactors, token_ids: Sequence[int]) -> tuple[RecordedDelta, ...]:
        """Every delta of an adapter for one prompt."""
        tables, slot = self._tables.beside(adapter)
        recorder = DeltaRecorder(self._slab.data, tables, slot, len(token_ids))
        batch = probe_batch(token_ids, recorder, self._decoder.device)
        self._decoder.forward(batch, scratch_kv(self._decoder, len(token_ids)))
        return tuple(recorder.recorded)

    def _forward_batch(self, step: StepInputs) -> ForwardBatch:
        lora = None
        if step.segments is not None:
            tables = self._tables.of(step.adapters)
            lora = LoraBatch(self._slab.data, tables, step.segments, step.arriving)
        return ForwardBatch(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(step.positions),
            attention=self._attention(step),
            logits_rows=self._tensor(step.logits_rows),
            lora=lora,
        )

    def _attention(self, step: StepInputs) -> AttentionBatch:
        longest = max(map(len, step.block_tables))
        padded = [table + table[:1] * (longest - len(table)) for table in step.block_tables]
        return AttentionBatch(
            query_starts=tuple(step.query_starts),
            context_lens=tuple(step.context_lens),
            num_decodes=step.num_decodes,
            block_tables=self._tensor(padded),
            context_lens_device=self._tensor(step.context_lens),
            kv_pages=self._tensor(step.kv_pages),
            kv_offsets=self._tensor(step.kv_offsets),
        )

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._decoder.device)
