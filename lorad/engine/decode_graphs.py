"""Decode steps captured once and replayed: one launch for a step instead of one for each kernel.

A CUDA graph repeats the launches it has recorded, with the same grids and addresses. So there is
one for every batch size of `graph_rows`, without LoRA and with it, over buffers that are filled
before each replay (with padding before the capture, which runs the step once); the kernels read
contexts, segments and ranks from those, and programs that have nothing to do leave at once. Steps
with prefill rows, or more rows than were captured, are not served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from lorad_kernels import captures, greedy_tokens, record
from torch import Tensor

from lorad.engine.decode_buffers import DecodeBuffers
from lorad.engine.step_inputs import StepInputs
from lorad.memory.slab import Slab
from lorad.model.decoder import Decoder, KVCacheViews
from lorad.sizing.graph_memory import graph_rows

# Logits `[rows, vocab]` and `greedy_tokens` `[rows]`.
Outputs = tuple[Tensor, Tensor]
Run = Callable[[], Outputs]
# Takes what a step does, and where its outputs are to be copied if they would not last; returns
# what does it again. None if the step cannot be captured. It may run the step, over padding.
Capture = Callable[[Run, Outputs], Run | None]

# Padding alone.
_NOTHING = StepInputs([], [], [], [], [0], [], [], [], None, [])

# On a CPU each captured step keeps its activations: some MiB at most.
KEPT_ON_CPU = 8


def as_it_is(run: Run, into: Outputs) -> Run:
    """A replay is a call."""

    def again() -> Outputs:
        return _copied(run(), into)

    return again


def recorded(run: Run, into: Outputs) -> Run | None:
    """On a CPU: the kernels' arguments, if the step is kernels of our own alone."""
    recording = record(run)
    if recording is None:
        return None
    run_again, outputs = recording

    def again() -> Outputs:
        run_again()
        return outputs

    return again


class CudaCapture:
    """Records CUDA graphs, which share one pool of memory: capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # cuBLAS takes a workspace for each stream it is used on (32 MiB on sm_90) and keeps it, so
        # all captures are on one. The graphs share that workspace, as they do the pool: no two
        # are ever replayed at once.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run, into: Outputs) -> Run:
        # Once outside: what Triton compiles, and cuBLAS allocates, at a first call is not for a
        # graph to record.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may allocate pinned memory in the meantime.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            _copied(run(), into)

        def again() -> Outputs:
            graph.replay()
            return into

        return again


def _copied(outputs: Outputs, into: Outputs) -> Outputs:
    """Graphs that share a pool would overwrite each other's outputs."""
    for source, target in zip(outputs, into, strict=True):
        target.copy_(source)
    return into


class DecodeGraphs:
    """A step that it `serves`, it can `run`: fill the buffers, and replay."""

    def __init__(
        self,
        decoder: Decoder,
        slab: Slab,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_lora_rank: int,
        capture: Capture,
    ) -> None:
        shape, device = decoder.config.shape, decoder.device
        if not captures(device, shape.head_dim):
            raise ValueError(f"heads of {shape.head_dim} are not computed by what can be captured")
        self._sizes = graph_rows(max_num_seqs)
        rows = self._sizes[-1]
        self._decoder = decoder
        self._slab = slab
        self._kv = KVCacheViews(*slab.kv_views(shape))
        self._buffers = DecodeBuffers(shape, slab, rows, max_model_len, max_lora_rank)
        self._logits = torch.zeros(rows, shape.vocab_size, dtype=decoder.dtype, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._capture = capture
        self._replays: OrderedDict[tuple[int, bool], Run | None] = OrderedDict()

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Now, rather than when a size is first needed."""
        for size in reversed(self._sizes):
            for lora in (True, False):
                self._captured(size, lora)

    @property
    def nbytes(self) -> int:
        """Device memory of what is filled and read; the graphs' own pool is not in it."""
        return self._buffers.nbytes + self._logits.nbytes + self._tokens.nbytes

    @property
    def count(self) -> int:
        return len(self._replays)

    def serves(self, step: StepInputs) -> bool:
        """Whether the step is one of decodes alone, few enough, with ranks that were captured."""
        small = step.only_decodes and len(step.token_ids) <= self._buffers.rows
        if not small or not self._buffers.fits(step.adapters):
            return False
        return self._captured(self._padded(step), step.segments is not None) is not None

    def run(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """As EagerSteps.run, of a step that is served; valid until the next one."""
        count, lora = len(step.token_ids), step.segments is not None
        size = self._padded(step)
        run = self._captured(size, lora)  # before the step is filled in, as it fills in padding
        if run is None:
            raise RuntimeError("a step that is not served")
        for upload in step.arriving:
            upload.order_after(-1)
        self._buffers.fill(step, size)
        logits, tokens = run()
        return logits[:count], tokens[:count]

    def _padded(self, step: StepInputs) -> int:
        return next(size for size in self._sizes if size >= len(step.token_ids))

    def _captured(self, size: int, lora: bool) -> Run | None:
        if (size, lora) not in self._replays:
            # A capture may run the step, and what was filled in last may name pages that are
            # an adapter's by now.
            self._buffers.fill(_NOTHING, size)
            into = (self._logits[:size], self._tokens[:size])
            self._replays[size, lora] = self._capture(self._step(size, lora), into)
            self._forget_oldest()
        self._replays.move_to_end((size, lora))
        return self._replays[size, lora]

    def _forget_oldest(self) -> None:
        kept = [key for key, run in self._replays.items() if run is not None]
        if self._decoder.device.type == "cpu" and len(kept) > KEPT_ON_CPU:
            del self._replays[kept[0]]

    def _step(self, size: int, lora: bool) -> Run:
        batch = self._buffers.batch(size, lora)

        def run() -> Outputs:
            logits = self._decoder.forward(batch, self._kv)
            return logits, greedy_tokens(logits)

        return run
