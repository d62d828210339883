"""A real engine over a real registry, stepped in this process: what the memory benchmarks measure.

No HTTP and no detokenizer: the scheduler, the kernels, the tiers and the loader's thread, as in
the daemon. Figures are compared within one run only: machines differ, and so does what else they
do.
"""

from __future__ import annotations

import gc
import queue
import random
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from adapter_fleet import write_adapter
from bench_report import progress

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import read_adapter
from lorad.adapters.weights import AdapterWeights
from lorad.daemon import leave_out_of_collections, store_reader
from lorad.engine.build import EngineOptions, build_engine
from lorad.engine.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    GenerationRequest,
    LoadAdapter,
    SamplingParams,
    TokenOutput,
    UnloadAdapter,
)
from lorad.paths import cache_dir
from lorad.registry.records import Who
from lorad.registry.registry import Registry
from lorad.sizing.model_shape import ModelShape, read_config


class SteppedEngine:
    """`refs` are adapters with the ranks in turn, on q and v; they are written and pushed once."""

    def __init__(self, model: Path, count: int, ranks: Sequence[int], **options: object) -> None:
        self.shape = ModelShape.from_config(read_config(model))
        root = cache_dir() / "bench-fleet" / _fleet_name(model, ranks)
        self.registry = Registry.open(
            root / "registry", model.name, lambda d: read_adapter(d, self.shape)
        )
        self.refs = self._push(count, ranks)
        self.delay = 0.0  # seconds that each read of the store takes longer
        settings = {"threads": 1, "max_model_len": 1024, **options}
        self.built = build_engine(EngineOptions(model, **settings), self._read, frozenset())
        self.engine = self.built.engine
        self.times: dict[str, list[float]] = {}  # of each request: when it came, and its tokens
        self.ended: set[str] = set()
        self._sent = 0
        leave_out_of_collections()  # as the daemon does

    def _push(self, count: int, ranks: Sequence[int]) -> list[AdapterRef]:
        known = {adapter.name for adapter in self.registry.adapters()}
        names = [AdapterName.parse(f"adapter-{i:05d}") for i in range(count)]
        with tempfile.TemporaryDirectory(dir=self.registry.state) as folder:
            for i, name in enumerate(names):
                if name not in known:
                    rank = ranks[i % len(ranks)]
                    written = write_adapter(Path(folder) / "one", self.shape, rank, i)
                    pushed = self.registry.push(written, name, who=Who.daemon())
                    self.registry.promote(name, pushed.version.label, who=Who.daemon())
                    progress(f"adapter {i + 1} of {count} written and pushed")
        return [self.registry.resolve(str(name)) for name in names]

    def _read(self, ref: AdapterRef, shape: ModelShape, dtype: torch.dtype) -> AdapterWeights:
        time.sleep(self.delay)
        return store_reader(self.registry, self.shape)(ref, shape, dtype)

    def close(self) -> None:
        self.built.loader.stop()
        self.registry.close()

    def store_bytes(self, count: int) -> int:
        """Of the files of the first `count` adapters."""
        versions = (self.registry.version(ref.name, ref.version) for ref in self.refs[:count])
        return sum(version.weights_bytes + version.config_bytes for version in versions)

    # --- requests -------------------------------------------------------------------------

    def send(
        self, prompt: list[int], ref: AdapterRef | None, tokens: int, name: str | None = None
    ) -> str:
        self._sent += 1
        name = name or f"r{self._sent}"
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        self.times[name] = [time.perf_counter()]
        self.engine.handle(GenerationRequest(name, tuple(prompt), params, ref))
        return name

    def step(self) -> list[str]:
        """One step of the engine; the requests that ended in it."""
        inbox = self.built.inbox
        worked = self.engine.step()
        while True:
            try:
                message = inbox.get(timeout=0.0 if worked else 0.005)
            except queue.Empty:
                break
            if message is not None:
                self.engine.handle(message)
            worked = True
        ended = [o.request_id for o in self._outputs() if o.finish_reason is not None]
        self.ended.update(ended)
        return ended

    def _outputs(self) -> Iterator[TokenOutput]:
        now = time.perf_counter()
        for output in self.engine.take_outputs():
            if isinstance(output, TokenOutput):
                if output.error is not None:
                    raise output.error
                self.times[output.request_id].append(now)
                yield output
            else:
                self.answer = output

    def settle(self) -> None:
        """Until nothing runs; then what was measured of single requests is forgotten."""
        while (stats := self.engine.stats()).running or stats.waiting:
            self.step()
        self.times.clear()
        self.ended.clear()

    def serve(
        self,
        refs: Iterable[AdapterRef | None],
        *,
        at_once: int,
        tokens: int,
        prompt: int = 12,
    ) -> Rate:
        """One request per reference, `at_once` under way at all times, loads included."""
        left, running, count = iter(refs), set[str](), 0
        start, cpu = time.perf_counter(), time.process_time()
        vocabulary = self.shape.vocab_size
        while True:
            while len(running) < at_once and (ref := next(left, ...)) is not ...:
                text = [random.randrange(vocabulary // 2) for _ in range(prompt)]
                running.add(self.send(text, ref, tokens))
                count += 1
            if not running:
                break
            for name in running.intersection(self.step()):
                running.remove(name)
                self.ended.remove(name)
                del self.times[name]
        made = count * tokens
        return Rate(made / (time.perf_counter() - start), made / (time.process_time() - cpu))

    # --- commands -------------------------------------------------------------------------

    def command(self, command: LoadAdapter | UnloadAdapter) -> AdapterLoaded | AdapterUnloaded:
        self.answer = None
        self.engine.handle(command)
        while self.answer is None:
            self.step()
        if not isinstance(self.answer, AdapterLoaded | AdapterUnloaded):
            raise self.answer.error
        return self.answer

    def forget_adapters(self) -> None:
        """All of them leave the device and host memory."""
        known = {state.digest for state in self.engine.stats().adapters}
        for ref in self.refs:
            if ref.digest in known:
                self.command(UnloadAdapter(f"forget {ref}", ref, 30.0))


@dataclass(frozen=True)
class Rate:
    """Generated tokens per second of the clock, and per second of this process's CPU time."""

    wall: float
    cpu: float


@contextmanager
def stepped(
    model: Path, count: int, ranks: Sequence[int] = (8,), **options: object
) -> Iterator[SteppedEngine]:
    made = SteppedEngine(model, count, ranks, **options)
    try:
        yield made
    finally:
        made.close()


def _fleet_name(model: Path, ranks: Sequence[int]) -> str:
    name = "-".join(map(str, ranks))
    return name if model.name.startswith("SmolLM2-135M") else f"{model.name}-{name}"


class LongestPause:
    """Of the garbage collector, which holds every thread up."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._look)

    def _look(self, phase: str, info: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds = max(self.seconds, now - self._began)


def zipf(refs: Sequence[AdapterRef], count: int, seed: int) -> list[AdapterRef]:
    """Requests of which the adapter of rank i has a share of 1/i."""
    weights = [1 / (i + 1) for i in range(len(refs))]
    return random.Random(seed).choices(refs, weights, k=count)


def uniform(refs: Sequence[AdapterRef], count: int, seed: int) -> list[AdapterRef]:
    return random.Random(seed).choices(refs, k=count)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
