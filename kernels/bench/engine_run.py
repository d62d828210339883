"""The whole engine on random weights: captured decode steps against eager ones, and their time."""

from __future__ import annotations

import queue
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch
from decode_step import BLOCK, DecodeStep
from lorad_kernels import AdapterFactors, group_rows
from report import Report
from torch import Tensor

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.weights import AdapterWeights
from lorad.engine.build import BuiltEngine, EngineOptions, assemble
from lorad.engine.decode_graphs import Capture, CudaCapture, DecodeGraphs, as_it_is
from lorad.engine.eager_steps import EagerSteps
from lorad.engine.messages import GenerationRequest, SamplingParams, TokenOutput
from lorad.engine.step_inputs import StepInputs
from lorad.memory.slab import Slab
from lorad.model.decoder import Decoder
from lorad.sizing.adapter_size import AdapterLayout, pack_adapter, uniform_modules
from lorad.sizing.memory_plan import page_bytes
from lorad.sizing.model_shape import ModelShape

RANKS = (8, 16, 32, 64)
COUNTS = (0, 1, 8, 64)
IDLE_POLL = 0.02  # seconds, as the daemon's engine thread waits while a copy runs


def capture_on(device: torch.device) -> Capture:
    return CudaCapture(device) if device.type == "cuda" else as_it_is


# --- captured against eager, step by step -----------------------------------------------------


def check_graphs(report: Report, decoder: Decoder) -> None:
    """Steps of 1 to 8 rows, of any length and mix of adapters, through the same graphs."""
    random, longest = Random(5), 300 if decoder.device.type == "cuda" else 40
    step = DecodeStep.prepare(decoder, longest, 9, [1, 3, 16, 64])
    pages = step.slab.num_pages - 1  # the last one is for the rows of padding
    slab = Slab(step.slab.data, pages, step.slab.page_elements, BLOCK, scratch_page=pages)
    graphs = DecodeGraphs(
        decoder,
        slab,
        max_num_seqs=8,
        max_model_len=512,
        max_lora_rank=64,
        capture=capture_on(decoder.device),
    )
    eager = EagerSteps(decoder, slab)
    for rows in (1, 3, 8, 5, 2, 8):
        contexts = [random.randint(1, longest) for _ in range(rows)]
        adapters = random.sample(step.adapters, min(rows - 1, 3))
        inputs = _decodes(contexts, adapters, pages)
        what = f"captured step of {rows} rows, {len(adapters)} adapters"
        report.check(graphs.serves(inputs), f"{what}: not served")
        logits, tokens = (tensor.clone() for tensor in graphs.run(inputs))
        want, want_tokens = eager.run(inputs)
        error = float((logits - want).abs().max() / want.abs().max())
        report.check(error < 1e-5, f"{what}: logits differ by {error:.2g}")
        report.check(torch.equal(tokens, want_tokens), f"{what}: other tokens")


