"""The scheduler and adapters: how many in a step, loads, waiting, holds."""

from __future__ import annotations

import itertools

from scheduler_bench import Bench, ref
from scheduler_bench import clock as clock


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
