"""Copies into the slab: at once on a CPU, layer by layer on a stream of their own on CUDA."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lorad.engine.messages import LoadAdapter
from lorad.memory.pinned_arena import cuda_arena
from lorad.memory.upload import Upload, Uploader, layer_ends
from lorad.sizing.adapter_size import AdapterLayout, ModuleRank, pack_adapter
from lorad.sizing.model_shape import ModelShape, read_config

QV = ("q_proj", "v_proj")


class LateUpload(Upload):
    """A copy of which each layer gets there when somebody waits for it, the first at once.

    What reads a layer without having waited finds NaN there.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor, layout: AdapterLayout) -> None:
        super().__init__(source)
        self._target, self._all, self.waited = target, source, []
        self._parts = list(pairwise([0, *layer_ends(layout, source.numel())]))
        target.fill_(torch.nan)
        self._copy(0)

    begun = True

    @property
    def done(self) -> bool:
        return len(self._parts) - 1 in self.waited or -1 in self.waited

    def order_after(self, layer: int) -> None:
        if not self.done:
            self._copy(*range(len(self._parts)) if layer < 0 else [layer])
        self.waited.append(layer)

    def _copy(self, *layers: int) -> None:
        for start, end in (self._parts[layer] for layer in layers):
            self._target[start:end] = self._all[start:end]


@pytest.fixture
def late(monkeypatch) -> list[LateUpload]:
    """All copies, which are late ones now."""
    copies = []

    def start(_, target, source, layout):
        copies.append(LateUpload(target, source, layout))
        return copies[-1]

    monkeypatch.setattr(Uploader, "start", start)
    return copies


def one_layer(elements: int) -> AdapterLayout:
    return AdapterLayout(((),), 4 * elements, 4 * elements, 0)


def test_on_a_cpu_a_copy_is_done_when_it_returns():
    source, slab = torch.arange(8.0), torch.zeros(16)
    upload = Uploader(slab.device).start(slab[4:12], source, one_layer(8))
    assert upload.begun
    assert upload.done
    upload.order_after(0)
    assert torch.equal(slab[4:12], source)
    assert float(slab.sum()) == float(source.sum())


def test_layers_follow_one_another_and_cover_everything(tiny_model):
    shape = ModelShape.from_config(read_config(tiny_model("llama")))
    last = shape.num_layers - 1
    modules = {
        shape.module_path(layer, leaf): ModuleRank(3, 1.0)
        for layer, leaf in ((0, "q_proj"), (0, "down_proj"), (last, "v_proj"))
    }
    layout = pack_adapter(shape, modules, 4)
    elements = layout.nbytes // 4
    ends = layer_ends(layout, elements)
    assert len(ends) == shape.num_layers
    assert ends[-1] == elements
    assert ends[last - 1] == layout.slices[last][0][2].a_offset
    for layer, (start, end) in enumerate(pairwise([0, *ends])):
        for part in (part for projection in layout.slices[layer] for part in projection):
            assert part.rank == 0 or start <= part.a_offset < part.b_offset < end
    untouched = pack_adapter(shape, {shape.module_path(last, "q_proj"): ModuleRank(3, 1.0)}, 4)
    assert layer_ends(untouched, 100)[:last] == [0] * last


def test_a_prefill_starts_with_the_first_layer_and_waits_for_each(
    late, tiny_model, random_adapter, sync_engine, tmp_path
):
    model = tiny_model("llama")
    paths = {
        name: random_adapter(model, tmp_path / name, 8, targets, seed=seed)
        for seed, (name, targets) in enumerate({"a": QV, "b": ("down_proj",)}.items())
    }
    rows = [([5, 6, 7, 8], "a"), ([9, 10], "b"), ([5, 6], None)]
    engine = sync_engine(model, paths)
    got = engine.generate(rows, max_tokens=6)
    layers = engine.built.engine._runner._eager._decoder.config.shape.num_layers
    assert [copy.waited[:layers] for copy in late] == [list(range(layers))] * 2
    assert all(torch.equal(copy._target, copy._all) for copy in late)
    late.clear()
    again = sync_engine(model, paths)
    again.generate([([1], "a"), ([1], "b")], max_tokens=1)
    assert again.generate(rows, max_tokens=6) == got, "all layers were there"


def test_a_command_waits_for_the_whole_adapter(
    late, tiny_model, random_adapter, sync_engine, tmp_path
):
    model = tiny_model("llama")
    engine = sync_engine(model, {"a": random_adapter(model, tmp_path / "a", 8, QV)})
    core = engine.built.engine
    core.handle(LoadAdapter("load", engine.ref("a")))
    while not late:
        core.step()
        if not core.take_outputs() and not late:
            core.handle(engine.built.inbox.get(timeout=10))
    core.step()
    assert core.take_outputs() == []
    late[0].order_after(-1)
    core.step()
    assert [output.command_id for output in core.take_outputs()] == ["load"]


class Event:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def test_an_upload_goes_by_its_events(monkeypatch):
    events, waits = [Event(), Event()], []
    stream = type("Stream", (), {"wait_event": lambda _, event: waits.append(event)})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    upload = Upload(torch.zeros(1), events)
    assert (upload.begun, upload.done) == (False, False)
    events[0].reached = True
    assert (upload.begun, upload.done) == (True, False)
    upload.order_after(1)
    upload.order_after(-1)
    assert waits == [events[1], events[1]]
    events[1].reached = True
    assert (upload.begun, upload.done) == (True, True)
    upload.order_after(1)
    assert len(waits) == 2


class Cuda:
    """Streams on which nothing is ever waited for, and events that a test reaches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", self._event)

    def _event(self) -> Event:
        self.events.append(Event())
        self.events[-1].record = lambda stream: None
        return self.events[-1]


def test_a_source_is_held_until_it_has_been_copied_whoever_else_lets_it_go(monkeypatch):
    """An adapter may be evicted while it arrives: its memory must not be another's yet."""
    cuda, gone = Cuda(monkeypatch), []
    uploader = Uploader(torch.device("cuda"))
    for number in range(3):
        array = np.ones(8, dtype=np.float32)
        weakref.finalize(array, gone.append, number)
        uploader.start(torch.zeros(8), torch.from_numpy(array), one_layer(8))
        del array
    assert gone == []
    cuda.events[1].reached = True
    uploader.start(torch.zeros(8), torch.ones(8), one_layer(8))
    assert gone == [1]
    cuda.events[0].reached = cuda.events[2].reached = True
    uploader.start(torch.zeros(8), torch.ones(8), one_layer(8))
    assert sorted(gone) == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_follows_the_work_before_and_can_be_waited_for_without_the_host():
    device = torch.device("cuda")
    slab = torch.zeros(2**22, device=device)
    arena = cuda_arena(2**25, max_adapters=2, largest=2**24)
    assert arena.nbytes >= 2**25
    source = arena.keep(torch.ones(2**22))
    assert source.is_pinned()
    uploader = Uploader(device)
    float(slab.sum())  # its first use loads the kernel, which takes longer than the wait below
    torch.cuda._sleep(10**9)
    before = slab.sum()  # must read what was there before the copy
    upload = uploader.start(slab, source, one_layer(2**22))
    assert not upload.done
    upload.order_after(0)
    after = slab.sum()
    assert (float(before), float(after)) == (0.0, float(2**22))
    assert upload.done
