"""What thousands of adapters cost one engine: throughput, tiers, stalls, leaks, prefix cache.

    python examples/bench_adapters.py many     # 1 to 2,000 adapters, Zipf and uniform
    python examples/bench_adapters.py stall    # a store that takes 2 s for each read
    python examples/bench_adapters.py soak     # load, serve, unload, over and over
    python examples/bench_adapters.py prefix   # a long system prompt that all requests share

Figures are compared within one run only: machines differ, and so does what else they do.
"""

from __future__ import annotations

import json
import queue
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from adapter_fleet import write_fleet
from demo_model import ensure_demo_model

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import read_adapter
from lorad.adapters.weights import AdapterWeights, read_weights
from lorad.engine.build import BuiltEngine, EngineOptions, build_engine
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

app = typer.Typer(add_completion=False, no_args_is_help=True)
Read = Callable[[AdapterRef, ModelShape, torch.dtype], AdapterWeights]


# --- one engine and its clients -------------------------------------------------------------


class Bench:
    """A real engine stepped here, over adapters that a real registry holds."""

    def __init__(self, count: int, ranks: tuple[int, ...], **options: object) -> None:
        self.model = ensure_demo_model()
        self.shape = ModelShape.from_config(read_config(self.model))
        root = cache_dir() / "bench-fleet" / "-".join(map(str, ranks))
        self.registry = Registry.open(
            root / "registry", self.model.name, lambda d: read_adapter(d, self.shape)
        )
        self.refs = list(self._push(root, count, ranks))
        self.delay = 0.0
        settings = {"threads": 1, "max_model_len": 1024, **options}
        self.built = self._build(EngineOptions(self.model, **settings))
        self.times: dict[str, list[float]] = {}
        self.ended: set[str] = set()
        self._sent = 0

    def _push(self, root: Path, count: int, ranks: tuple[int, ...]) -> Iterator[AdapterRef]:
        known = {adapter.name for adapter in self.registry.adapters()}
        names = [AdapterName.parse(f"adapter-{i:05d}") for i in range(count)]
        if not known.issuperset(names):
            for directory in write_fleet(root / "files", self.model, count, ranks):
                name = AdapterName.parse(directory.name)
                if name not in known:
                    pushed = self.registry.push(directory, name, who=Who.daemon())
                    self.registry.promote(name, pushed.version.label, who=Who.daemon())
        return (self.registry.resolve(str(name)) for name in names)

    def _build(self, options: EngineOptions) -> BuiltEngine:
        def read(ref: AdapterRef, shape: ModelShape, dtype: torch.dtype) -> AdapterWeights:
            time.sleep(self.delay)
            return read_weights(self.registry.verify(ref), ref.digest, shape, dtype)

        return build_engine(options, read, frozenset())

    def close(self) -> None:
        self.built.loader.stop()
        self.registry.close()

    def send(
        self, prompt: list[int], ref: AdapterRef | None, tokens: int, name: str | None = None
    ) -> str:
        self._sent += 1
        name = name or f"r{self._sent}"
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        self.times[name] = [time.perf_counter()]
        self.built.engine.handle(GenerationRequest(name, tuple(prompt), params, ref))
        return name

    def step(self) -> list[str]:
        """One step of the engine; the requests that ended in it."""
        engine, inbox = self.built.engine, self.built.inbox
        worked = engine.step()
        while True:
            try:
                message = inbox.get(timeout=0.0 if worked else 0.005)
            except queue.Empty:
                break
            if message is not None:
                engine.handle(message)
            worked = True
        ended = [o.request_id for o in self._outputs() if o.finish_reason is not None]
        self.ended.update(ended)
        return ended

    def settle(self) -> None:
        """Until nothing runs; then what was measured of single requests is forgotten."""
        while self.built.engine.stats().running:
            self.step()
        self.times.clear()
        self.ended.clear()

    def _outputs(self) -> Iterator[TokenOutput]:
        now = time.perf_counter()
        for output in self.built.engine.take_outputs():
            if isinstance(output, TokenOutput):
                if output.error is not None:
                    raise output.error
                self.times[output.request_id].append(now)
                yield output
            else:
                self.answer = output

    def serve(
        self, refs: Iterable[AdapterRef | None], *, at_once: int, tokens: int
    ) -> tuple[float, float]:
        """One request per reference, `at_once` under way at all times.

        Tokens per second, and per second of this process's CPU time, loads included: on a
        machine that others use too only the second can be compared.
        """
        left, running, count = iter(refs), set[str](), 0
        start, cpu = time.perf_counter(), time.process_time()
        while True:
            while len(running) < at_once and (ref := next(left, ...)) is not ...:
                prompt = [random.randrange(1000, 40000) for _ in range(12)]
                running.add(self.send(prompt, ref, tokens))
                count += 1
            if not running:
                break
            running.difference_update(self.step())
        made = count * tokens
        return made / (time.perf_counter() - start), made / (time.process_time() - cpu)

    def command(self, command: LoadAdapter | UnloadAdapter) -> AdapterLoaded | AdapterUnloaded:
        self.answer = None
        self.built.engine.handle(command)
        while self.answer is None:
            self.step()
        if not isinstance(self.answer, AdapterLoaded | AdapterUnloaded):
            raise self.answer.error
        return self.answer


