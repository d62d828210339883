"""The engine on a tiny model: failures stay where they belong, commands do what they say.

`cold` answers come from an engine that has served nothing else; that they are right is shown in
test_parity.py.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lorad.engine.messages import (
    AbortRequest,
    AdapterLoaded,
    AdapterState,
    AdapterUnloaded,
    CommandFailed,
    LoadAdapter,
    UnloadAdapter,
)

TARGETS = ("q_proj", "v_proj", "down_proj")
PAGE = 16 * 2 * 2 * 32 * 4  # tokens x (K, V) x layers x KV width x float32
EOS = 2
PROMPTS = [[17, 3, 90], [5] * 20, list(range(40, 74)), [9, 8, 7, 6, 5, 4]]
Row = tuple[list[int], str | None]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama3-rope")


@pytest.fixture(scope="module")
def adapters(model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: random_adapter(model, root / name, 4, TARGETS, seed=seed)
        for seed, name in enumerate("abcd")
    }


@pytest.fixture(scope="module")
def known_answers() -> dict[tuple[tuple[int, ...], str | None, int], list[int]]:
    return {}


@dataclass
class Bench:
    """One engine under test, and the answers it should give."""

    engine: object  # the SyncEngine of conftest
    cold: Callable[..., list[int]]

    @property
    def core(self):
        return self.engine.built.engine

    @property
    def stats(self):
        return self.core.stats()

    def state(self, adapter: str) -> AdapterState | None:
        digest = self.engine.ref(adapter).digest
        return next((s for s in self.stats.adapters if s.digest == digest), None)

    def load(self, adapter: str, pin: bool | None = None):
        """The answer to a load command."""
        self.core.handle(LoadAdapter(f"load {adapter}", self.engine.ref(adapter), pin))
        return self.engine.run()[f"load {adapter}"][0]

    def begin_unload(self, adapter: str, drain_timeout: float = 60.0, command: str = "unload"):
        self.core.handle(UnloadAdapter(command, self.engine.ref(adapter), drain_timeout))

    def unload(self, adapter: str, drain_timeout: float = 60.0):
        self.begin_unload(adapter, drain_timeout)
        return self.engine.run()["unload"][0]

    def steps(self, count: int) -> dict[str, list]:
        """Exactly so many steps; outputs by request or command."""
        outputs: dict[str, list] = {}
        for _ in range(count):
            self.core.step()
            for output in self.core.take_outputs():
                key = getattr(output, "request_id", None) or output.command_id
                outputs.setdefault(key, []).append(output)
        return outputs

    def poison(self, adapter: str) -> None:
        """NaN into the adapter's bytes on the device, as a broken GPU would."""
        resident = self.core._adapters.get(self.engine.ref(adapter).digest)
        start = resident.first_page * self.core._slab.page_elements
        self.core._slab.data[start : start + 64] = torch.nan

    def check_answers(self, rows: list[Row], max_tokens: int = 16) -> None:
        expected = [self.cold(prompt, adapter, max_tokens) for prompt, adapter in rows]
        assert self.engine.generate(rows, max_tokens=max_tokens) == expected

    def check_idle(self) -> None:
        stats = self.stats
        assert (stats.running, stats.waiting, stats.kv_pages) == (0, 0, 0)
        assert not any(state.running_requests for state in stats.adapters)


@pytest.fixture
def bench(model, adapters, sync_engine, known_answers) -> Callable[..., Bench]:
    def cold(prompt: list[int], adapter: str | None, max_tokens: int = 16) -> list[int]:
        key = (tuple(prompt), adapter, max_tokens)
        if key not in known_answers:
            fresh = sync_engine(model, adapters, slab_bytes=64 * PAGE)
            known_answers[key] = fresh.generate([(prompt, adapter)], max_tokens=max_tokens)[0]
        return known_answers[key]

    def make(known: dict[str, Path] | None = None, pages: int = 64, **options) -> Bench:
        return Bench(
            sync_engine(model, known or adapters, slab_bytes=pages * PAGE, **options), cold
        )

    return make


def tokens(outputs: list) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def error_of(outputs: list) -> str | None:
    return outputs[-1].error and outputs[-1].error.code


# --- broken adapters --------------------------------------------------------------------------


