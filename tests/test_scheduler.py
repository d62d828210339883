"""The scheduler over a real pool, real adapters and a real host cache; only the model is missing.

`Bench.step` checks every batch against the limits and every page against its owner, so each test
here is also a test of those. A request has a salt of its own unless a test gives it another, so
that it finds nobody's blocks in the prefix cache but, after a preemption, its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.host_cache import HostCache
from lorad.adapters.loader import LoadResult
from lorad.adapters.weights import AdapterWeights
from lorad.engine import scheduler as scheduler_module
from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.messages import GenerationRequest, SamplingParams, TokenOutput
from lorad.engine.request import Sequence
from lorad.engine.sampler import Sampled
from lorad.engine.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from lorad.errors import LoradError
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import AdapterLayout

BLOCK = 4  # tokens in a page
PAGE_ELEMENTS = 16  # 64 bytes in float32
EOS, TOKEN = 2, 5


def ref(name: str) -> AdapterRef:
    return AdapterRef(AdapterName.parse(name), "v1", f"sha256:{name}")


def weights_of(name: str, pages: int) -> AdapterWeights:
    elements = pages * PAGE_ELEMENTS
    layout = AdapterLayout(slices=(), nbytes=4 * elements, weight_nbytes=4 * elements, max_rank=1)
    return AdapterWeights(f"sha256:{name}", layout, torch.ones(elements))


class Bench:
    """Adapters are named by letters; each takes as many pages as `sizes` says, else one."""

    def __init__(
        self,
        pages: int = 64,
        *,
        budget: int = 64,
        max_num_seqs: int = 16,
        max_loras: int = 8,
        max_model_len: int = 256,
        sizes: dict[str, int] | None = None,
        max_cpu_loras: int = 64,
        moved_pages: int = 64,
    ) -> None:
        """`moved_pages` are moved in a step at most."""
        self.limits = SchedulerLimits(max_num_seqs, budget, max_loras, max_model_len)
        self.sizes = sizes or {}
        self.pool = PagePool(pages)
        data = torch.zeros(pages * PAGE_ELEMENTS)
        slab = Slab(data, pages, PAGE_ELEMENTS, BLOCK)
        clock = itertools.count()
        self.eviction = Eviction(self.pool, clock=lambda: float(next(clock)))
        kv_cache = KVCache(self.pool, slab, self.eviction)
        self.adapters = AdapterPool(
            self.pool,
            slab,
            self.eviction,
            kv_cache,
            moved_bytes_per_step=moved_pages * slab.page_bytes,
        )
        self.loads: list[AdapterRef] = []  # asked for, not answered
        self.tiers = AdapterTiers(
            self.adapters,
            HostCache(max_cpu_loras, 2**30),
            self.loads.append,
            self.cancel_load,
            prefetch=max_loras,  # as build_engine has it
        )
        self.scheduler = Scheduler(self.limits, kv_cache, self.tiers, frozenset({EOS}))
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.proven: set[tuple[object, ...]] = set()  # what finite results were computed from
        self.now = 0.0

    # --- what a test does ---------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: int = 3,
        max_tokens: int = 4,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> Sequence:
        request = GenerationRequest(
            name,
            tuple(range(10, 10 + prompt)),
            SamplingParams(max_tokens),
            ref(adapter) if adapter else None,
            name if salt is None else salt,
        )
        sequence = Sequence.from_request(request)
        sequence.arrived_at = self.now
        self.outputs[name] = []
        self.scheduler.add(sequence)
        return sequence

    def resident(self, *names: str) -> None:
        for name in names:
            assert self.tiers.prepare(ref(name)) == "loading"
            self.finish_load(name)
            assert self.tiers.prepare(ref(name)) == "ready"

    def cancel_load(self, digest: str) -> bool:
        """As the loader does with what it has not begun to read."""
        wanted = [each for each in self.loads if each.digest == digest]
        for each in wanted:
            self.loads.remove(each)
        return bool(wanted)

    def finish_load(self, name: str) -> None:
        self.loads.remove(ref(name))
        self.tiers.finish_load(
            LoadResult(ref(name), 0.1, weights_of(name, self.sizes.get(name, 1)))
        )

    def fail_load(self, name: str) -> None:
        self.loads.remove(ref(name))
        error = LoradError("adapter.load_failed", name)
        self.tiers.finish_load(LoadResult(ref(name), 0.1, error=error))
        self.enter(self.scheduler.fail_waiting(ref(name).digest, error))

    def step(
        self, tokens: dict[str, int | None] | None = None, command: str | None = None
    ) -> ScheduledBatch:
        """One step; every sampled token is TOKEN, or what `tokens` says for a request.

        `command` is the adapter of a load command that is pending, as in Engine.step.
        """
        expected = {s: s.num_computed for s in self.scheduler.running}
        self.tiers.begin_step()
        commanded = {ref(command).digest} if command else set()
        self.tiers.keep_only(commanded | self.scheduler.waiting_by_adapter().keys())
        if command:
            self.tiers.prepare(ref(command), "command")
        batch = self.scheduler.schedule()
        self.enter(self.scheduler.take_failures())
        self.check(batch, expected)
        sampled = [
            Sampled((tokens or {}).get(item.sequence.request_id, TOKEN)) for item in batch.sampled
        ]
        self.enter(self.scheduler.update(batch, sampled))
        for item, result in zip(batch.sampled, sampled, strict=True):
            if result.token_id is not None:
                blocks = range(BLOCK, item.start + item.count + 1, BLOCK)
                self.proven |= {self.content(item.sequence, tokens) for tokens in blocks}
        self.check_pages()
        return batch

    def run(self, limit: int = 500) -> int:
        """Steps until nothing is left, loads ending at once; returns how many."""
        for steps in range(limit):
            for each in list(self.loads):
                self.finish_load(each.name.name)
            if not self.sequences():
                return steps
            self.step()
        raise AssertionError(f"still there after {limit} steps: {self.waiting} {self.running}")

    # --- what a test looks at -----------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        return [s.request_id for s in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [s.request_id for s in self.scheduler.waiting]

    def sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def tokens(self, name: str) -> int:
        return sum(output.token_id is not None for output in self.outputs[name])

    def end(self, name: str) -> str | None:
        """How a request ended: its finish reason, or the code of its error."""
        last = self.outputs[name][-1] if self.outputs[name] else None
        return last and (last.error.code if last.error else last.finish_reason)

    def enter(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            answers = self.outputs[output.request_id]
            assert not answers or answers[-1].finish_reason is None, "an output after the end"
            answers.append(output)

    @staticmethod
    def content(sequence: Sequence, tokens: int) -> tuple[object, ...]:
        """What the K and V of a sequence's first tokens depend on."""
        return sequence.digest, sequence.request.cache_salt, *sequence.tokens[:tokens]

    # --- what must hold in every step ---------------------------------------------------------

    def check(self, batch: ScheduledBatch, computed: dict[Sequence, int]) -> None:
        items = batch.items
        assert sum(item.count for item in items) <= self.limits.max_num_batched_tokens
        assert len(self.running) <= self.limits.max_num_seqs
        assert len(set(self.scheduler.running_by_adapter())) <= self.limits.max_loras
        assert len({item.sequence for item in items}) == len(items)
        for item in items:
            sequence, end = item.sequence, item.start + item.count
            assert sequence in self.scheduler.running
            assert item.count >= 1
            assert item.start == sequence.num_computed
            if item.start not in (0, computed.get(sequence)):  # it begins, with cached blocks
                assert item.start % BLOCK == 0, "tokens left out"
                assert self.content(sequence, item.start) in self.proven
            assert item.samples == (end == len(sequence.tokens))
            assert len(sequence.block_table) * BLOCK >= end
            assert sequence.digest is None or sequence.digest in self.adapters
        order = [(item.count > 1, item.sequence.digest or "") for item in items]
        assert order == sorted(order), "rows of one adapter are not side by side"
        self.check_pages()

    def check_pages(self) -> None:
        pages = Counter(page for s in self.scheduler.running for page in s.block_table)
        assert len(pages) == self.pool.kv_pages
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == pages[page]
        for sequence in self.scheduler.running:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
        assert not any(s.block_table for s in self.scheduler.waiting)
        users = Counter(s.digest for s in self.scheduler.running if s.digest)
        assert {a.digest: a.users for a in self.adapters.resident() if a.users} == users
        assert self.pool.adapter_pages == sum(a.num_pages for a in self.adapters.resident())

    def check_all_is_free(self) -> None:
        """Or kept only until somebody wants the place: cached blocks and idle adapters."""
        assert not self.sequences()
        for _ in range(2):  # a window that nobody asks for any more is given up
            self.tiers.begin_step()
        assert (self.pool.kv_pages, self.pool.reserved_pages) == (0, 0)
        assert not any(adapter.users for adapter in self.adapters.resident())
        kept = self.pool.cached_pages + self.pool.adapter_pages
        assert self.pool.free_pages + kept == self.pool.num_pages


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scheduler's time, moved by hand: `clock.now`."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