@contextmanager
def bench(count: int, ranks: tuple[int, ...], **options: object) -> Iterator[Bench]:
    made = Bench(count, ranks, **options)
    try:
        yield made
    finally:
        made.close()


def zipf(refs: list[AdapterRef], count: int, seed: int) -> list[AdapterRef]:
    weights = [1 / (i + 1) for i in range(len(refs))]
    return random.Random(seed).choices(refs, weights, k=count)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def tell(row: dict[str, object]) -> None:
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(rounded), flush=True)


# --- the questions ----------------------------------------------------------------------------


@app.command()
def many(
    adapters: int = 2000,
    requests: int = 32,
    tokens: int = 8,
    max_cpu_loras: int = 2000,
    slab_mib: int = 512,
    ranks: Annotated[str, typer.Option(help="In turn over the fleet.")] = "8",
    rounds: int = 1,
    everyone: Annotated[
        bool, typer.Option(help="First serve each adapter once: all are in memory then.")
    ] = True,
) -> None:
    """Throughput with the same requests over more and more adapters, 32 at once."""
    mix = tuple(map(int, ranks.split(",")))
    with bench(adapters, mix, max_cpu_loras=max_cpu_loras, slab_bytes=slab_mib * 2**20) as b:
        b.serve([None] * 32, at_once=32, tokens=4)
        if everyone:
            wall, cpu = b.serve(b.refs, at_once=32, tokens=2)
            tell(
                {
                    "mix": "each once",
                    "requests": len(b.refs),
                    "tokens_per_s": wall,
                    "tokens_per_cpu_s": cpu,
                }
            )
        rates: dict[str, list[float]] = {}
        for turn in range(rounds):
            for name, plan in _plans(b.refs, requests, turn):
                wall, cpu = b.serve(plan, at_once=32, tokens=tokens)
                rates.setdefault(name, []).append(cpu)
                tell({"mix": name, "tokens_per_s": wall, "tokens_per_cpu_s": cpu})
        for name, values in rates.items():
            ratio = statistics.median(values) / statistics.median(rates["uniform 32"])
            tell({"mix": name, "of_uniform_32": ratio})
        _tell_memory(b)


def _plans(
    refs: list[AdapterRef], requests: int, turn: int
) -> Iterator[tuple[str, list[AdapterRef | None]]]:
    """The same number of requests over no, one, 32 and all adapters."""
    yield "base", [None] * requests
    yield "one", [refs[0]] * requests
    for count in (32, len(refs)):
        yield f"uniform {count}", random.Random(turn).choices(refs[:count], k=requests)
        yield f"zipf {count}", zipf(refs[:count], requests, turn)


def _tell_memory(b: Bench) -> None:
    stats = b.built.engine.stats()
    device = [a for a in stats.adapters if a.residency == "device"]
    memory = stats.memory
    tell(
        {
            "device_adapters": len(device),
            "device_bytes": sum(a.device_bytes for a in device),
            "host_adapters": sum(a.host_bytes > 0 for a in stats.adapters),
            "host_bytes": stats.host_cache_bytes,
            "pages": {
                "kv": stats.kv_pages,
                "cached": stats.cached_pages,
                "adapter": stats.adapter_pages,
                "free": stats.free_pages,
            },
            "lookups": dict(memory.lookups),
            "loads": dict(memory.loads),
            "mean_load_ms": 1000
            * memory.load_seconds.sum
            / max(1, sum(memory.load_seconds.counts)),
            "evictions": {f"{k} for {r}": n for (k, r), n in memory.evictions.items()},
            "moved_pages": memory.moved_pages,
            "moved_adapters": memory.moved_adapters,
            "move_ms": 1000 * memory.move_seconds,
            "rss_mib": rss_mib(),
        }
    )


