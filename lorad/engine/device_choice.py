"""Where a model is served and in which dtype: what was asked for, against what the machine can."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch

from lorad.errors import LoradError
from lorad.model.config import ModelConfig

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_A_DEVICE = re.compile(r"\d|GPU-|MIG-")  # how an entry of CUDA_VISIBLE_DEVICES begins


def choose_device(wanted: str, root: Path = Path("/")) -> torch.device:
    """`auto` is CUDA if there is one, and never a CPU because a GPU cannot be used.

    `root` is for tests. Raises `config.invalid`.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if wanted == "cuda":
        raise LoradError(
            "config.invalid",
            "--device cuda was asked for, but torch sees no CUDA device",
            hint="check nvidia-smi and that torch is a CUDA build, or use --device cpu",
        )
    if wanted == "auto":
        _check_no_gpu_is_left_out(root)
    return torch.device("cpu")


def _check_no_gpu_is_left_out(root: Path) -> None:
    """A service that comes up before the driver does would run a hundred times slower, silently."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _A_DEVICE.match(visible):  # empty, -1, NoDevFiles, none
        return
    nodes = sorted(node.name for node in (root / "dev").glob("nvidia[0-9]*"))
    if nodes and torch.version.cuda is not None:
        raise LoradError(
            "config.invalid",
            f"there is an NVIDIA GPU (/dev/{nodes[0]}), but torch sees no CUDA device",
            hint="check nvidia-smi, and that /dev/nvidia-uvm is there and may be opened "
            "(nvidia-modprobe -u makes it); --device cpu serves without the GPU",
        )
    if nodes:
        log.warning(
            "there is an NVIDIA GPU, but this torch is a build without CUDA: serving on CPU"
        )
    elif any((root / "proc/driver/nvidia/gpus").glob("*")):
        # In a container that was given no GPU this is as it should be.
        log.warning("the NVIDIA driver has a GPU, but there is no /dev/nvidia0: serving on the CPU")


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Raises `model.unsupported`, and `config.invalid` for what the GPU cannot compute in."""
    name = config.dtype if wanted == "auto" else wanted
    if name not in DTYPES:
        raise LoradError(
            "model.unsupported",
            f"the checkpoint's dtype is {name}",
            hint="serve it with --dtype bfloat16",
        )
    if name == "bfloat16" and device.type == "cuda" and not _computes_in_bfloat16():
        raise LoradError(
            "config.invalid",
            f"{torch.cuda.get_device_name(device)} does not compute in bfloat16",
            hint="serve it with --dtype float16, if the model's values stay below 65504, or with "
            "--dtype float32",
        )
    return DTYPES[name]


def _computes_in_bfloat16() -> bool:
    """Emulated, as GPUs before compute capability 8 do it, is not enough for the kernels."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
