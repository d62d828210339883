"""The scheduler's budgets of tokens and sequences; who goes first; equal prompts."""

from __future__ import annotations

from scheduler_bench import BLOCK, Bench
from scheduler_bench import clock as clock


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