# --- budgets ----------------------------------------------------------------------------------


def test_prompts_and_answers_share_the_token_budget() -> None:
    bench = Bench(budget=10)
    for i in range(3):
        bench.add(str(i), prompt=7)
    counts = [[item.count for item in bench.step().items] for _ in range(3)]
    # 7 + 3 of 7; then a decode, 4 left of the second, 5 of the third; then all but its end.
    assert counts == [[7, 3], [1, 4, 5], [1, 1, 2]]
    bench.run()
    assert [bench.end(str(i)) for i in range(3)] == ["length"] * 3


def test_no_more_sequences_than_allowed() -> None:
    bench = Bench(max_num_seqs=2)
    for i in range(5):
        bench.add(str(i))
    assert len(bench.step().items) == 2
    assert bench.running == ["0", "1"]
    bench.run()
    assert [bench.tokens(str(i)) for i in range(5)] == [4] * 5


def test_answers_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    bench = Bench(budget=8)
    bench.add("short", max_tokens=30)
    bench.step()
    long = bench.add("long", prompt=60, max_tokens=1)
    bench.add("behind", max_tokens=1)
    chunks = []
    while long.num_computed < 60:
        batch = bench.step()
        rows = {item.sequence.request_id: item.count for item in batch.items}
        assert rows["short"] == 1, "a decode waited for a prompt"
        chunks.append(rows["long"])
    assert chunks == [7] * 8 + [4]
    bench.run()
    assert bench.tokens("long") == bench.tokens("behind") == 1


