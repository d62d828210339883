"""The self-test's comparison: what the engine adds for an adapter, and what its files say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import uvicorn

from lorad.adapter_ref import AdapterName
from lorad.adapters.spectrum import read_checked
from lorad.adapters.weights import read_weights
from lorad.admin_client import AdminClient
from lorad.engine.async_engine import AsyncEngine
from lorad.engine.build import EngineOptions, build_engine
from lorad.engine.messages import AdapterProbed, CommandFailed, ProbeAdapter
from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer
from lorad.registry.records import Who
from lorad.registry.registry import Registry
from lorad.server.admin import build_admin_app
from lorad.server.admin_transport import admin_server_config
from lorad.server.canary_watch import CanaryWatch
from lorad.server.self_test import SelfTest
from lorad.server.traffic import Traffic
from lorad.sizing.model_shape import ModelShape, read_config
from lorad.sockets import AdminSocket

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = (17, 3, 90, 5, 200, 44, 8, 8, 61, 150, 33, 9)
KINDS = {
    "all": (4, ALL, {}),
    "q-only": (1, ("q_proj",), {}),
    "mlp-only": (16, ("gate_proj", "up_proj", "down_proj"), {}),
    "rslora": (8, ("k_proj", "o_proj"), {"use_rslora": True}),
    "patterns": (
        5,
        ALL,
        {
            "rank_pattern": {"layers.1.self_attn.q_proj": 3, "v_proj": 32, "up_proj": 1},
            "alpha_pattern": {"v_proj": 7, "layers.0.mlp.down_proj": 100},
        },
    ),
}
# The largest relative error that is no fault, by a wide margin; the check itself is sharper.
ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def adapters(model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: random_adapter(model, root / name, rank, targets, seed=seed, **config)
        for seed, (name, (rank, targets, config)) in enumerate(KINDS.items())
    }


@pytest.fixture
def engine(model, adapters, sync_engine):
    return lambda dtype, **options: sync_engine(model, adapters, dtype=dtype, **options)


def probe(engine, adapter: str, command: str = "probe") -> AdapterProbed | CommandFailed:
    core = engine.built.engine
    core.handle(ProbeAdapter(command, engine.ref(adapter), PROMPT))
    while True:
        core.step()
        for output in core.take_outputs():
            if getattr(output, "command_id", None) == command:
                return output
        core.handle(engine.built.inbox.get(timeout=10))


def resident(engine, adapter: str):
    found = engine.built.engine._adapters.get(engine.ref(adapter).digest)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_kind_of_adapter_is_served_as_its_files_say(engine, adapters, dtype) -> None:
    tested = engine(dtype)
    for name in adapters:
        answer = probe(tested, name)
        assert isinstance(answer, AdapterProbed), answer
        _, targets, _ = KINDS[name]
        assert answer.modules == 2 * len(targets)
        assert 0 < answer.error < ROUNDING[dtype]


def test_a_probe_leaves_nothing_behind(engine) -> None:
    tested = engine("float32")
    core = tested.built.engine
    rows = [(list(PROMPT) * 3, "all"), ([7, 7, 7], None)]
    expected = tested.generate(rows)

    def books() -> list[object]:
        stats = core.stats()
        seconds = stats.memory.load_seconds
        memory = replace(stats.memory, load_seconds=None)
        kept = (core._pool.owners(), len(core._scheduler._kv._prefixes._by_key))
        return [replace(stats, memory=memory), seconds.counts, kept, list(core.records)]

    before, kv = books(), core._slab.data.clone()
    assert probe(tested, "all").modules == 14
    assert books() == before
    assert torch.equal(core._slab.data.view(torch.int32), kv.view(torch.int32))
    assert tested.generate(rows) == expected


def test_a_probe_beside_running_requests_changes_no_token(engine) -> None:
    tested = engine("float32")
    rows = [([5, 6, 7], "patterns"), ([9, 9], None), ([4, 4, 4, 4], "all")]
    expected = tested.generate(rows)
    for i, (prompt, adapter) in enumerate(rows):
        tested.add(str(i), prompt, adapter)
    for _ in range(5):
        tested.built.engine.step()
    said = {str(i): expected[i][:5] for i in range(3)}
    for output in tested.built.engine.take_outputs():
        assert output.token_id == said[output.request_id].pop(0)
    tested.built.engine.handle(ProbeAdapter("probe", tested.ref("q-only"), PROMPT))
    rest = tested.run()
    assert [[o.token_id for o in rest[str(i)]] for i in range(3)] == [e[5:] for e in expected]


def test_only_one_probe_a_step(engine) -> None:
    tested = engine("float32")
    core = tested.built.engine
    names = ["all", "patterns", "q-only"]
    for name in names:
        assert isinstance(probe(tested, name), AdapterProbed)
    calls = []
    real = core._runner.probe
    core._runner.probe = lambda *args: calls.append(args) or real(*args)
    for name in names:
        core.handle(ProbeAdapter(name, tested.ref(name), PROMPT))
    for done in (1, 2, 3):
        core.step()
        assert len(calls) == done
    answers = {tested.built.inbox.get(timeout=10).command_id for _ in names}
    assert answers == set(names)


# --- faults ---------------------------------------------------------------------------------


def change_element(slab, adapter) -> None:
    """One number in B of layer 1's v_proj."""
    slab[adapter.factors[1][0][2].b_offset + 5] += 1.0


