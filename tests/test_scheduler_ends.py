"""How requests end in the scheduler: aborts, end tokens, logits not finite, failed steps."""

from __future__ import annotations

import pytest

from lorad.errors import LoradError
from scheduler_bench import EOS, Bench
from scheduler_bench import clock as clock


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