@app.command()
def stall(loads: int = 10, streams: int = 4, delay: float = 2.0, limit: float = 100.0) -> None:
    """Inter-token times of running streams, with and without a slow read beside them.

    Each load is followed by as many quiet steps as it lasted, so both see the same machine.
    """
    with bench(loads + streams, (8,), max_cpu_loras=64, slab_bytes=2**28) as b:
        cold, hot = b.refs[:loads], b.refs[loads:]
        b.serve(hot, at_once=streams, tokens=4)
        for i, ref in enumerate(hot):
            b.send([1, 2, 3 + i], ref, 900)
        gaps: dict[bool, list[float]] = {False: [], True: []}
        b.delay, deadline, done = delay, time.monotonic() + limit, 0
        for i, ref in enumerate(cold):
            if time.monotonic() > deadline:
                break
            b.answer = None
            b.built.engine.handle(LoadAdapter(f"l{i}", ref))
            steps = 0
            while b.answer is None:
                gaps[True].append(_timed(b.step))
                steps += 1
            done += 1
            gaps[False] += [_timed(b.step) for _ in range(steps)]
        b.delay = 0.0
        quiet, busy = (sorted(gaps[slow]) for slow in (False, True))
        p99 = [values[int(len(values) * 0.99)] for values in (quiet, busy)]
        stats = b.built.engine.stats().memory
        tell(
            {
                "loads": done,
                "steps_each": len(busy),
                "mean_read_s": stats.load_seconds.sum / sum(stats.load_seconds.counts),
                "p50_ms": [1000 * statistics.median(values) for values in (quiet, busy)],
                "p50_ratio": statistics.median(busy) / statistics.median(quiet),
                "p99_ms": [1000 * x for x in p99],
                "p99_ratio": p99[1] / p99[0],
                "max_ms": [1000 * values[-1] for values in (quiet, busy)],
            }
        )


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@app.command()
def soak(rounds: int = 1000, adapters: int = 64) -> None:
    """Load, serve and unload in turn while another adapter answers; memory must stay flat."""
    with bench(adapters + 1, (8,), max_cpu_loras=16, slab_bytes=2**27) as b:
        steady, names = b.refs[0], b.refs[1:]
        expected = None
        marks: list[float] = []
        stream = ""
        for i in range(rounds):
            if not stream or stream in b.ended:
                stream = b.send([5, 6, 7], steady, 200)
            ref = names[i % adapters]
            b.command(LoadAdapter(f"l{i}", ref))
            b.serve([ref], at_once=1, tokens=2)
            b.command(UnloadAdapter(f"u{i}", ref, 30.0))
            if i == rounds // 10:
                b.settle()
                expected = _resident(b)
            if i % max(1, rounds // 20) == 0:
                marks.append(rss_mib())
                print(f"round {i}: {marks[-1]:.1f} MiB", flush=True)
        b.settle()
        tell(
            {
                "rounds": rounds,
                "rss_mib_first_tenth": marks[2] if len(marks) > 2 else marks[0],
                "rss_mib_last": rss_mib(),
                "resident_at_a_tenth": expected,
                "resident_at_the_end": _resident(b),
            }
        )


def _resident(b: Bench) -> dict[str, int]:
    stats = b.built.engine.stats()
    return {
        "adapter_pages": stats.adapter_pages,
        "host_bytes": stats.host_cache_bytes,
        "kv_pages": stats.kv_pages,
    }


@app.command()
def prefix(requests: int = 24, system: int = 512, question: int = 32) -> None:
    """Time to first token with one long system prompt, shared or different each time."""
    with bench(1, (8,), slab_bytes=2**29) as b:
        choose = random.Random(0)

        def tokens(count: int) -> list[int]:
            return [choose.randrange(1000, 40000) for _ in range(count)]

        shared = tokens(system)
        found: dict[str, list[float]] = {"different": [], "shared": []}
        b.serve([None, *b.refs], at_once=2, tokens=2)
        for i in range(requests):
            for kind in ("different", "shared"):
                start = shared if kind == "shared" else tokens(system)
                name = b.send(start + tokens(question), b.refs[0] if i % 2 else None, 1)
                while len(b.times[name]) < 2:
                    b.step()
                if i >= 2:  # the first two fill the cache, for the base and the adapter
                    found[kind].append(b.times[name][1] - b.times[name][0])
        memory = b.built.engine.stats().memory
        tell(
            {
                "ttft_ms": {k: 1000 * statistics.median(v) for k, v in found.items()},
                "ratio": statistics.median(found["different"]) / statistics.median(found["shared"]),
                "hit_tokens": memory.prefix_hit_tokens,
                "prompt_tokens": memory.prefix_lookup_tokens,
            }
        )


if __name__ == "__main__":
    app()