def swap_slices(slab, adapter) -> None:
    """A and B of k_proj and v_proj, which have the same shapes."""
    _, k, v = adapter.factors[0][0]
    for one, other, count in (
        (k.a_offset, v.a_offset, k.rank * 64),
        (k.b_offset, v.b_offset, k.rank * 32),
    ):
        kept = slab[one : one + count].clone()
        slab[one : one + count] = slab[other : other + count]
        slab[other : other + count] = kept


def altered(adapter, layer: int, projection: int, part: int, **fields) -> None:
    """Another entry in the table of offsets, as a wrong layout would make it."""
    factors = [[list(p) for p in row] for row in adapter.factors]
    place = factors[layer][projection]
    place[part] = replace(place[part], **fields)
    adapter._factors = tuple(tuple(map(tuple, row)) for row in factors)


def scale(slab, adapter) -> None:
    altered(adapter, 1, 3, 0, scaling=1.8)


def shift_a(slab, adapter) -> None:
    place = adapter.factors[1][2][1]
    altered(adapter, 1, 2, 1, a_offset=place.a_offset + 1)


def forget(slab, adapter) -> None:
    altered(adapter, 0, 1, 0, rank=0)


def poison(slab, adapter) -> None:
    slab[adapter.factors[0][2][0].b_offset] = torch.nan


FAULTS = {
    change_element: "layers.1.self_attn.v_proj",
    swap_slices: "layers.0.self_attn.k_proj",
    scale: "layers.1.mlp.down_proj",
    shift_a: "layers.1.mlp.up_proj",
    forget: "layers.0.self_attn.o_proj",
    poison: "layers.0.mlp.gate_proj",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_on_the_device_is_found_and_named(engine, dtype) -> None:
    for fault, module in FAULTS.items():
        tested = engine(dtype)
        assert isinstance(probe(tested, "all"), AdapterProbed)
        fault(tested.built.engine._slab.data, resident(tested, "all"))
        answer = probe(tested, "all")
        assert isinstance(answer, CommandFailed), fault
        assert answer.error.code == "selftest.failed"
        assert answer.error.details["module"] == f"model.{module}", fault
        assert module in answer.error.message
        assert "device" in answer.error.hint


@pytest.mark.parametrize("rows", ["short", "long"])
def test_a_kernel_that_does_nothing_is_found_on_either_path(engine, monkeypatch, rows) -> None:
    """That of decodes and short prompts, and that of long ones, on any processor."""
    paths = {
        "short": ["cpu_lora.add_chunks"],
        "long": ["torch_paths.add_segment", "cpu_sgmv.add_long"],
    }[rows]
    tested = engine("bfloat16")
    for path in paths:
        monkeypatch.setattr(f"lorad_kernels.{path}", lambda *_: None)
    answer = probe(tested, "mlp-only")
    assert answer.error.code == "selftest.failed"
    assert answer.error.details["module"] == "model.layers.0.mlp.gate_proj"


def test_a_delta_where_the_files_have_none_is_found(engine) -> None:
    tested = engine("float32")
    probe(tested, "q-only")
    adapter = resident(tested, "q-only")
    q = adapter.factors[1][0][0]
    altered(adapter, 1, 0, 1, rank=1, scaling=1.0, a_offset=q.a_offset, b_offset=q.b_offset)
    answer = probe(tested, "q-only")
    assert "layers.1.self_attn.k_proj" in answer.error.message
    assert "no factors" in answer.error.message


def test_a_probe_that_raises_fails_itself_alone(engine, monkeypatch) -> None:
    tested = engine("float32")

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tested.built.engine._runner, "probe", broken)
    answer = probe(tested, "all")
    assert (answer.error.code, answer.command_id) == ("engine.failed", "probe")
    assert tested.generate([([1, 2, 3], "all")], max_tokens=2)[0]


