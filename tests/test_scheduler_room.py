"""The scheduler when pages run out: preemption, eviction, and what never fits."""

from __future__ import annotations

import itertools

import pytest

from scheduler_bench import Bench, ref
from scheduler_bench import clock as clock


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
