"""PEFT's adapter directories: read from the two headers alone, and checked to the last tensor.

The invariant: every tensor in the file is applied exactly or named in an error, and every
config key is served, known to change nothing, or refused. `loractl inspect`, `push` and the
daemon all read adapters here, so none of them can be told something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lorad.adapters import adapter_files
from lorad.adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from lorad.adapters.lora_modules import FUSED_LEAVES, Finding, LoraModule, collect_modules
from lorad.adapters.peft_config import LoraSettings, load_config, read_settings
from lorad.adapters.safetensors_header import TensorEntry, parse_header
from lorad.errors import LoradError
from lorad.sizing.adapter_size import ModuleRank
from lorad.sizing.model_shape import ModelShape

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "Finding",
    "LoraModule",
    "PeftAdapter",
    "ServedFactor",
    "TensorEntry",
    "adapter_digest",
    "assemble_adapter",
    "read_adapter",
]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedFactor:
    """One linear as it is served: all of `a`, and the rows of `b` from `row_start` to `row_stop`.

    `path` and `rank` are what `pack_adapter` places; for a module that is not fused, the rows are
    all of them.
    """

    path: str
    rank: ModuleRank
    a: TensorEntry
    b: TensorEntry
    row_start: int
    row_stop: int


@dataclass(frozen=True)
class PeftAdapter:
    """A checked adapter: nothing in it is left out when these modules are applied."""

    directory: Path
    config: dict[str, Any]
    weights_file: Path
    file_bytes: int
    modules: tuple[LoraModule, ...]
    warnings: tuple[Finding, ...]
    base_model_name: str | None

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def targets(self) -> tuple[str, ...]:
        """Leaf names, sorted: ("down_proj", "q_proj")."""
        return tuple(sorted({module.leaf for module in self.modules}))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """safetensors dtypes of the factors, sorted: ("BF16", "F32")."""
        return tuple(sorted({entry.dtype for m in self.modules for entry in (m.a, m.b)}))

    def module_ranks(self) -> dict[str, ModuleRank]:
        """What `pack_adapter` takes. A fused linear stands there as its slices.

        One tensor for q|k|v means A·x once and B's rows one after the other, so giving every slice
        the whole of A and its own rows of B is the same product, exactly.
        """
        return {
            path: ModuleRank(module.rank, module.scaling)
            for module in self.modules
            for path in _slice_paths(module)
        }

    def served_factors(self, shape: ModelShape) -> Iterator[ServedFactor]:
        """The linears to fill, with the rows of each; the counterpart of `module_ranks`."""
        for module in self.modules:
            start = 0
            for path in _slice_paths(module):
                leaf = path.rpartition(".")[2]
                stop = start + shape.linears[leaf][0]
                rank = ModuleRank(module.rank, module.scaling)
                yield ServedFactor(path, rank, module.a, module.b, start, stop)
                start = stop


def _slice_paths(module: LoraModule) -> tuple[str, ...]:
    parent = module.path.rpartition(".")[0]
    return tuple(f"{parent}.{leaf}" for leaf in FUSED_LEAVES.get(module.leaf, (module.leaf,)))


def read_adapter(
    directory: Path, shape: ModelShape | None, *, max_lora_rank: int | None = None
) -> PeftAdapter:
    """Read and check `adapter_config.json` and the header of `adapter_model.safetensors`.

    With `shape` None there is no base model to check the tensors' shapes against. Raises
    `path.*` and `adapter.*` errors. No tensor is read.
    """
    config = load_config(adapter_files.read_config_file(directory))
    with adapter_files.open_adapter_file(directory, WEIGHTS_FILE) as file:
        return _from_open_file(directory, config, file, shape, max_lora_rank)


def _from_open_file(
    directory: Path,
    config: dict[str, Any],
    file: BinaryIO,
    shape: ModelShape | None,
    max_lora_rank: int | None,
) -> PeftAdapter:
    settings = read_settings(config)
    header, file_bytes = adapter_files.read_header(file)
    entries = parse_header(header, file_bytes)
    return assemble_adapter(directory, settings, entries, file_bytes, shape, max_lora_rank)


def assemble_adapter(
    directory: Path,
    settings: LoraSettings,
    entries: tuple[TensorEntry, ...],
    file_bytes: int,
    shape: ModelShape | None,
    max_lora_rank: int | None,
) -> PeftAdapter:
    """The same checks for headers that came from elsewhere (the hub)."""
    modules, set_aside = collect_modules(entries, settings, shape)
    _check_max_rank(modules, max_lora_rank)
    return PeftAdapter(
        directory=directory,
        config=settings.raw,
        weights_file=directory / WEIGHTS_FILE,
        file_bytes=file_bytes,
        modules=modules,
        warnings=(*_config_findings(settings), *set_aside),
        base_model_name=settings.base_model_name,
    )


def _check_max_rank(modules: tuple[LoraModule, ...], max_lora_rank: int | None) -> None:
    largest = max(modules, key=lambda module: module.rank)
    if max_lora_rank is not None and largest.rank > max_lora_rank:
        raise LoradError(
            "adapter.rank_exceeds_max",
            f"{largest.path} has rank {largest.rank}, but max_lora_rank is {max_lora_rank}",
            hint=f"raise max_lora_rank to {largest.rank}, or re-rank it with loractl resize",
            details={"rank": largest.rank, "max_lora_rank": max_lora_rank},
        )


def _config_findings(settings: LoraSettings) -> Iterator[Finding]:
    if settings.base_model_name is None:
        yield Finding("base_name_missing", "the config does not name a base model")
    if settings.unknown:
        yield Finding(
            "unknown_config_keys",
            f"unknown config keys, all at a neutral value: {', '.join(settings.unknown)[:200]}",
            {"keys": list(settings.unknown[:50])},
        )
    if settings.defaulted:
        yield Finding(
            "config_default_used",
            f"{' and '.join(settings.defaulted)} not given; PEFT's default of 8 is used",
            {"keys": list(settings.defaulted)},
        )


def adapter_digest(directory: Path) -> str:
    """ "sha256:..." over what would be served: two equal digests mean equal maths.

    It covers each module's path, rank and scaling, and its factors' dtypes, shapes and bytes,
    ordered by path. The order of tensors in the file, prefixes, metadata, JSON formatting and
    config keys that change nothing do not enter. The file is streamed; raises what
    `read_adapter` raises.
    """
    config = load_config(adapter_files.read_config_file(directory))
    with adapter_files.open_adapter_file(directory, WEIGHTS_FILE) as file:
        adapter = _from_open_file(directory, config, file, None, None)
        digest = hashlib.sha256(b"lorad adapter 1\n")
        for module in sorted(adapter.modules, key=lambda module: module.path):
            digest.update(_digest_line(module))
            for entry in (module.a, module.b):
                _update_with_tensor(digest, file, entry)
    return f"sha256:{digest.hexdigest()}"


def _digest_line(module: LoraModule) -> bytes:
    factors = [[entry.dtype, list(entry.shape)] for entry in (module.a, module.b)]
    line = [module.path, module.rank, module.scaling.hex(), *factors]
    return json.dumps(line).encode("ascii") + b"\n"


def _update_with_tensor(digest: hashlib._Hash, file: BinaryIO, entry: TensorEntry) -> None:
    file.seek(entry.start)
    left = entry.nbytes
    while left:
        chunk = adapter_files.read_exactly(file, min(left, _CHUNK_BYTES))
        digest.update(chunk)
        left -= len(chunk)