def test_a_nan_adapter_ends_its_own_request_and_poisons_no_page(bench) -> None:
    """Every page of a small slab is used again after the failure, by K and V of others."""
    it = bench(pages=16, max_model_len=96)
    assert isinstance(it.load("a"), AdapterLoaded)
    it.poison("a")
    rows = [(PROMPTS[2], "a"), (PROMPTS[0], None), (PROMPTS[1], "b"), (PROMPTS[3], "a")]
    for i, (prompt, adapter) in enumerate(rows):
        it.engine.add(str(i), prompt, adapter)
    outputs = it.engine.run()
    assert [error_of(outputs[str(i)]) for i in range(4)] == [
        "engine.nonfinite_logits",
        None,
        None,
        "engine.nonfinite_logits",
    ]
    for i in (1, 2):
        assert tokens(outputs[str(i)]) == it.cold(*rows[i])
    assert tokens(outputs["0"]) == tokens(outputs["3"]) == [], "garbage was answered"
    assert "default/a@v1" in outputs["0"][-1].error.message
    it.check_idle()

    it.check_answers([(prompt, None) for prompt in PROMPTS])
    it.check_answers([(prompt, "b") for prompt in PROMPTS])
    it.check_answers([(PROMPTS[2], None)], max_tokens=60)
    it.check_idle()


def test_an_adapter_that_breaks_while_it_answers_keeps_what_it_has_said(bench) -> None:
    it = bench()
    it.engine.generate([(PROMPTS[0], "a")])
    it.engine.add("bad", PROMPTS[0], "a")
    it.engine.add("good", PROMPTS[0], None)
    before = it.steps(5)
    assert tokens(before["bad"]) == it.cold(PROMPTS[0], "a")[:5]
    it.poison("a")
    after = it.engine.run()
    assert error_of(after["bad"]) == "engine.nonfinite_logits"
    assert tokens(before["good"] + after["good"]) == it.cold(PROMPTS[0], None)


def test_unloading_a_broken_adapter_and_loading_it_again_mends_it(bench) -> None:
    it = bench()
    it.load("a")
    it.poison("a")
    it.engine.add("bad", PROMPTS[0], "a")
    assert error_of(it.engine.run()["bad"]) == "engine.nonfinite_logits"
    assert isinstance(it.unload("a"), AdapterUnloaded)
    it.check_answers([(PROMPTS[0], "a")])


def test_a_load_that_fails_ends_the_requests_for_it_alone(bench, adapters, tmp_path) -> None:
    broken = tmp_path / "broken"
    it = bench({"a": adapters["a"], "broken": broken})
    rows = [(PROMPTS[0], "broken"), (PROMPTS[1], "a"), (PROMPTS[2], None), (PROMPTS[3], "broken")]
    for i, (prompt, adapter) in enumerate(rows):
        it.engine.add(str(i), prompt, adapter)
    outputs = it.engine.run()
    assert error_of(outputs["0"]) == error_of(outputs["3"]) == "path.not_found"
    for i in (1, 2):
        assert tokens(outputs[str(i)]) == it.cold(*rows[i])
    assert it.state("broken").residency == "failed"
    assert "broken" in it.state("broken").error

    shutil.copytree(adapters["b"], broken)
    answer = it.engine.generate([(PROMPTS[0], "broken")])[0]
    assert answer == it.cold(PROMPTS[0], "b"), "the next request tries again"
    assert (it.state("broken").residency, it.state("broken").error) == ("device", "")


def test_a_load_command_that_fails_says_why(bench, tmp_path) -> None:
    it = bench({"broken": tmp_path / "nowhere"})
    answer = it.load("broken")
    assert isinstance(answer, CommandFailed)
    assert answer.error.code == "path.not_found"


# --- unload, load, pin ------------------------------------------------------------------------


def test_unload_waits_for_running_requests_and_frees_everything(bench) -> None:
    it = bench()
    it.engine.generate([(PROMPTS[0], "a")])
    resident = it.state("a")
    it.engine.add("running", PROMPTS[1], "a")
    it.engine.add("base", PROMPTS[0], None)
    first = it.steps(3)
    it.begin_unload("a")
    it.engine.add("late", PROMPTS[3], "a")
    drained = it.steps(12)
    assert "unload" not in drained
    assert "late" not in drained, "a new request was admitted while the adapter drains"
    last = it.engine.run()
    assert tokens(first["running"] + drained["running"] + last["running"]) == it.cold(
        PROMPTS[1], "a"
    )
    [answer] = last["unload"]
    assert answer == AdapterUnloaded("unload", resident.device_bytes, resident.host_bytes, 1)
    assert resident.device_bytes == resident.host_bytes > 0
    # The late request goes on when the unload has ended: its adapter is read again.
    assert tokens(last["late"]) == it.cold(PROMPTS[3], "a")
    it.check_idle()