def test_first_come_first_served() -> None:
    bench = Bench(budget=4, max_num_seqs=3)
    for i in range(6):
        bench.add(str(i), prompt=4, max_tokens=2)
    first_tokens = []
    while bench.sequences():
        before = {name for name in bench.outputs if bench.outputs[name]}
        bench.step()
        first_tokens += [n for n in bench.outputs if bench.outputs[n] and n not in before]
    assert first_tokens == list("012345")


def test_a_prompt_that_comes_several_times_at_once_is_computed_once() -> None:
    """The first computes; the others wait for that one step and then find all full blocks."""
    bench = Bench()
    for i in range(3):
        bench.add(str(i), prompt=4 * BLOCK + 2, salt="all")
    bench.add("other", prompt=4 * BLOCK + 2, salt="of another tenant")
    first = {item.sequence.request_id: item.count for item in bench.step().items}
    assert first == {"0": 18, "other": 18}
    second = {item.sequence.request_id: item.count for item in bench.step().items}
    assert second == {"0": 1, "other": 1, "1": 2, "2": 2}
    assert (bench.scheduler.prefix_lookup_tokens, bench.scheduler.prefix_hit_tokens) == (72, 32)
    bench.run()
    assert [bench.tokens(str(i)) for i in range(3)] == [4] * 3


def test_who_waited_for_a_prompt_that_came_to_nothing_computes_it() -> None:
    bench = Bench()
    for i in range(3):
        bench.add(str(i), prompt=2 * BLOCK + 1, salt="all")
    bench.step({"0": None})
    assert bench.end("0") == "engine.nonfinite_logits"
    counts = {item.sequence.request_id: item.count for item in bench.step().items}
    assert counts == {"1": 9}
    bench.run()
    assert (bench.tokens("1"), bench.tokens("2")) == (4, 4)


def test_a_prompt_that_takes_more_steps_keeps_nobody_waiting() -> None:
    """Only what the next step will find is waited for, not the end of a long prefill."""
    bench = Bench(budget=12)
    bench.add("decodes", max_tokens=20)
    bench.step()
    bench.add("long", prompt=6 * BLOCK, salt="all")
    bench.add("same", prompt=6 * BLOCK, salt="all")
    rows = [{item.sequence.request_id: item.count for item in bench.step().items} for _ in range(4)]
    assert [row.get("long") for row in rows] == [11, 11, 2, 1]
    assert [row.get("same") for row in rows] == [None, None, None, 4]


