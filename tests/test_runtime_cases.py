"""Failures of other servers under load, re-created from public bug reports: cases R05 and R06.

R01, R02, R03, R04 and R07 are in test_live_versions.py, R08 in test_memory_engine.py. A `cold`
answer comes from an engine that has served nothing else.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from pathlib import Path

import pytest

from lorad.engine.messages import AdapterUnloaded, LoadAdapter, UnloadAdapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LONG, SHORT = 64, 12
PROMPT = [17, 3, 90, 41, 5]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama3-rope")


@pytest.fixture(scope="module")
def adapters(model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cases")
    four = {
        name: random_adapter(model, root / name, 8, ("q_proj", "v_proj"), seed=seed)
        for seed, name in enumerate("abcd")
    }
    big = random_adapter(model, root / "big", 16, ALL, seed=7)
    small = random_adapter(model, root / "small", 4, ("down_proj", "q_proj"), seed=8)
    return {**four, "big": big, "small": small}


@pytest.fixture
def build(model, adapters, sync_engine):
    return lambda **options: sync_engine(model, adapters, **options)


@pytest.fixture
def cold(build):
    def answer(adapter: str | None, count: int = SHORT) -> list[int]:
        return build().generate([(PROMPT, adapter)], max_tokens=count)[0]

    return answer


def command(engine, message) -> object:
    engine.built.engine.handle(message)
    return engine.run()[message.command_id][0]


def drive(engine) -> tuple[dict[str, list[int]], list[str]]:
    """Until all requests have ended: their tokens by request, and the order of the ends."""
    core = engine.built.engine
    tokens: dict[str, list[int]] = {}
    ends: list[str] = []
    while core.step() or core.waits:
        with suppress(queue.Empty):
            core.handle(engine.built.inbox.get_nowait())
        for output in core.take_outputs():
            if (name := getattr(output, "request_id", None)) is None:
                continue
            assert output.error is None, output.error
            tokens.setdefault(name, []).append(output.token_id)
            ends += [name] * (output.finish_reason is not None)
    return tokens, ends


def test_more_adapters_than_slots(build, cold) -> None:
    """R05: two long answers fill both slots; nothing but c and d waits for one, nothing is lost."""
    engine = build(max_loras=2)
    for name in "abcd":
        command(engine, LoadAdapter(name, engine.ref(name)))
    for name in "ab":
        engine.add(f"long {name}", PROMPT, name, max_tokens=LONG)
    for _ in range(3):
        engine.built.engine.step()
    for name in ("c", "d", None, "a"):
        engine.add(f"short {name}", PROMPT, name, max_tokens=SHORT)
    engine.built.engine.handle(UnloadAdapter("unload", engine.ref("d"), 60))
    engine.built.engine.handle(LoadAdapter("reload", engine.ref("d")))
    tokens, ends = drive(engine)
    assert tokens == {
        **{f"long {name}": cold(name, LONG) for name in "ab"},
        **{f"short {name}": cold(name) for name in ("c", "d", None, "a")},
    }
    assert set(ends[:2]) == {"short None", "short a"}
    assert set(ends[2:4]) == {"long a", "long b"}
    steps = [set(record.rows) - {"base"} for record in engine.built.engine.records]
    assert max(map(len, steps)) == 2


def test_a_smaller_adapter_in_the_place_of_a_larger_one(build, cold) -> None:
    """R06: rank 4 on two modules where rank 16 on all has been; nothing of the old one is left."""
    engine = build(max_loras=1, max_lora_rank=16)
    core = engine.built.engine
    assert engine.generate([(PROMPT, "big")], max_tokens=SHORT) == [cold("big")]
    had = core._adapters.get(engine.ref("big").digest)
    gone = command(engine, UnloadAdapter("unload", engine.ref("big"), 60))
    assert isinstance(gone, AdapterUnloaded)
    assert gone.freed_device_bytes == had.layout.nbytes
    command(engine, LoadAdapter("load", engine.ref("small")))
    assert core._adapters.get(engine.ref("small").digest).first_page == had.first_page
    assert engine.generate([(PROMPT, "small")], max_tokens=SHORT) == [cold("small")]


def test_mixed_ranks_and_the_base_in_one_batch(build, cold) -> None:
    """R06: rows of the base model get no delta, those of a small rank only their own."""
    engine = build(max_loras=2)
    names = ["big", "small", None]
    for name in names[:2]:
        command(engine, LoadAdapter(name, engine.ref(name)))
    answers = engine.generate([(PROMPT, name) for name in names], max_tokens=SHORT)
    assert answers == [cold(name) for name in names]
    assert len({tuple(answer) for answer in answers}) == 3
    rows = {"default/big@v1": 1, "default/small@v1": 1, "base": 1}
    assert sum(r.rows == rows for r in engine.built.engine.records) == SHORT - 1