def test_after_an_unload_nothing_is_left_and_a_reload_is_like_a_cold_start(bench) -> None:
    it = bench()
    it.engine.generate([(PROMPTS[0], "a"), (PROMPTS[0], "b")])
    free = it.stats.free_pages
    pages = it.state("a").device_pages
    assert it.unload("a").drained_requests == 0
    assert it.state("a") is None
    assert it.stats.free_pages == free + pages
    assert it.stats.host_cache_bytes == it.state("b").host_bytes
    it.check_answers([(prompt, "a") for prompt in PROMPTS])
    it.check_answers([(PROMPTS[0], "b")])
    assert it.unload("c") == AdapterUnloaded("unload", 0, 0, 0), "it was nowhere"


def test_an_unload_that_times_out_changes_nothing(bench) -> None:
    it = bench()
    it.engine.add("1", PROMPTS[0], "a")
    it.engine.run()
    it.engine.add("1", PROMPTS[0], "a")
    first = it.steps(4)
    it.begin_unload("a", drain_timeout=0.0)
    it.engine.add("2", PROMPTS[1], "a")
    before = it.state("a")
    outputs = it.steps(1)
    [answer] = outputs["unload"]
    assert isinstance(answer, CommandFailed)
    assert answer.error.code == "drain.timeout"
    assert answer.error.details == {"running": 1}
    assert (it.state("a").residency, it.state("a").device_bytes) == ("device", before.device_bytes)
    last = it.engine.run()
    assert tokens(first["1"] + outputs["1"] + last["1"]) == it.cold(PROMPTS[0], "a")
    assert tokens(outputs.get("2", []) + last["2"]) == it.cold(PROMPTS[1], "a")


def test_of_two_unloads_the_one_that_gives_up_does_not_open_the_door(bench) -> None:
    it = bench()
    it.load("a")
    it.engine.add("running", PROMPTS[0], "a", max_tokens=30)
    it.steps(1)
    it.begin_unload("a", 60.0, "patient")
    it.begin_unload("a", 0.0, "hasty")
    it.engine.add("new", PROMPTS[1], "a")
    outputs = it.steps(3)
    assert outputs["hasty"][0].error.code == "drain.timeout"
    assert "new" not in outputs, "the other unload would now wait for this one too"
    last = it.engine.run()
    assert isinstance(last["patient"][0], AdapterUnloaded)
    assert tokens(last["new"]) == it.cold(PROMPTS[1], "a")


def test_unload_waits_for_a_preempted_request_too(bench) -> None:
    """It has answered in part; unloaded under it, the adapter would be read again, or be gone."""
    it = bench(pages=8, max_model_len=96)
    it.load("a")
    it.engine.add("old", PROMPTS[1], None, max_tokens=60)
    it.engine.add("it", PROMPTS[1], "a", max_tokens=40)
    outputs = it.steps(1)
    while not it.stats.waiting:
        for name, more in it.steps(1).items():
            outputs.setdefault(name, []).extend(more)
    assert 0 < len(outputs["it"]) < 40
    it.begin_unload("a")
    last = it.engine.run()
    assert tokens(outputs["it"] + last["it"]) == it.cold(PROMPTS[1], "a", 40)
    assert tokens(outputs["old"] + last["old"]) == it.cold(PROMPTS[1], None, 60)
    assert last["unload"][0].drained_requests == 1
    assert it.state("a") is None


def test_a_pinned_adapter_stays_while_others_come_and_go(bench) -> None:
    it = bench(pages=8, max_model_len=64)
    loaded = it.load("a", pin=True)
    assert (loaded.pages, loaded.bytes) == (2, it.state("a").device_bytes)
    for name in "bcdbcd":
        it.check_answers([(PROMPTS[0], name)])
        assert it.state("a").residency == "device"
    assert it.state("a").pinned
    assert it.load("a").bytes == loaded.bytes
    assert it.state("a").pinned, "a load without `pin` leaves it as it is"
    it.load("a", pin=False)
    it.check_answers([(PROMPTS[2], name) for name in "bcd"], max_tokens=24)
    assert it.state("a").residency == "host"


def test_more_adapters_than_the_slab_holds_take_turns(bench) -> None:
    """Evicted, uploaded again at another place, read again: always the same answer."""
    it = bench(pages=6, max_model_len=48, max_cpu_loras=2)
    order = "abcdabdcacbd"
    for name in order:
        it.check_answers([(PROMPTS[3], name)])
    it.check_answers([(PROMPTS[3], name) for name in order])
    it.check_idle()
    assert sum(state.host_bytes > 0 for state in it.stats.adapters) == 2