def test_while_a_load_command_makes_room_only_those_go_on_who_have_begun() -> None:
    bench = Bench()
    bench.add("runs", max_tokens=3)
    bench.step()
    bench.add("comes")
    bench.scheduler.admits = False
    bench.step()
    assert (bench.running, bench.waiting) == (["runs"], ["comes"])
    bench.step()
    assert bench.end("runs") == "length"
    bench.step()
    assert bench.running == ["comes"], "nobody is left whose end could be waited for"


# --- adapters ---------------------------------------------------------------------------------


def test_no_more_adapters_in_a_step_than_allowed() -> None:
    bench = Bench(max_loras=2)
    bench.resident("a", "b", "c")
    for i, adapter in enumerate("abcab"):
        bench.add(str(i), adapter=adapter)
    bench.add("base")
    assert {i.sequence.request_id for i in bench.step().items} == {"0", "1", "3", "4", "base"}
    bench.run()
    assert bench.end("2") == "length"


def test_others_pass_a_request_that_waits_for_its_adapter() -> None:
    bench = Bench()
    bench.resident("here")
    bench.add("cold", adapter="far")
    bench.add("base")
    bench.add("warm", adapter="here")
    assert {i.sequence.request_id for i in bench.step().items} == {"base", "warm"}
    assert bench.loads == [ref("far")]
    bench.step()
    assert bench.loads == [ref("far")], "one load is enough"
    bench.finish_load("far")
    assert "cold" in {i.sequence.request_id for i in bench.step().items}


def test_requests_for_different_adapters_are_loaded_for_at_once() -> None:
    bench = Bench(max_loras=3)
    for name in "abcd":
        bench.add(name, adapter=name)
    bench.step()
    assert bench.loads == [ref("a"), ref("b"), ref("c")], "as many as can run together"


def test_a_failed_load_ends_its_own_requests_only() -> None:
    bench = Bench()
    bench.resident("good")
    bench.add("1", adapter="bad")
    bench.add("2", adapter="good", max_tokens=20)
    bench.add("3", adapter="bad")
    bench.step()
    bench.fail_load("bad")
    assert [bench.end(name) for name in "123"] == [
        "adapter.load_failed",
        None,
        "adapter.load_failed",
    ]
    bench.add("4", adapter="bad")
    bench.step()
    assert bench.loads == [ref("bad")], "a later request tries again"
    bench.run()
    assert bench.end("2") == bench.end("4") == "length"


def test_the_wait_for_a_place_among_the_adapters_is_bounded(clock) -> None:
    """`a` and `b` fill max_loras with requests that never stop coming; `c` gets its place."""
    bench = Bench(max_loras=2)
    bench.resident("a", "b", "c")
    numbers = itertools.count()

    def keep_busy() -> None:
        for adapter, length in (("a", 20), ("b", 8)):
            if sum(s.digest == ref(adapter).digest for s in bench.sequences()) < 4:
                bench.add(f"{adapter}{next(numbers)}", adapter=adapter, max_tokens=length)

    for _ in range(10):
        keep_busy()
        bench.step()
    bench.add("c", adapter="c", max_tokens=2)
    clock.now = bench.limits.adapter_wait - 0.1
    for _ in range(30):
        keep_busy()
        bench.step()
    assert bench.tokens("c") == 0, "its time had not come yet"

    clock.now = bench.limits.adapter_wait + 0.1
    steps = 0
    while not bench.end("c"):
        bench.now = clock.now
        keep_busy()
        bench.step()
        steps += 1
        assert steps <= 8 + 4, "longer than the shortest adapter's longest answer"
    bench.run()
    assert set(map(bench.end, bench.outputs)) == {"length"}


def test_held_adapters_admit_nobody_and_stop_nobody() -> None:
    bench = Bench()
    bench.resident("a", "b")
    bench.add("old", adapter="a", max_tokens=6)
    bench.step()
    bench.scheduler.held.add(ref("a").digest)
    bench.add("new", adapter="a")
    bench.add("other", adapter="b")
    for _ in range(10):
        bench.step()
    assert [bench.end(name) for name in ("old", "new", "other")] == ["length", None, "length"]
    assert bench.waiting == ["new"]
    assert bench.step().items == (), "and it is not failed for want of room"
    bench.scheduler.held.clear()
    bench.run()
    assert bench.end("new") == "length"