def _decodes(contexts: list[int], adapters: list[AdapterFactors], pages: int) -> StepInputs:
    """One new token for each sequence; their pages are the slab's last ones. Base rows first."""
    rows, free = len(contexts), iter(reversed(range(pages)))
    tables = [[next(free) for _ in range(-(-context // BLOCK))] for context in contexts]
    slots = [None, *sorted(row % max(1, len(adapters)) for row in range(rows - 1))]
    return StepInputs(
        token_ids=[7 * row + 3 for row in range(rows)],
        positions=[context - 1 for context in contexts],
        kv_pages=[table[-1] for table in tables],
        kv_offsets=[(context - 1) % BLOCK for context in contexts],
        query_starts=list(range(rows + 1)),
        context_lens=contexts,
        block_tables=tables,
        logits_rows=list(range(rows)),
        segments=group_rows(slots, [1] * rows) if adapters else None,
        adapters=adapters,
    )


# --- the engine -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fleet:
    """Adapters of random numbers, made where the loader asks for them."""

    noise: Tensor  # on the host, serving dtype; adapter i begins at element 64 * i

    @classmethod
    def of(cls, decoder: Decoder) -> _Fleet:
        shape, dtype = decoder.config.shape, decoder.dtype
        elements = _layout(shape, max(RANKS), dtype).nbytes // dtype.itemsize
        noise = torch.randn(elements + 64 * max(COUNTS)).mul_(0.02).to(dtype)
        return cls(noise)

    def ref(self, index: int) -> AdapterRef:
        return AdapterRef(AdapterName("default", f"a{index}"), "v1", f"sha256:{index:064x}")

    def read(self, ref: AdapterRef, shape: ModelShape, dtype: torch.dtype) -> AdapterWeights:
        index = int(ref.digest.removeprefix("sha256:"), 16)
        layout = _layout(shape, RANKS[index % len(RANKS)], dtype)
        start = 64 * index
        data = self.noise[start : start + layout.nbytes // dtype.itemsize]
        return AdapterWeights(ref.digest, layout, data)


def _layout(shape: ModelShape, rank: int, dtype: torch.dtype) -> AdapterLayout:
    return pack_adapter(shape, uniform_modules(shape, tuple(shape.linears), rank), dtype.itemsize)


@dataclass(frozen=True)
class _Work:
    """`batch` prompts of `prompt` tokens, each answered with `steps` tokens."""

    name: str
    decoder: Decoder
    fleet: _Fleet
    batch: int
    prompt: int
    steps: int

    @property
    def counts(self) -> list[int]:
        """Numbers of adapters that are measured."""
        return [count for count in COUNTS if count <= self.batch]

    def adapter_bytes(self, count: int) -> list[int]:
        shape, dtype = self.decoder.config.shape, self.decoder.dtype
        return [_layout(shape, RANKS[i % len(RANKS)], dtype).nbytes for i in range(count)]

    def bytes_read(self, count: int) -> int:
        """By a step: weights, K and V at half the answer, the used adapters, each once."""
        shape = self.decoder.config.shape
        weights = sum(p.in_features * p.out_features for p in shape.projections)
        elements = weights * shape.num_layers + shape.vocab_size * shape.hidden_size
        elements += self.batch * (self.prompt + self.steps // 2) * shape.kv_elements_per_token
        return elements * self.decoder.dtype.itemsize + sum(self.adapter_bytes(count))


def time_engine(report: Report, name: str, decoder: Decoder, batch: int, steps: int) -> None:
    """Decode steps with 0, 1, 8 and 64 adapters, with graphs and without; answers must agree."""
    fleet = _Fleet.of(decoder)
    work = _Work(name, decoder, fleet, batch, 4 if name == "tiny" else 128, steps)
    answers: dict[str, list[list[int]]] = {}
    for mode, capture in (("eager", None), ("graph", capture_on(decoder.device))):
        started = time.perf_counter()
        built = _engine(work, capture)
        report.note(f"{name}, {mode}: engine made in {time.perf_counter() - started:.1f} s")
        try:
            answers[mode] = _time_mode(report, work, mode, built)
        finally:
            built.loader.stop()
            del built  # its slab, before the next one is made
    pairs = list(zip(answers["eager"], answers["graph"], strict=True))
    same = sum(left == right for left, right in pairs)
    report.note(f"{name}: {same} of {len(pairs)} answers are the same with graphs")
    # In 16 bits another matmul kernel may turn a near tie.
    exact = decoder.dtype is torch.float32
    report.check(same == len(pairs) or not exact, f"{name}: other answers with graphs")


def _engine(work: _Work, capture: Capture | None) -> BuiltEngine:
    decoder, length = work.decoder, work.prompt + work.steps + 2
    page = page_bytes(decoder.config.shape, BLOCK, decoder.dtype.itemsize)
    adapters = sum(-(-size // page) for size in work.adapter_bytes(max(work.counts)))
    options = EngineOptions(
        Path(),
        max_num_seqs=work.batch,
        max_loras=work.batch,
        max_lora_rank=max(RANKS),
        # Room for twice the K and V: what has been answered stays cached.
        slab_bytes=page * (adapters + 2 * work.batch * -(-length // BLOCK) + 1),
        host_cache_bytes=2**34,
    )
    read, config = work.fleet.read, decoder.config
    return assemble(options, config, decoder, read, frozenset(), length, capture)


def _time_mode(report: Report, work: _Work, mode: str, built: BuiltEngine) -> list[list[int]]:
    answers: list[list[int]] = []
    base, compiled = 0.0, compiled_kernels()
    for count in work.counts:
        refs: list[AdapterRef | None] = [work.fleet.ref(i) for i in range(count)] or [None]
        _ask(built, refs, work.prompt, 1, f"load {count}")
        built.engine.records.clear()
        rows = [refs[i % len(refs)] for i in range(work.batch)]
        answers += _ask(built, rows, work.prompt, work.steps, f"time {count}")
        seconds = median(
            record.seconds
            for record in built.engine.records
            if record.decode_tokens == work.batch and not record.prefill_tokens
        )
        base = base or seconds
        row: dict[str, object] = {
            "model": work.name,
            "batch": work.batch,
            "adapters": count,
            "mode": mode,
            "milliseconds": round(seconds * 1e3, 3),
            "of_base": round(base / seconds, 3),
            "gigabytes_a_second": round(work.bytes_read(count) / seconds / 1e9, 1),
        }
        report.step(row)
    late = compiled_kernels() - compiled
    report.check(late == 0, f"{work.name}, {mode}: {late} kernels were compiled while serving")
    return answers


def compiled_kernels() -> int:
    """Variants of Triton's kernels that this process has compiled; none under the interpreter."""
    modules = [m for name, m in sys.modules.items() if name.startswith("lorad_kernels.triton_")]
    kernels = {k for m in modules for k in vars(m).values() if hasattr(k, "device_caches")}
    return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())


def _ask(
    built: BuiltEngine, rows: list[AdapterRef | None], prompt: int, tokens: int, salt: str
) -> list[list[int]]:
    """Greedy answers to a prompt for each row, all asked at once. The salt keeps them apart."""
    vocab, answers = built.config.shape.vocab_size, {}
    for i, ref in enumerate(rows):
        ids = tuple((31 * i + 7 * k + 5) % vocab for k in range(prompt))
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        name = f"{salt}-{i}"
        built.engine.handle(GenerationRequest(name, ids, params, ref, cache_salt=salt))
        answers[name] = list[int]()
    more = True
    while more:
        more = _progress(built)
        for output in built.engine.take_outputs():
            if isinstance(output, TokenOutput):
                if output.error is not None:
                    raise output.error
                if output.token_id is not None:
                    answers[output.request_id].append(output.token_id)
    return list(answers.values())


def _progress(built: BuiltEngine) -> bool:
    """One step, and a message if there is one; False when nothing is left to do."""
    engine = built.engine
    worked = engine.step()
    try:
        message = built.inbox.get(timeout=IDLE_POLL if engine.waits and not worked else 0)
    except queue.Empty:
        return worked or engine.waits
    if message is not None:
        engine.handle(message)
    return True