def test_an_adapter_larger_than_the_slab_is_refused_while_others_run(
    bench, model, adapters, random_adapter, tmp_path
) -> None:
    big = random_adapter(model, tmp_path / "big", 64, TARGETS)
    it = bench({**adapters, "big": big}, pages=8, max_model_len=96)
    it.engine.add("base", PROMPTS[0], None, max_tokens=60)
    it.core.handle(LoadAdapter("load", it.engine.ref("big")))
    it.engine.add("big", PROMPTS[0], "big")
    it.steps(1)
    it.core.handle(it.engine.built.inbox.get(timeout=10))
    outputs = it.steps(2)
    assert outputs["load"][0].error.code == "memory.no_capacity"
    assert error_of(outputs["big"]) == "memory.no_capacity"
    assert len(tokens(it.engine.run()["base"])) == 60 - 3


def test_an_adapter_that_is_moved_under_its_requests_changes_no_token(
    bench, model, adapters, random_adapter, tmp_path
) -> None:
    """The tables that the kernels read point to where it lies now; its K and V stay in use."""
    wide = random_adapter(model, tmp_path / "wide", 8, TARGETS)
    it = bench({**adapters, "wide": wide}, pages=10, max_model_len=96)
    assert [it.load(name, pin=True).pages for name in "abcd"] == [2] * 4
    it.unload("a")
    it.engine.add("it", PROMPTS[1], "b", max_tokens=12)
    outputs = it.steps(2)
    before = it.core._adapters.get(it.engine.ref("b").digest).first_page
    it.core.handle(LoadAdapter("wide", it.engine.ref("wide")))
    outputs["it"] += it.steps(1)["it"]
    it.core.handle(it.engine.built.inbox.get(timeout=10))
    it.begin_unload("c")
    moving = it.steps(3)
    assert moving["wide"][0].pages == 4
    assert moving["it"][-1].finish_reason is None
    last = it.engine.run()
    assert it.stats.memory.moved_adapters > 0
    assert it.core._adapters.get(it.engine.ref("b").digest).first_page < before
    assert tokens(outputs["it"] + moving["it"] + last["it"]) == it.cold(PROMPTS[1], "b", 12)
    it.check_answers([(PROMPTS[0], name) for name in "bd"])


# --- failures of a step -----------------------------------------------------------------------


def test_a_step_that_raises_fails_its_requests_and_later_ones_work(bench, monkeypatch) -> None:
    it = bench()
    it.engine.generate([(PROMPTS[0], "a")])
    for i, (prompt, adapter) in enumerate([(PROMPTS[0], "a"), (PROMPTS[1], None)]):
        it.engine.add(str(i), prompt, adapter)
    it.steps(2)

    def broken(batch):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(it.core._runner, "run", broken)
        outputs = it.steps(1)
    for i in range(2):
        assert error_of(outputs[str(i)]) == "engine.failed"
        assert "illegal memory access" in outputs[str(i)][-1].error.message
    it.check_idle()
    it.check_answers([(prompt, name) for prompt in PROMPTS for name in ("a", None)])


def test_an_abort_frees_the_pages_of_a_running_request_at_once(bench) -> None:
    it = bench()
    it.engine.generate([(PROMPTS[0], "a")])
    it.engine.add("gone", PROMPTS[2][::-1], "a", max_tokens=60)  # as long, and shares no page
    it.engine.add("stays", PROMPTS[2], "a")
    first = it.steps(2)
    kv_pages = it.stats.kv_pages
    it.core.handle(AbortRequest("gone"))
    it.core.handle(AbortRequest("never seen"))
    assert it.stats.kv_pages == kv_pages // 2
    assert it.state("a").running_requests == 1
    last = it.engine.run()
    assert "gone" not in last
    assert tokens(first["stays"] + last["stays"]) == it.cold(PROMPTS[2], "a")
    it.check_idle()


# --- ends -------------------------------------------------------------------------------------


def end_of(it: Bench, prompt: list[int] = PROMPTS[0], **sampling) -> tuple[list[int], str | None]:
    it.engine.add("1", prompt, None, **sampling)
    outputs = it.engine.run()["1"]
    assert all(output.finish_reason is None for output in outputs[:-1])
    it.check_idle()
    return tokens(outputs), outputs[-1].finish_reason


