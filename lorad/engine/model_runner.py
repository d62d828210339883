"""Turns a scheduled batch into tensors, runs the decoder, and samples. Holds no policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lorad_kernels import AdapterFactors, long_rows

from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.decode_graphs import DecodeGraphs
from lorad.engine.eager_steps import EagerSteps
from lorad.engine.probe import RecordedDelta
from lorad.engine.sampler import Sampled, sample
from lorad.engine.scheduler import ScheduledBatch
from lorad.engine.step_inputs import step_inputs
from lorad.engine.warm_up import warm_up_step
from lorad.memory.slab import Slab
from lorad.model.decoder import Decoder


class ModelRunner:
    """`graphs`, where there are any, run the steps that they serve; other steps are eager."""

    def __init__(
        self,
        decoder: Decoder,
        slab: Slab,
        adapters: AdapterTiers,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._block_size = slab.block_size
        self._adapters = adapters
        self._most_rows = long_rows(decoder.device, decoder.dtype)
        self._graphs = graphs
        self._eager = EagerSteps(decoder, slab)

    @torch.inference_mode()
    def warm_up(self, max_model_len: int) -> None:
        """Launch every kernel of eager steps once. Writes to pages: before anything lies there."""
        shape = self._decoder.config.shape
        self._eager.run(warm_up_step(shape, self._block_size, self._most_rows, max_model_len))

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> list[Sampled]:
        """One result per item of `batch.sampled`, in that order."""
        step = step_inputs(batch, self._adapters, self._block_size, self._most_rows)
        if self._graphs is not None and self._graphs.serves(step):
            logits, tokens = self._graphs.run(step)
        else:
            logits, tokens = self._eager.run(step)
        return sample(logits, [item.sequence for item in batch.sampled], tokens)

    @torch.inference_mode()
    def probe(self, adapter: AdapterFactors, token_ids: Sequence[int]) -> tuple[RecordedDelta, ...]:
        """Every delta of an adapter for one prompt. Takes no page, and touches none but to read."""
        return self._eager.probe(adapter, token_ids)
