"""Write an adapter again with fewer ranks, as a directory that PEFT loads.

Imports numpy: nothing that runs at start-up may import this module.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lorad.adapters.lora_modules import LoraModule
from lorad.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, ByteSource, PeftAdapter
from lorad.adapters.spectrum import Matrix, ModuleStats, truncate
from lorad.errors import LoradError

_ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class ResizedModule:
    """One module of the new adapter. `kept` is the share of the delta's squared norm in it."""

    path: str
    rank: int
    alpha: float
    kept: float


def ranks_at_most(adapter: PeftAdapter, rank: int) -> dict[str, int]:
    """`rank` for every module, or less where its own is less or its delta cannot have more."""
    return {
        module.path: min(rank, module.rank, module.b.shape[0], module.a.shape[1])
        for module in adapter.modules
    }


def ranks_for_energy(stats: Sequence[ModuleStats], energy: float) -> dict[str, int]:
    """The least rank of each module that keeps `energy` (0..1) of its delta's squared norm."""
    return {one.module.path: max(1, one.effective_rank(energy)) for one in stats}


def resize_adapter(
    adapter: PeftAdapter, source: ByteSource, ranks: Mapping[str, int], out: Path
) -> list[ResizedModule]:
    """Write `adapter` to the new directory `out`, with `ranks` by module path.

    A module whose rank stays is copied bit for bit. The others are the best approximation of that
    rank; their scaling is folded into the factors, in the dtypes they had. The directory appears
    complete or not at all. Raises `usage.invalid` when `out` exists, `path.permission` when it
    cannot be written.
    """
    if out.exists():
        raise LoradError(
            "usage.invalid",
            f"{out} exists already",
            hint="give a directory that does not exist; nothing is overwritten",
            details={"path": str(out)},
        )
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise LoradError(
            "path.permission",
            f"cannot write in {out.parent}: {error.strerror}",
            hint="give -o a directory whose parent exists and can be written",
            details={"path": str(out)},
        ) from None
    try:
        resized = _write_files(adapter, source, ranks, staging)
        staging.chmod(0o755)
        staging.rename(out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return resized


def _write_files(
    adapter: PeftAdapter, source: ByteSource, ranks: Mapping[str, int], directory: Path
) -> list[ResizedModule]:
    with (directory / WEIGHTS_FILE).open("xb") as file:
        file.write(_header(adapter.modules, ranks))
        rslora = bool(adapter.config.get("use_rslora"))
        resized = [
            _write_module(file, module, source, ranks[module.path], rslora)
            for module in adapter.modules
        ]
        file.flush()
        os.fsync(file.fileno())
    config = new_config(adapter, resized)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return resized


def _header(modules: Sequence[LoraModule], ranks: Mapping[str, int]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for module in modules:
        rank = ranks[module.path]
        shapes = ([rank, module.a.shape[1]], [module.b.shape[0], rank])
        for part, entry, shape in zip("AB", (module.a, module.b), shapes, strict=True):
            end = position + math.prod(shape) * _ITEMSIZE[entry.dtype]
            entries[f"base_model.model.{module.trained_path}.lora_{part}.weight"] = {
                "dtype": entry.dtype,
                "shape": shape,
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_module(
    file: BinaryIO, module: LoraModule, source: ByteSource, rank: int, rslora: bool
) -> ResizedModule:
    if rank == module.rank:
        for entry in (module.a, module.b):
            file.write(source.read_at(entry.start, entry.nbytes))
        return ResizedModule(module.path, rank, module.alpha, 1.0)
    smaller = truncate(module, source, rank)
    file.write(_encoded(smaller.a, module.a.dtype))
    file.write(_encoded(smaller.b, module.b.dtype))
    # The scaling is in the factors: alpha is what makes it 1.
    return ResizedModule(module.path, rank, math.sqrt(rank) if rslora else rank, smaller.kept)


def _encoded(values: Matrix, dtype: str) -> bytes:
    """Little-endian bytes, rounded to nearest even."""
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    single = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "F32":
        return single.tobytes()
    bits = single.view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def new_config(adapter: PeftAdapter, resized: Sequence[ResizedModule]) -> dict[str, Any]:
    """The old config with the new ranks; a module that differs from most is in the patterns."""
    (rank, alpha), _ = Counter((one.rank, one.alpha) for one in resized).most_common(1)[0]
    names = {module.path: module.trained_path for module in adapter.modules}
    return {
        **adapter.config,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "rank_pattern": {names[one.path]: one.rank for one in resized if one.rank != rank},
        "alpha_pattern": {
            names[one.path]: _plain(one.alpha) for one in resized if one.alpha != alpha
        },
    }


def _plain(alpha: float) -> float | int:
    """16.0 as 16, which is how PEFT writes it."""
    return int(alpha) if float(alpha).is_integer() else alpha
