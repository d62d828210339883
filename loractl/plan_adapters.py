"""The adapters of `loractl plan --adapters`, as `inspect` and the daemon read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from lorad.adapters.peft_format import ByteSource, PeftAdapter, open_adapter
from lorad.sizing.architecture import Architecture
from lorad.sizing.fleet import AdapterKind, kind_of_modules
from lorad.sizing.lints import HIGH_RANK
from lorad.sizing.model_shape import ModelShape

_ENERGY = 0.99  # of a delta's squared norm, that the needed rank must keep


def adapter_kinds(
    paths: Iterable[Path],
    arch: Architecture,
    shape: ModelShape | None,
    tp: int,
    *,
    spectrum: bool,
) -> list[AdapterKind]:
    """One kind per adapter; a directory may hold several. Raises what `read_adapter` raises.

    `shape` None reads adapters of families that the engine does not serve, unchecked against
    the base's widths. With `spectrum`, adapters of a high rank are read in full.
    """
    found = [found for path in paths for found in _adapter_dirs(path.expanduser())]
    return [_read_kind(path, arch, shape, tp, spectrum) for path in found]


def _adapter_dirs(path: Path) -> list[Path]:
    """The directory itself, or the adapters in it."""
    if not path.is_dir() or (path / "adapter_config.json").exists():
        return [path]
    inside = sorted(child.parent for child in path.glob("*/adapter_config.json"))
    return inside or [path]


def _read_kind(
    path: Path, arch: Architecture, shape: ModelShape | None, tp: int, spectrum: bool
) -> AdapterKind:
    with open_adapter(path, shape) as (adapter, weights):
        kind = kind_of_modules(arch, path.name, _ranks(adapter, shape), tp)
        if spectrum and kind.rank >= HIGH_RANK:
            needed = _needed_ranks(adapter, weights)
            kind = replace(kind, needed=kind_of_modules(arch, path.name, needed, tp))
    return kind


def _ranks(adapter: PeftAdapter, shape: ModelShape | None) -> dict[str, int]:
    """As the daemon packs them, where it serves the family; else as the file holds them."""
    if shape is None:
        return _plain({module.path: module.rank for module in adapter.modules})
    return _plain({path: found.rank for path, found in adapter.module_ranks().items()})


def _needed_ranks(adapter: PeftAdapter, weights: ByteSource) -> dict[str, int]:
    from lorad.adapters.spectrum import measure

    stats, _ = measure(adapter.modules, weights, spectrum=True)
    return _plain({one.module.path: max(1, one.effective_rank(_ENERGY)) for one in stats})


def _plain(ranks: Mapping[str, int]) -> dict[str, int]:
    return {path.removeprefix("model."): rank for path, rank in ranks.items()}
