"""Which device and dtype a model gets, on machines that are only told of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lorad.engine.device_choice import choose_device, choose_dtype
from lorad.errors import LoradError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A root directory with these files, and a torch that sees CUDA or does not."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*files: str, usable: bool = False, build: str | None = "13.0") -> Path:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.version, "cuda", build)
        return tmp_path

    return make


def test_auto_takes_cuda_if_there_is_one(machine):
    gpu = machine("dev/nvidia0", usable=True)
    assert choose_device("auto", gpu) == choose_device("cuda", gpu) == CUDA
    assert choose_device("cpu", gpu) == CPU


def test_auto_takes_the_cpu_of_a_machine_without_a_gpu(machine):
    assert choose_device("auto", machine("dev/null")) == CPU


def test_cuda_that_is_not_there_is_refused(machine):
    with pytest.raises(LoradError, match="torch sees no CUDA device") as refused:
        choose_device("cuda", machine())
    assert refused.value.code == "config.invalid"


def test_auto_does_not_pass_over_a_gpu_that_cannot_be_used(machine, monkeypatch):
    """Such as one whose /dev/nvidia-uvm is not there yet."""
    root = machine("dev/nvidia0", "dev/nvidiactl", "proc/driver/nvidia/gpus/0000:01:00.0")
    with pytest.raises(LoradError, match=r"an NVIDIA GPU \(/dev/nvidia0\)") as refused:
        choose_device("auto", root)
    assert refused.value.code == "config.invalid"
    assert "nvidia-modprobe" in refused.value.hint
    assert "--device cpu" in refused.value.hint
    assert choose_device("cpu", root) == CPU
    for hidden in ("", "-1", "NoDevFiles", "none"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto", root) == CPU, "who hides it does not want it"


@pytest.mark.parametrize(
    ("file", "build", "told"),
    [
        ("dev/nvidia0", None, "a build without CUDA"),
        ("proc/driver/nvidia/gpus/0000:01:00.0", "13.0", "no /dev/nvidia0"),
    ],
)
def test_a_gpu_that_may_be_left_out_on_purpose_is_told_of(machine, caplog, file, build, told):
    assert choose_device("auto", machine(file, build=build)) == CPU
    assert told in caplog.text


@pytest.mark.parametrize("wanted", ["auto", "bfloat16"])
def test_bfloat16_needs_a_gpu_that_computes_in_it(monkeypatch, wanted):
    config = SimpleNamespace(dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    can = {"bfloat16": True}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: can["bfloat16"])
    assert choose_dtype(wanted, config, CUDA) == torch.bfloat16
    can["bfloat16"] = False
    assert choose_dtype(wanted, config, CPU) == torch.bfloat16
    assert choose_dtype("float16", config, CUDA) == torch.float16
    with pytest.raises(LoradError, match="Tesla T4 does not compute in bfloat16") as refused:
        choose_dtype(wanted, config, CUDA)
    assert refused.value.code == "config.invalid"
    assert "--dtype float16" in refused.value.hint


def test_a_checkpoint_in_another_dtype_is_refused():
    with pytest.raises(LoradError) as refused:
        choose_dtype("auto", SimpleNamespace(dtype="float8_e4m3fn"), CPU)
    assert refused.value.code == "model.unsupported"
