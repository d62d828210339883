"""Decode steps captured once and replayed: one launch for a step instead of one for each kernel.

A CUDA graph repeats the launches it has recorded, with the same grids and addresses. So there is
one for every batch size of `graph_rows`, without LoRA and with it, over buffers that are filled
before each replay; the kernels read contexts, segments and ranks from those, and programs that
have nothing to do leave at once. Steps with prefill rows, or more rows than were captured, are
not served.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from lorad_kernels import captures
from torch import Tensor

from lorad.engine.decode_buffers import DecodeBuffers
from lorad.engine.sampler import greedy_tokens
from lorad.engine.step_inputs import StepInputs
from lorad.memory.slab import Slab
from lorad.model.decoder import Decoder, KVCacheViews
from lorad.sizing.graph_memory import graph_rows

Run = Callable[[], None]
# Takes what a step does, returns what does it again.
Capture = Callable[[Run], Run]


def as_it_is(run: Run) -> Run:
    """Capture without a GPU: a replay is a call."""
    return run


class CudaCapture:
    """Records CUDA graphs, which share one pool of memory: capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        # Once outside: Triton compiles, and cuBLAS takes its workspace, at the first call.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may allocate pinned memory in the meantime.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


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
        self._filled = (0, 0, False)  # rows that are real, rows with padding, any adapter
        self._replays: dict[tuple[int, bool], Run] = {}
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._fill_nothing(size)
                for lora in (True, False):
                    self._replays[size, lora] = capture(self._step(size, lora))

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
        return small and self._buffers.fits(step.adapters)

    def run(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """As EagerSteps.run, of a step that is served; valid until the next one."""
        self.fill(step)
        return self.replay()

    def fill(self, step: StepInputs) -> None:
        """Write a step that is served into the buffers."""
        count = len(step.token_ids)
        size = next(size for size in self._sizes if size >= count)
        self._buffers.fill(step, size)
        self._filled = (count, size, step.segments is not None)

    def replay(self) -> tuple[Tensor, Tensor]:
        """Logits `[n, vocab]` and `greedy_tokens` `[n]` of what was filled in."""
        count, size, lora = self._filled
        self._replays[size, lora]()
        return self._logits[:count], self._tokens[:count]

    def _step(self, size: int, lora: bool) -> Run:
        batch = self._buffers.batch(size, lora)

        def run() -> None:
            logits = self._decoder.forward(batch, self._kv)
            self._logits[:size].copy_(logits)
            self._tokens[:size].copy_(greedy_tokens(logits))

        return run

    def _fill_nothing(self, size: int) -> None:
        """Padding alone, for the runs that capture."""
        nothing = StepInputs([], [], [], [], [0], [], [], [], None, [])
        self._buffers.fill(nothing, size)
