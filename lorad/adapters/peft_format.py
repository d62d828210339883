"""PEFT's adapter directories: read from the two headers alone, and checked to the last tensor.

The invariant: every tensor in the file is applied exactly or named in an error, and every
config key is served, known to change nothing, or refused. `loractl inspect`, `push` and the
daemon all read adapters here, so none of them can be told something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lorad.adapters import adapter_files
from lorad.adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE, ByteSource, read_config_bytes
from lorad.adapters.findings import Finding, base_name_finding, config_findings
from lorad.adapters.lora_modules import (
    FUSED_LEAVES,
    LoraModule,
    collect_modules,
    modules_present,
)
from lorad.adapters.peft_config import load_config, read_settings
from lorad.adapters.safetensors_header import TensorEntry, parse_header
from lorad.errors import LoradError
from lorad.sizing.adapter_size import ModuleRank
from lorad.sizing.model_shape import ModelShape

__all__ = [
    "CONFIG_FILE",
    "FUSED_LEAVES",
    "WEIGHTS_FILE",
    "ByteSource",
    "Finding",
    "LoraModule",
    "PeftAdapter",
    "ServedDigest",
    "ServedFactor",
    "TensorEntry",
    "adapter_digest",
    "base_name_finding",
    "check_adapter",
    "modules_present",
    "open_adapter",
    "read_adapter",
    "read_config_bytes",
    "served_digest",
    "served_slices",
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
            yield from served_slices(module, shape)

    @property
    def digest_order(self) -> list[LoraModule]:
        """The modules as `ServedDigest` takes them."""
        return sorted(self.modules, key=lambda module: module.path)


def served_slices(module: LoraModule, shape: ModelShape) -> Iterator[ServedFactor]:
    """The linears that one module fills: itself, or the slices of a fused one."""
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
    with open_adapter(directory, shape, max_lora_rank=max_lora_rank) as (adapter, _):
        return adapter


@contextmanager
def open_adapter(
    directory: Path, shape: ModelShape | None, *, max_lora_rank: int | None = None
) -> Iterator[tuple[PeftAdapter, ByteSource]]:
    """`read_adapter` that keeps the weights file open, so that its tensors can be read too."""
    config = adapter_files.read_config_file(directory)
    with adapter_files.open_adapter_file(directory, WEIGHTS_FILE) as weights:
        yield check_adapter(directory, config, weights, shape, max_lora_rank), weights


def check_adapter(
    directory: Path,
    config: bytes,
    weights: ByteSource,
    shape: ModelShape | None,
    max_lora_rank: int | None,
) -> PeftAdapter:
    """All checks, on files from anywhere; `directory` only says where they came from."""
    settings = read_settings(load_config(config))
    entries = parse_header(adapter_files.read_header_bytes(weights), weights.size)
    modules, set_aside = collect_modules(entries, settings, shape)
    _check_max_rank(modules, max_lora_rank)
    trained = [module.trained_path for module in modules]
    return PeftAdapter(
        directory=directory,
        config=settings.raw,
        weights_file=directory / WEIGHTS_FILE,
        file_bytes=weights.size,
        modules=modules,
        warnings=(*config_findings(settings, trained), *set_aside),
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


def adapter_digest(directory: Path) -> str:
    """ "sha256:..." over what would be served: two equal digests mean equal maths.

    It covers each module's path, rank and scaling, and its factors' dtypes, shapes and bytes,
    ordered by path. The order of tensors in the file, prefixes, metadata, JSON formatting and
    config keys that change nothing do not enter. The file is streamed; raises what
    `read_adapter` raises.
    """
    with open_adapter(directory, None) as (adapter, weights):
        return served_digest(adapter, weights)


def served_digest(adapter: PeftAdapter, weights: ByteSource) -> str:
    """`adapter_digest` of an adapter that is open already."""
    digest = ServedDigest()
    for module in adapter.digest_order:
        digest.add(module, chain.from_iterable(_chunks(weights, e) for e in (module.a, module.b)))
    return digest.text


def _chunks(weights: ByteSource, entry: TensorEntry) -> Iterator[bytes]:
    for start in range(entry.start, entry.end, _CHUNK_BYTES):
        yield weights.read_at(start, min(_CHUNK_BYTES, entry.end - start))


class ServedDigest:
    """`adapter_digest`, for who reads the factors anyhow: takes the modules in `digest_order`."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"lorad adapter 1\n")

    def add(self, module: LoraModule, content: Iterable[bytes | bytearray]) -> None:
        """One module and the bytes of its A and then its B, in pieces of any length."""
        self._hash.update(_digest_line(module))
        for piece in content:
            self._hash.update(piece)

    @property
    def text(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _digest_line(module: LoraModule) -> bytes:
    factors = [[entry.dtype, list(entry.shape)] for entry in (module.a, module.b)]
    line = [module.path, module.rank, module.scaling.hex(), *factors]
    return json.dumps(line).encode("ascii") + b"\n"
