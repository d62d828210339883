"""The scheduler under any order of requests, aborts, loads, unloads, pins and steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lorad.engine import scheduler as scheduler_module
from scheduler_bench import EOS, Bench, ref
from scheduler_bench import clock as clock

ADAPTERS = [None, "a", "b", "c", "d", "wide", "huge"]


class Traffic(RuleBasedStateMachine):
    """Requests, aborts, loads that end or fail, unloads, pins and steps in any order.

    At the end nothing new comes: every request must then end, and everything must be free.
    """

    @initialize(
        pages=st.integers(6, 40),
        budget=st.integers(1, 24),
        seqs=st.integers(1, 6),
        loras=st.integers(1, 3),
        cached=st.integers(1, 4),
        moved=st.integers(1, 4),
        ceiling=st.one_of(st.none(), st.integers(1, 20)),
    )
    def start(
        self,
        pages: int,
        budget: int,
        seqs: int,
        loras: int,
        cached: int,
        moved: int,
        ceiling: int | None,
    ) -> None:
        self.bench = Bench(
            pages,
            budget=budget,
            max_num_seqs=seqs,
            max_loras=loras,
            max_cpu_loras=cached,
            moved_pages=moved,
            adapter_ceiling=ceiling,
            sizes={"b": 2, "wide": 5, "huge": 45},
        )
        self.clock = SimpleNamespace(monotonic=lambda: self.bench.now)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler_module, "time", self.clock)
        self.names = itertools.count()
        self.aborted: set[str] = set()

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        adapter=st.sampled_from(ADAPTERS),
        salt=st.sampled_from([None, "shared"]),
    )
    def add(self, prompt: int, max_tokens: int, adapter: str | None, salt: str | None) -> None:
        self.bench.add(str(next(self.names)), prompt, max_tokens, adapter, salt)

    @rule(
        steps=st.integers(1, 4),
        eos=st.booleans(),
        command=st.sampled_from([None, None, "a", "b", "wide"]),
    )
    def step(self, steps: int, eos: bool, command: str | None) -> None:
        for _ in range(steps):
            last = self.bench.running[-1:] if eos else []
            self.bench.step(dict.fromkeys(last, EOS), command)

    @precondition(lambda self: self.bench.loads)
    @rule(data=st.data(), works=st.booleans())
    def end_a_load(self, data, works: bool) -> None:
        name = data.draw(st.sampled_from([each.name.name for each in self.bench.loads]))
        (self.bench.finish_load if works else self.bench.fail_load)(name)

    @precondition(lambda self: self.bench.sequences())
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from([s.request_id for s in self.bench.sequences()]))
        self.bench.scheduler.abort(name)
        self.aborted.add(name)
        self.bench.check_pages()

    @precondition(lambda self: self.bench.running)
    @rule()
    def nan(self) -> None:
        self.bench.step({self.bench.running[0]: None})

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule(adapter=st.sampled_from(ADAPTERS[1:]))
    def hold(self, adapter: str) -> None:
        self.bench.scheduler.held.add(ref(adapter).digest)

    @precondition(lambda self: self.bench.scheduler.held)
    @rule(data=st.data())
    def unload_or_give_up(self, data) -> None:
        """As the engine does: forget the adapter when nobody uses it, and end the hold."""
        held = self.bench.scheduler.held
        digest = data.draw(st.sampled_from(sorted(held)))
        busy = self.bench.scheduler.unfinished(digest) or self.bench.tiers.is_loading(digest)
        if not busy:
            self.bench.tiers.drop(digest)
        held.discard(digest)

    @rule(adapter=st.sampled_from(["a", "b"]), pinned=st.booleans())
    def pin(self, adapter: str, pinned: bool) -> None:
        if ref(adapter).digest in self.bench.adapters:
            self.bench.tiers.pin(ref(adapter).digest, pinned)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.scheduler.held.clear()
        try:
            bench.run(limit=3000)
            bench.check_all_is_free()
            for name in bench.outputs.keys() - self.aborted:
                reason = bench.end(name)
                assert reason is not None, f"request {name} never ended"
                codes = {"adapter.load_failed", "memory.no_capacity", "engine.nonfinite_logits"}
                assert reason in {"stop", "length", *codes}
            assert not any(bench.end(name) for name in self.aborted)
        finally:
            self.patch.undo()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
