"""GPUs by the memory a process really sees, and the speed at which an adapter reaches it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lorad.errors import LoradError

GIB = 1024**3
_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": GIB, "tib": 1024**4}
_UNITS |= {"k": 1024, "m": 1024**2, "g": GIB, "t": 1024**4}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """`total_gib` is the capacity CUDA reports, less than the number on the box.

    It varies by some 0.2 GiB with the driver and with ECC; `loractl plan --vram` takes what
    `torch.cuda.get_device_properties(0).total_memory` says on the machine itself.
    """

    name: str
    total_gib: float
    host_link_gb_s: float  # host to device, pinned memory, as measured in practice

    @property
    def total_bytes(self) -> int:
        return int(self.total_gib * GIB)


# PCIe 3, 4 and 5 x16, pinned copies: of 16, 32 and 64 GB/s about 75 to 80 % arrive.
_PCIE3, _PCIE4, _PCIE5 = 12.0, 25.0, 50.0

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16g", 14.56, _PCIE3),
        Gpu("v100-16g", 15.77, _PCIE3),
        Gpu("v100-32g", 31.73, _PCIE3),
        Gpu("a10g-24g", 21.98, _PCIE4),
        Gpu("l4-24g", 21.95, _PCIE4),
        Gpu("rtx3090-24g", 23.67, _PCIE4),
        Gpu("rtx4090-24g", 23.53, _PCIE4),
        Gpu("rtx5090-32g", 31.36, _PCIE5),
        Gpu("a6000-48g", 47.4, _PCIE4),
        Gpu("l40s-48g", 44.40, _PCIE4),
        Gpu("a100-40g", 39.38, _PCIE4),
        Gpu("a100-80g", 79.15, _PCIE4),
        Gpu("h100-80g", 79.10, _PCIE5),
        Gpu("h100-nvl-94g", 93.0, _PCIE5),
        Gpu("gh200-96g", 94.5, 350.0),
        Gpu("h200-141g", 139.80, _PCIE5),
        Gpu("b200-180g", 178.3, _PCIE5),
    )
}
DEFAULT_HOST_LINK_GB_S = _PCIE4


def find_gpu(text: str) -> Gpu:
    """`h100-80g`, or `h200` where only one GPU has that name; raises `usage.invalid`."""
    wanted = text.lower()
    matches = [gpu for name, gpu in GPUS.items() if wanted in (name, name.partition("-")[0])]
    if len(matches) != 1:
        known = ", ".join(gpu.name for gpu in matches) or ", ".join(GPUS)
        raise LoradError(
            "usage.invalid",
            f"--gpu {text!r} is {'ambiguous' if matches else 'not known'}",
            hint=f"use one of {known}, or --vram with its memory",
        )
    return matches[0]


def parse_size(text: str, option: str) -> int:
    """`80GiB`, `2.5G`, `512MiB` or a plain number of bytes; `GB` is 10^9 and `G` is 2^30."""
    found = _SIZE.fullmatch(text)
    unit = found.group(2).lower() if found else ""
    if not found or unit not in _UNITS:
        raise LoradError(
            "usage.invalid",
            f"{option} {text!r} is no amount of memory",
            hint="write it like 80GiB, 512MiB or 80GB",
        )
    return int(float(found.group(1)) * _UNITS[unit])