def test_files_that_vanished_are_told(engine, adapters, monkeypatch, tmp_path) -> None:
    tested = engine("float32")
    assert isinstance(probe(tested, "all"), AdapterProbed)
    monkeypatch.setitem(adapters, "all", tmp_path / "nowhere")
    assert probe(tested, "all").error.code == "path.not_found"


# --- end to end -----------------------------------------------------------------------------


@asynccontextmanager
async def admin_socket(registry, engine, self_test, path: Path) -> AsyncIterator[AdminClient]:
    """The admin API over a registry and an engine of this process."""
    traffic = Traffic(engine, registry.find, CanaryWatch(lambda *_: None))
    with AdminSocket(path) as admin:
        app = build_admin_app(
            registry, engine, traffic, config={}, shutdown=lambda: None, self_test=self_test
        )
        server = uvicorn.Server(admin_server_config(app))
        server.capture_signals = nullcontext
        serving = asyncio.create_task(server.serve(sockets=[admin.socket]))
        try:
            yield AdminClient(path)
        finally:
            server.should_exit = True
            await serving


def test_a_version_that_lies_wrong_on_the_device_is_not_promoted(
    tiny_chat_model, adapters, sync_engine, tmp_path
) -> None:
    """The old version stays live; once the new one has been read anew it is promoted."""
    shape = ModelShape.from_config(read_config(tiny_chat_model))
    registry = Registry.open(tmp_path / "state", "tiny", partial(read_checked, shape=shape))
    name = AdapterName.parse("cats")
    refs = [registry.push(adapters[k], name, who=Who(0, 0)).version.ref for k in ("all", "rslora")]

    def read(ref, shape, dtype):
        return read_weights(registry.verify(ref), ref.digest, shape, dtype)

    options = EngineOptions(tiny_chat_model, device="cpu", slab_bytes=2**24)
    built = build_engine(options, read, frozenset(), adapter_files=registry.verify)
    tokenizer = Tokenizer.from_dir(tiny_chat_model)
    engine = AsyncEngine(built.engine, built.inbox, tokenizer, max_queued=100)

    async def scenario() -> None:
        await engine.start()
        self_test = SelfTest(engine, tokenizer, None)
        async with admin_socket(registry, engine, self_test, tmp_path / "s") as admin:
            moved = await asyncio.to_thread(admin.promote, "cats", "v1")
            assert moved["self_test"]["delta_error"] < ROUNDING["float32"]
            await engine.load_adapter(refs[1])
            adapter = built.engine._adapters.get(refs[1].digest)
            built.engine._slab.data[adapter.factors[1][1][0].b_offset + 7] += 0.5
            with pytest.raises(LoradError) as caught:
                await asyncio.to_thread(admin.promote, "cats", "v2")
            assert caught.value.code == "selftest.failed"
            assert "cats@v2" in caught.value.message
            assert caught.value.details["module"] == "model.layers.1.self_attn.o_proj"
            assert caught.value.details["error"] > caught.value.details["allowed"]
            assert (await asyncio.to_thread(admin.adapter, "cats"))["live"] == "v1"
            await engine.unload_adapter(refs[1], drain_timeout=5)
            moved = await asyncio.to_thread(admin.promote, "cats", "v2")
            assert (moved["to_version"], moved["self_test"]["prompts"]) == ("v2", 5)
        await engine.stop()

    try:
        asyncio.run(scenario())
    finally:
        built.loader.stop()
        registry.close()