def test_how_an_answer_ends(bench) -> None:
    it = bench(max_model_len=64)
    cold = it.cold(PROMPTS[0], None)
    assert EOS not in cold
    assert end_of(it, max_tokens=16) == (cold, "length")
    assert end_of(it, max_tokens=1) == (cold[:1], "length")

    stop = next(token for i, token in enumerate(cold) if i >= 4 and token not in cold[:i])
    place = cold.index(stop)
    assert end_of(it, stop_token_ids=(stop, 255)) == (cold[: place + 1], "stop")
    assert end_of(it, stop_token_ids=(stop,), ignore_eos=False) == (cold[: place + 1], "stop")

    always_eos = {"logit_bias": ((EOS, 1000.0),), "max_tokens": 4}
    assert end_of(it, **always_eos, ignore_eos=False) == ([EOS], "stop")
    assert end_of(it, **always_eos, ignore_eos=True) == ([EOS] * 4, "length")
    assert end_of(it, **always_eos, stop_token_ids=(EOS,)) == ([EOS], "stop"), "asked for by id"

    assert len(PROMPTS[2]) == 34
    answer, reason = end_of(it, PROMPTS[2], max_tokens=500)
    assert (len(answer), reason) == (64 - 34, "length"), "the context is full"
    answer, reason = end_of(it, (PROMPTS[2] * 2)[:63], max_tokens=500)
    assert (len(answer), reason) == (1, "length")


# --- what it tells about itself ---------------------------------------------------------------


def test_step_records_and_stats_add_up(bench) -> None:
    it = bench(max_num_batched_tokens=24)
    rows = [(PROMPTS[0], "a"), (PROMPTS[1], None), (PROMPTS[2], "b"), (PROMPTS[3], "a")]
    for i, (prompt, adapter) in enumerate(rows):
        it.engine.add(str(i), prompt, adapter, max_tokens=3 + i)
    outputs = it.engine.run()
    records, stats = list(it.core.records), it.stats
    assert [record.step for record in records] == list(range(1, stats.steps + 1))
    prompt_tokens = sum(len(prompt) for prompt, _ in rows)
    generated = sum(len(tokens(outputs[str(i)])) for i in range(4))
    assert generated == 3 + 4 + 5 + 6
    assert sum(r.prefill_tokens for r in records) == stats.prompt_tokens == prompt_tokens
    assert stats.generated_tokens == generated
    # The last token of an answer is never computed, its first comes with the prompt.
    assert sum(r.decode_tokens for r in records) == generated - 4
    per_adapter: Counter[str] = Counter()
    for record in records:
        assert sum(record.rows.values()) == record.prefill_tokens + record.decode_tokens <= 24
        assert len(set(record.requests)) == len(record.requests)
        assert record.seconds > 0
        per_adapter.update(record.rows)
    assert per_adapter == {
        "default/a@v1": 3 + 6 + 2 + 5,
        "base": 20 + 3,
        "default/b@v1": 34 + 4,
    }
    assert all(a.started_at <= b.started_at for a, b in itertools.pairwise(records))


def test_tokens_that_were_not_generated_are_not_counted(bench) -> None:
    it = bench()
    it.load("a")
    it.poison("a")
    it.engine.add("bad", PROMPTS[0], "a")
    it.engine.add("good", PROMPTS[0], None, max_tokens=5)
    it.engine.run()
    assert it.stats.generated_tokens == 5


def test_pages_and_residency_at_any_moment(bench) -> None:
    it = bench()
    it.load("a")
    it.engine.add("1", PROMPTS[2], "a", max_tokens=4)
    it.engine.add("2", PROMPTS[0], "b", max_tokens=4)
    it.steps(1)
    assert (it.stats.running, it.stats.waiting) == (1, 1)
    loading = it.state("b")
    assert (loading.residency, loading.waiting_requests) == ("loading", 1)
    assert loading.device_bytes == loading.host_bytes == 0
    stats, a = it.stats, it.state("a")
    assert (a.running_requests, a.rank, a.device_pages) == (1, 4, 2)
    assert stats.adapter_pages == 2
    assert stats.kv_pages == 3, "35 tokens at 16 a page"
    assert stats.free_pages == stats.total_pages - 5 == 64 - 5
    assert stats.page_bytes == PAGE
    assert a.host_bytes == a.device_bytes == stats.host_cache_bytes
    it.engine.run()
    assert {s.residency for s in it.stats.adapters} == {"device"}
    it.check_idle()