def test_a_preempted_request_of_a_held_adapter_still_finishes() -> None:
    """It has begun, so an unload must wait for it; held back, it would never end."""
    bench = Bench(pages=8, sizes={"a": 2})
    bench.resident("a")
    bench.add("old", prompt=4, max_tokens=12)
    bench.add("it", prompt=4, max_tokens=16, adapter="a")
    bench.step()
    while not bench.waiting:
        bench.step()
    assert bench.waiting == ["it"]
    bench.scheduler.held.add(ref("a").digest)
    assert bench.scheduler.unfinished(ref("a").digest) == 1
    bench.add("new", adapter="a")
    while not bench.end("it"):
        bench.step()
        assert bench.scheduler.unfinished(ref("a").digest) == (bench.end("it") is None)
    assert bench.tokens("it") == 16
    assert bench.waiting == ["new"]


# --- room -------------------------------------------------------------------------------------


def test_a_request_that_tries_to_begin_again_and_again_is_one_use_of_its_adapter() -> None:
    bench = Bench(pages=8)
    bench.resident("a")
    bench.add("old", prompt=20, max_tokens=8)
    bench.step()
    bench.add("it", prompt=16, max_tokens=12, adapter="a")
    tries = 0
    while bench.waiting or not bench.end("it"):
        bench.step()
        tries += bench.waiting == ["it"]
    assert tries >= 5
    resident = bench.adapters.get(ref("a").digest)
    assert resident is not None and 1.9 < resident.reuse.weight <= 2.0  # its upload, and one use


def test_the_newest_is_preempted_and_computed_again() -> None:
    bench = Bench(pages=6)
    old = bench.add("old", prompt=4, max_tokens=16)
    new = bench.add("new", prompt=4, max_tokens=12)
    preempted = 0
    while bench.sequences():
        batch = bench.step()
        if bench.waiting:
            preempted += 1
            assert bench.waiting == ["new"]
            assert (new.num_computed, new.block_table) == (0, [])
            assert {i.sequence.request_id for i in batch.items} == {"old"}
    assert preempted > 0
    assert (bench.tokens("old"), bench.tokens("new")) == (16, 12)
    assert old.tokens[:4] == new.tokens[:4] == [10, 11, 12, 13]
    bench.check_all_is_free()


def test_a_preempted_sequence_goes_before_those_that_wait() -> None:
    bench = Bench(pages=5)
    bench.add("old", prompt=4, max_tokens=12)
    bench.add("new", prompt=4, max_tokens=8)
    bench.step()
    while not bench.waiting:
        bench.step()
    bench.add("later", prompt=4, max_tokens=1)
    assert bench.waiting == ["new", "later"]
    while bench.tokens("later") == 0:
        bench.step()
    assert "new" in bench.running or bench.end("new") == "length"
    bench.run()


def test_idle_adapters_make_room_before_anybody_is_preempted() -> None:
    bench = Bench(pages=8)
    bench.resident("a", "b")
    bench.add("1", prompt=8, max_tokens=8)
    bench.add("2", prompt=8, max_tokens=8)
    bench.run()
    assert "sha256:a" not in bench.adapters
    assert "sha256:b" not in bench.adapters
    bench.check_all_is_free()


def test_an_adapter_in_use_is_kept_and_the_newest_goes_instead() -> None:
    bench = Bench(pages=8, sizes={"a": 3})
    bench.resident("a")
    bench.add("1", prompt=4, max_tokens=12, adapter="a")
    bench.add("2", prompt=4, max_tokens=12)
    while bench.sequences():
        bench.step()
        assert bench.end("1") or "sha256:a" in bench.adapters
    assert bench.end("1") == bench.end("2") == "length"


@pytest.mark.parametrize("others", [0, 3])
def test_an_adapter_larger_than_the_slab_fails_its_request_at_once(others: int) -> None:
    """Also when other requests keep coming, and without evicting what they use."""
    bench = Bench(pages=16, sizes={"huge": 17, "small": 2})
    bench.resident("small")
    for i in range(others):
        bench.add(f"other{i}", max_tokens=40)
    bench.step()
    bench.add("huge", adapter="huge")
    for _ in range(3):
        bench.step()
        if bench.loads:
            bench.finish_load("huge")
    assert bench.end("huge") == "memory.no_capacity"
    assert "sha256:small" in bench.adapters
    assert len(bench.running) == others
    bench.run()
    assert all(bench.end(f"other{i}") == "length" for i in range(others))


