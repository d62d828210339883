"""Memory as requests meet it: many adapters in little room, slow stores, churn, metrics."""

from __future__ import annotations

import gc
import queue
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lorad.adapters.weights import read_weights
from lorad.engine.build import EngineOptions, build_engine
from lorad.engine.messages import (
    AbortRequest,
    AdapterState,
    EngineStats,
    GenerationRequest,
    LoadAdapter,
    MemoryStats,
    SamplingParams,
    UnloadAdapter,
)
from lorad.server.engine_metrics import metrics_source

PAGE = 16 * 2 * 2 * 32 * 4  # tokens x (K, V) x layers x kv width x float32, of the tiny llama
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def adapters(tiny_model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    """Six of four ranks; 30 names share their files, each is a content of its own to the engine."""
    root = tmp_path_factory.mktemp("fleet")
    made = [
        random_adapter(tiny_model("llama"), root / str(i), rank, ("q_proj", "down_proj"), seed=i)
        for i, rank in enumerate((1, 8, 16, 32, 2, 8))
    ]
    return {f"a{i}": made[i % 6] for i in range(30)}


def test_many_adapters_in_little_room_each_answer_as_when_alone(tiny_model, sync_engine, adapters):
    """Everything leaves and comes back all the time, and no answer changes."""
    names = list(adapters)
    rows = [([*PROMPT, i % 5 + 10], names[(7 * i) % 30]) for i in range(60)]
    roomy = sync_engine(tiny_model("llama"), adapters, max_loras=64)
    expected = roomy.generate(rows, max_tokens=20)
    tight = sync_engine(
        tiny_model("llama"),
        adapters,
        slab_bytes=24 * PAGE,
        max_model_len=96,
        max_loras=4,
        max_cpu_loras=6,
        max_num_seqs=8,
    )
    assert tight.generate(rows, max_tokens=20) == expected
    stats = tight.built.engine.stats()
    memory = stats.memory
    assert memory.loads["request"] + memory.loads.get("prefetch", 0) >= 30
    assert memory.evictions["adapter", "adapter"] + memory.evictions["adapter", "kv"] > 0
    assert memory.host_evictions > 0
    assert sum(memory.lookups.values()) == 60
    assert sum(a.host_bytes > 0 for a in stats.adapters) <= 6
    assert stats.kv_pages == 0
    pages = stats.kv_pages + stats.cached_pages + stats.adapter_pages + stats.free_pages
    assert pages == stats.total_pages == 24


class Engine:
    """Stepped by the test; its store answers while `store` is open, and takes a read in hand."""

    def __init__(self, model: Path, adapters: dict[str, Path], sync, **options) -> None:
        self.store, self.reads = threading.Event(), []
        self.store.set()

        def read(ref, shape, dtype):
            self.reads.append(ref.name.name)
            self.store.wait(60)
            return read_weights(adapters[ref.name.name], ref.digest, shape, dtype)

        settings = {"device": "cpu", "slab_bytes": 2**24, "threads": 1, **options}
        self.built = build_engine(EngineOptions(model, **settings), read, frozenset())
        self.ref = sync(model, adapters).ref
        self.outputs: list[object] = []

    def handle(self, message) -> None:
        self.built.engine.handle(message)

    def ask(self, name: str, adapter: str, tokens: int) -> None:
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        self.handle(GenerationRequest(name, tuple(PROMPT), params, self.ref(adapter)))

    def step(self) -> list[object]:
        worked = self.built.engine.step()
        with suppress(queue.Empty):
            self.handle(self.built.inbox.get(timeout=0.0 if worked else 0.01))
        new = self.built.engine.take_outputs()
        self.outputs += new
        return new

    def until(self, done, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "it takes too long"
            self.step()

    def ended(self, name: str) -> bool:
        return any(getattr(o, "request_id", "") == name and o.finish_reason for o in self.outputs)


@pytest.fixture
def engine(tiny_model, adapters, sync_engine):
    made = []

    def build(**options) -> Engine:
        made.append(Engine(tiny_model("llama"), adapters, sync_engine, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.store.set()
        engine.built.loader.stop()


def test_streams_go_on_while_the_store_does_not_answer(engine):
    """Each step gives each of them a token, with a read in hand that does not end."""
    e = engine()
    e.ask("stream", "a0", 200)
    e.until(lambda: len(e.outputs) > 5)
    e.store.clear()
    e.ask("cold", "a1", 1)
    e.until(lambda: "a1" in e.reads)
    for _ in range(60):
        assert [o.request_id for o in e.step()] == ["stream"]
    assert not e.ended("cold")
    e.store.set()
    e.until(lambda: e.ended("cold"))
    assert not e.ended("stream")


def test_requests_that_go_away_take_their_reads_with_them(engine):
    e = engine(max_loras=8)
    e.store.clear()
    for i in range(5):
        e.ask(f"r{i}", f"a{i}", 1)
    e.until(lambda: bool(e.reads))
    for i in range(5):
        e.handle(AbortRequest(f"r{i}"))
    e.step()
    e.store.set()
    e.until(lambda: not e.built.engine._adapters.busy)
    assert len(e.reads) == 1, "only the one that had begun"
    assert e.built.engine.stats().memory.cancelled_loads == 4
    e.ask("again", "a3", 1)
    e.until(lambda: e.ended("again"))


def test_adapters_further_back_are_read_before_their_turn_in_the_order_of_the_queue(engine):
    e = engine(max_loras=2, adapter_wait=60.0)
    for i in range(2):
        e.ask(f"long{i}", f"a{i}", 200)
    e.until(lambda: len(e.outputs) > 4)
    for i in (7, 3, 9):
        e.ask(f"r{i}", f"a{i}", 1)
    e.until(lambda: len(e.reads) == 4)
    for _ in range(20):
        e.step()
    assert e.reads == ["a0", "a1", "a7", "a3"], "two ahead: as many as run at once"
    assert e.built.engine.stats().memory.loads["prefetch"] == 2
    e.until(lambda: e.ended("r9"))


def test_loading_serving_and_unloading_leaves_nothing_behind(engine):
    """R07 and R08, small: bytes return to where they were, and the books do not grow."""
    e = engine(max_cpu_loras=4)
    sizes = []
    for i in range(60):
        name = f"a{i % 30}"
        e.handle(LoadAdapter(f"l{i}", e.ref(name)))
        e.until(lambda i=i: any(getattr(o, "command_id", "") == f"l{i}" for o in e.outputs))
        e.ask(f"r{i}", name, 3)
        e.until(lambda i=i: e.ended(f"r{i}"))
        e.handle(UnloadAdapter(f"u{i}", e.ref(name), 10.0))
        e.until(lambda i=i: any(getattr(o, "command_id", "") == f"u{i}" for o in e.outputs))
        stats = e.built.engine.stats()
        assert (stats.adapter_pages, stats.host_cache_bytes, stats.adapters) == (0, 0, ())
        e.outputs.clear()
        if i in (29, 59):
            gc.collect()
            sizes.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert sizes[1] <= sizes[0]
    assert len(e.reads) == 60, "each file was opened once per load"


class FullLoad:
    """Streams that want all pages there are, another for each that ends."""

    def __init__(self, e: Engine, streams: int) -> None:
        self.e = e
        self.sent = self.ended = 0
        for _ in range(streams):
            self.send()

    def send(self) -> None:
        self.e.ask(f"s{self.sent}", "a0", 20 + 7 * self.sent % 41)
        self.sent += 1

    def step(self) -> None:
        for output in self.e.step():
            if getattr(output, "finish_reason", None):
                assert output.error is None
                self.ended += 1
                self.send()

    def until(self, done, steps: int) -> None:
        for _ in range(steps):
            if done():
                return
            self.step()
        raise AssertionError(f"not in {steps} steps")


def answer(e: Engine, command: str) -> object | None:
    return next((o for o in e.outputs if getattr(o, "command_id", "") == command), None)


def test_a_load_command_and_constant_full_load_do_not_starve_each_other(engine):
    """Without its turn the command never finds room: each page that is freed is taken at once."""
    settings = {"slab_bytes": 40 * PAGE, "max_model_len": 96, "max_num_seqs": 32}
    e = engine(**settings, adapter_wait=1e9)
    load = FullLoad(e, 32)
    load.until(lambda: load.ended > 32, 400)
    e.handle(LoadAdapter("never", e.ref("a3")))  # of rank 32: the largest
    load.until(lambda: load.ended > 64, 400)
    assert answer(e, "never") is None

    e = engine(**settings, adapter_wait=0.02)
    load = FullLoad(e, 32)
    load.until(lambda: load.ended > 32, 400)
    e.handle(LoadAdapter("now", e.ref("a3")))
    load.until(lambda: answer(e, "now") is not None, 400)
    assert answer(e, "now").pages > 1
    before = load.ended
    load.until(lambda: load.ended > before + 16, 400)


def test_a_load_command_that_gets_no_room_is_given_up(engine):
    e = engine(slab_bytes=32 * PAGE, max_model_len=512, adapter_wait=0.002)
    e.ask("long", "a0", 500)
    e.until(lambda: e.built.engine.stats().kv_pages >= 23)
    e.handle(LoadAdapter("load", e.ref("a3")))
    e.until(lambda: answer(e, "load") is not None)
    failed = answer(e, "load").error
    assert failed.code == "memory.no_capacity"
    assert "0.014 s" in failed.message
    e.ask("next", "a0", 1)
    e.until(lambda: e.ended("next"))
    assert not e.ended("long")


def test_the_series_of_the_metrics_are_the_same_whatever_happened():
    def names(stats: EngineStats) -> set[str]:
        text = metrics_source(lambda: stats)().decode()
        return set(re.findall(r"^lorad\S*", text, re.MULTILINE))

    idle = EngineStats(0, 0, 0, 0, 0, 8, 8, 0, 0, 64, 0)
    rows = tuple(AdapterState(f"sha256:{i}", "device", error="x") for i in range(500))
    memory = MemoryStats(
        lookups={"device": 5, "made-up": 1},
        loads={"request": 7},
        evictions={("adapter", "kv"): 3, ("made", "up"): 1},
    )
    memory.load_seconds.add(0.02)
    busy = EngineStats(9, 1, 2, 3, 4, 8, 1, 3, 2, 64, 77, rows, 2, 99, memory)
    assert names(idle) == names(busy)
    text = metrics_source(lambda: busy)().decode()
    assert 'lorad_evictions_total{kind="adapter",reason="kv"} 3.0' in text
    assert 'lorad_pages{owner="cached"} 2.0' in text
    assert 'lorad_adapter_load_seconds_bucket{le="0.03"} 1.0' in text
    assert "lorad_adapter_load_seconds_count 1.0" in text
