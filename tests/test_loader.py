"""The loader's thread, and what it reads: packed factors in the serving dtype."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters import weights as weights_module
from lorad.adapters.loader import AdapterLoader, LoadResult
from lorad.adapters.peft_format import adapter_digest, read_adapter
from lorad.adapters.weights import AdapterWeights, read_weights, shared_layout
from lorad.errors import LoradError
from lorad.sizing.adapter_size import AdapterLayout
from lorad.sizing.model_shape import ModelShape, read_config


def ref(name: str) -> AdapterRef:
    return AdapterRef(AdapterName.parse(name), "v1", f"sha256:{name}")


def weights(digest: str) -> AdapterWeights:
    return AdapterWeights(digest, AdapterLayout((), 4, 4, 1), torch.zeros(1))


class Bench:
    """A loader whose reads wait for `gate` when it is closed, and its results in order."""

    def __init__(self, read: Callable[[AdapterRef], AdapterWeights] | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reading: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self.threads: set[int] = set()
        self._inner = read or (lambda ref: weights(ref.digest))
        self.loader = AdapterLoader(self.read, self.done)

    def read(self, ref: AdapterRef) -> AdapterWeights:
        self.reading.put(ref.name.name)
        assert self.gate.wait(10)
        return self._inner(ref)

    def done(self, result: LoadResult) -> None:
        self.threads.add(threading.get_ident())
        self.results.put(result)

    def result(self) -> LoadResult:
        return self.results.get(timeout=10)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(read: Callable[[AdapterRef], AdapterWeights] | None = None) -> Bench:
        made.append(Bench(read))
        made[-1].loader.start()
        return made[-1]

    yield make
    for each in made:
        each.gate.set()
        each.loader.stop()


# --- the thread -------------------------------------------------------------------------------


def test_loads_end_in_the_order_asked_on_one_other_thread(bench) -> None:
    it = bench()
    for name in "cabdc":
        it.loader.load(ref(name))
    results = [it.result() for _ in "cabdc"]
    assert [result.ref for result in results] == [ref(name) for name in "cabdc"]
    assert all(result.weights and result.error is None for result in results)
    assert it.threads != {threading.get_ident()}
    assert len(it.threads) == 1


def test_asking_does_not_wait_for_the_disk(bench) -> None:
    it = bench()
    it.gate.clear()
    started = time.monotonic()
    for name in "ab":
        it.loader.load(ref(name))
    assert time.monotonic() - started < 1
    assert it.reading.get(timeout=10) == "a"
    assert it.results.empty()
    time.sleep(0.05)
    it.gate.set()
    assert it.result().seconds >= 0.05
    assert it.result().ref == ref("b")


def test_a_failure_is_a_result_and_the_next_load_goes_on(bench) -> None:
    def read(ref: AdapterRef) -> AdapterWeights:
        if ref.name.name == "refused":
            raise LoradError("store.digest_mismatch", "other bytes", hint="push it again")
        if ref.name.name == "bug":
            raise KeyError("model.layers.7")
        return weights(ref.digest)

    it = bench(read)
    for name in ("refused", "bug", "fine"):
        it.loader.load(ref(name))
    refused, bug, fine = (it.result() for _ in range(3))
    assert (refused.weights, refused.error.code) == (None, "store.digest_mismatch")
    assert refused.error.hint == "push it again"
    assert (bug.weights, bug.error.code) == (None, "adapter.load_failed")
    assert "default/bug@v1" in bug.error.message
    assert "model.layers.7" in bug.error.message
    assert fine.error is None
    assert fine.weights.digest == "sha256:fine"


def test_stop_finishes_the_load_in_hand_and_drops_the_rest(bench) -> None:
    it = bench()
    it.gate.clear()
    for name in "abc":
        it.loader.load(ref(name))
    assert it.reading.get(timeout=10) == "a"
    stopping = threading.Thread(target=it.loader.stop)
    stopping.start()
    time.sleep(0.02)
    assert stopping.is_alive(), "it did not wait for the load in hand"
    it.gate.set()
    stopping.join(timeout=10)
    assert not stopping.is_alive()
    assert it.result().ref == ref("a")
    assert it.results.empty()
    it.loader.load(ref("late"))
    assert it.reading.empty()
    it.loader.stop()  # twice is once


# --- what is read -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tiny_model, random_adapter, tmp_path_factory) -> tuple[Path, ModelShape]:
    model = tiny_model("qwen2")
    directory = tmp_path_factory.mktemp("adapter")
    patterns = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"v_proj": 5}}
    random_adapter(model, directory, 4, ("q_proj", "v_proj", "down_proj"), **patterns)
    return directory, ModelShape.from_config(read_config(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_are_cast_once_and_the_gaps_are_zero(adapter, dtype: torch.dtype) -> None:
    directory, shape = adapter
    packed = read_weights(directory, "sha256:a", shape, dtype)
    saved = load_file(directory / "adapter_model.safetensors")
    assert packed.data.dtype == dtype
    assert packed.nbytes == packed.layout.nbytes
    assert packed.layout.max_rank == 4
    left = packed.data.clone()
    for layer, projections in enumerate(packed.layout.slices):
        for projection, places in zip(shape.projections, projections, strict=True):
            for part, place in zip(projection.slices, places, strict=True):
                if place.rank == 0:
                    continue
                path = f"base_model.model.model.layers.{layer}.{projection.parent}.{part.leaf}"
                a, b = saved.pop(f"{path}.lora_A.weight"), saved.pop(f"{path}.lora_B.weight")
                assert place.rank == a.shape[0] == (3 if part.leaf == "down_proj" else 4)
                assert place.scaling == {"v_proj": 5 / 4, "down_proj": 8 / 3}.get(part.leaf, 2.0)
                for offset, tensor in ((place.a_offset, a), (place.b_offset, b)):
                    assert offset * dtype.itemsize % 64 == 0
                    got = packed.data[offset : offset + tensor.numel()]
                    assert torch.equal(got, tensor.flatten().to(dtype))
                    left[offset : offset + tensor.numel()] = 0
    assert not saved, "tensors of the file were left out"
    assert not left.any()


def changed(source: Path, target: Path, value: float) -> tuple[Path, str]:
    """A copy of the adapter with one value changed in its last tensor; its name."""
    tensors = load_file(source / "adapter_model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name][-1, -1] = value
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    return target, name


@pytest.mark.parametrize(
    ("value", "dtype", "served"),
    [
        (float("nan"), torch.float32, False),
        (float("-inf"), torch.bfloat16, False),
        (70000.0, torch.float16, False),
        (70000.0, torch.bfloat16, True),
        (3.4e38, torch.float32, True),
    ],
)
def test_what_is_not_finite_when_served_is_refused_by_name(
    adapter, tmp_path, value: float, dtype: torch.dtype, served: bool
) -> None:
    directory, shape = adapter
    copy, name = changed(directory, tmp_path / "copy", value)
    if served:
        assert read_weights(copy, "sha256:a", shape, dtype).data.isfinite().all()
        return
    with pytest.raises(LoradError) as refused:
        read_weights(copy, "sha256:a", shape, dtype)
    assert refused.value.code == "adapter.nonfinite_weights"
    assert refused.value.details == {"tensor": name}
    assert name in refused.value.message


def damage(file: Path, how: str) -> None:
    if how == "gone":
        file.unlink()
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 100)
    else:
        save_file({"other": torch.zeros(2)}, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("gone", "adapter.weights_missing"),
        ("cut", "adapter.weights_corrupt"),
        ("replaced", "adapter.no_module_matched"),
    ],
)
def test_a_file_that_changed_after_its_check_is_an_error(
    adapter, tmp_path, how: str, code: str
) -> None:
    directory, shape = adapter
    copy, _ = changed(directory, tmp_path / "copy", 0.5)
    read_adapter(copy, shape)
    damage(copy / "adapter_model.safetensors", how)
    with pytest.raises(LoradError) as failed:
        read_weights(copy, "sha256:a", shape, torch.float32)
    assert failed.value.code == code


@pytest.mark.parametrize("how", ["gone", "cut", "replaced"])
def test_what_is_read_is_the_file_that_was_checked(adapter, tmp_path, monkeypatch, how: str):
    """Another file under its name changes nothing; of one that was cut no part is served."""
    directory, shape = adapter
    copy, _ = changed(directory, tmp_path / "copy", 0.5)
    whole = read_weights(copy, "sha256:a", shape, torch.float32)

    def pack_later(*arguments):  # called between the check and the first read of a tensor
        damage(copy / "adapter_model.safetensors", how)
        return shared_layout(*arguments)

    monkeypatch.setattr(weights_module, "shared_layout", pack_later)
    if how == "cut":
        with pytest.raises(LoradError) as failed:
            read_weights(copy, "sha256:a", shape, torch.float32)
        assert failed.value.code == "adapter.weights_corrupt"
        return
    again = read_weights(copy, "sha256:a", shape, torch.float32)
    assert torch.equal(again.data, whole.data)


def test_what_is_read_proves_the_digest_it_was_pushed_with(adapter, tmp_path) -> None:
    directory, shape = adapter
    digest = adapter_digest(directory)
    proved = read_weights(directory, digest, shape, torch.float32, verify=True)
    assert torch.equal(proved.data, read_weights(directory, digest, shape, torch.float32).data)
    other, _ = changed(directory, tmp_path / "other", 0.5)
    with pytest.raises(LoradError) as refused:
        read_weights(other, digest, shape, torch.float32, verify=True)
    assert refused.value.code == "store.digest_mismatch"
    assert read_weights(other, adapter_digest(other), shape, torch.float32, verify=True)


def test_adapters_of_one_form_share_their_layout(adapter, tmp_path) -> None:
    """A layout is hundreds of objects: with thousands of adapters it would be memory and time."""
    directory, shape = adapter
    other, _ = changed(directory, tmp_path / "other", 0.5)
    one, two = (read_weights(d, "sha256:a", shape, torch.float32) for d in (directory, other))
    assert one.layout is two.layout
    assert read_weights(directory, "sha256:a", shape, torch.float16).layout is not one.layout