def test_pinned_adapters_count_as_taken_for_good() -> None:
    bench = Bench(pages=16, sizes={"pinned": 6, "big": 11})
    bench.resident("pinned")
    bench.tiers.pin("sha256:pinned", True)
    bench.add("big", adapter="big")
    bench.run()
    assert bench.end("big") == "memory.no_capacity"
    bench.tiers.pin("sha256:pinned", False)
    bench.add("again", adapter="big")
    bench.run()
    assert bench.end("again") == "length"


def test_an_adapter_and_a_prompt_that_do_not_fit_together_fail_alone() -> None:
    bench = Bench(pages=16, sizes={"big": 14})
    bench.add("too long", prompt=12, adapter="big")
    bench.add("fits", prompt=4, adapter="big")
    bench.add("base", prompt=12)
    bench.run()
    assert bench.end("too long") == "memory.no_capacity"
    assert bench.end("fits") == bench.end("base") == "length"
    bench.check_all_is_free()


def test_a_sequence_that_outgrows_the_slab_ends_with_an_error() -> None:
    bench = Bench(pages=8, sizes={"a": 5})
    bench.add("1", prompt=4, max_tokens=30, adapter="a")
    bench.add("2", prompt=4, max_tokens=12)
    bench.run()
    assert bench.end("1") == "memory.no_capacity"
    assert bench.tokens("1") == 9, "three pages hold 12 tokens, and the 13th needs no page yet"
    assert bench.end("2") == "length"
    bench.check_all_is_free()


def test_an_adapter_gets_its_room_even_if_other_requests_never_stop_coming(clock) -> None:
    """KV fills the slab all the time; after `adapter_wait` the newer ones stay outside."""
    bench = Bench(pages=16, sizes={"a": 6})
    numbers = itertools.count()

    def keep_busy() -> None:
        while len(bench.sequences()) < 12:
            bench.add(f"base{next(numbers)}", prompt=6, max_tokens=8)

    keep_busy()
    bench.step()
    bench.add("a", adapter="a", max_tokens=2)
    for _ in range(60):
        clock.now = bench.now = bench.now + 0.5
        keep_busy()
        bench.step()
        if bench.loads:
            bench.finish_load("a")
        if bench.end("a"):
            break
    assert bench.end("a") == "length"
    assert bench.now < bench.limits.adapter_wait + 10
    bench.run()
    assert set(map(bench.end, bench.outputs)) == {"length"}


def scattered(moved_pages: int) -> Bench:
    """Three sequences that each need a second page in the next step, between 5 free pages; an
    adapter of 5 pages has been read."""
    bench = Bench(pages=8, sizes={"big": 5}, moved_pages=moved_pages)
    for i in range(3):
        bench.add(f"short{i}", prompt=1, max_tokens=1)
        bench.add(f"long{i}", prompt=1, max_tokens=9)
    bench.tiers.prepare(ref("big"))
    bench.finish_load("big")
    for _ in range(4):
        bench.step()
    assert (bench.pool.free_pages, bench.pool.longest_run()) == (5, 2)
    return bench


def test_pages_that_are_being_cleared_for_an_adapter_go_to_a_sequence_first() -> None:
    bench = scattered(moved_pages=1)
    bench.tiers.begin_step()
    assert bench.tiers.prepare(ref("big"), "command") == "loading"
    assert bench.pool.reserved_pages > 0
    bench.step(command="big")
    assert bench.pool.reserved_pages == 0
    assert len(bench.running) == 3
    assert bench.scheduler.preemptions == 0
    bench.run()
    assert [bench.end(f"long{i}") for i in range(3)] == ["length"] * 3


def test_pages_that_an_adapter_has_had_are_not_waited_for() -> None:
    """Moved, filled and pinned in the step in which the sequences need pages: they take turns."""
    bench = scattered(moved_pages=8)
    bench.tiers.begin_step()
    assert bench.tiers.prepare(ref("big"), "command") == "ready"
    assert bench.adapters.relocator.moved_pages > 0
    bench.tiers.pin(ref("big").digest, True)
    assert not bench.tiers.give_up_window(), "there is none, and the scheduler would ask for ever"
    bench.scheduler.schedule()
    assert bench.scheduler.preemptions > 0
    bench.run()
    assert [bench.end(f"long{i}") for i in range(3)] == ["length"] * 3
    assert ref("big").digest in bench.adapters


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["new", "loading", "no room", "prefill", "decode", "preempted"])
def test_an_abort_in_any_state_gives_everything_back(state: str) -> None:
    bench = Bench(pages=8, budget=8, sizes={"a": 2, "wide": 7})
    adapter = {"loading": "a", "no room": "wide", "prefill": "a", "decode": "a", "preempted": "a"}
    if state in ("prefill", "decode", "preempted"):
        bench.resident("a")
    if state in ("no room", "preempted"):
        bench.add("other", prompt=4, max_tokens=16)
        bench.step()
    prompt = 20 if state == "prefill" else 4
    sequence = bench.add("it", prompt=prompt, max_tokens=16, adapter=adapter.get(state))
    if state == "loading":
        bench.step()
        assert bench.loads
    elif state == "no room":
        bench.step()
        bench.finish_load("wide")
        bench.step()
    elif state == "prefill":
        bench.step()
        assert 0 < sequence.num_computed < 20
    elif state == "decode":
        bench.step()
        bench.step()
        assert sequence.num_output == 2
    elif state == "preempted":
        bench.step()
        while not bench.waiting:
            bench.step()
        assert sequence.num_output
    assert (sequence in bench.scheduler.running) == (state in ("prefill", "decode"))

    tokens = bench.tokens("it")
    bench.scheduler.abort("it")
    assert sequence not in bench.sequences()
    assert sequence.block_table == []
    bench.check_pages()
    bench.run()
    assert bench.tokens("it") == tokens
    bench.check_all_is_free()


def test_aborting_an_unknown_request_changes_nothing() -> None:
    bench = Bench()
    bench.add("1")
    bench.step()
    bench.scheduler.abort("2")
    bench.run()
    bench.scheduler.abort("1")
    assert bench.end("1") == "length"


def test_logits_that_are_not_finite_end_that_request_alone() -> None:
    bench = Bench()
    bench.resident("a")
    bench.add("bad", adapter="a")
    bench.add("good", adapter="a")
    bench.step()
    bench.step({"bad": None})
    assert bench.end("bad") == "engine.nonfinite_logits"
    assert bench.running == ["good"]
    bench.run()
    assert bench.end("good") == "length"
    bench.check_all_is_free()


def test_blocks_of_a_request_that_was_not_finite_serve_nobody() -> None:
    """Also not those that it had found in the cache: they may be what was broken."""
    bench = Bench()
    bench.add("first", prompt=12, max_tokens=1, salt="same")
    bench.run()
    bad = bench.add("bad", prompt=20, max_tokens=9, salt="same")
    bench.step()
    assert bad.cached_tokens == 12
    bench.step({"bad": None})
    assert bench.end("bad") == "engine.nonfinite_logits"
    assert (bench.pool.kv_pages, bench.pool.cached_pages) == (0, 0)
    later = bench.add("later", prompt=20, max_tokens=1, salt="same")
    bench.run()
    assert later.cached_tokens == 0


def test_an_end_token_ends_a_sequence_and_frees_its_pages() -> None:
    bench = Bench()
    bench.add("1", max_tokens=9)
    bench.add("2", max_tokens=9)
    bench.step()
    bench.step({"1": EOS})
    assert bench.end("1") == "stop"
    assert bench.running == ["2"]
    assert bench.pool.kv_pages == len(bench.scheduler.running[0].block_table)


def test_a_failed_step_ends_what_ran_and_what_waits_goes_on() -> None:
    bench = Bench(max_num_seqs=2)
    bench.resident("a")
    for i in range(4):
        bench.add(str(i), adapter="a" if i % 2 else None)
    bench.step()
    error = LoradError("engine.failed", "broken")
    bench.enter(bench.scheduler.fail_running(error))
    assert [bench.end(str(i)) for i in range(4)] == ["engine.failed"] * 2 + [None] * 2
    assert bench.pool.kv_pages == 0
    bench.run()
    assert [bench.end(str(i)) for i in (2, 3)] == ["length"] * 2
    bench.check_all_is_free()


# --- any order of events ----------------------------------------------------------------------

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
    )
    def start(
        self, pages: int, budget: int, seqs: int, loras: int, cached: int, moved: int
    ) -> None:
        self.bench = Bench(
            pages,
            budget=budget,
            max_num_seqs=seqs,
            max_loras=loras,
            max_cpu_loras=cached,
            moved_pages=moved,
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
