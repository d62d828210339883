"""An adapter's factors in host memory: one packed tensor, laid out as on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lorad.adapters.adapter_files import ByteSource
from lorad.adapters.peft_format import PeftAdapter, ServedDigest, open_adapter, served_slices
from lorad.adapters.safetensors_header import TensorEntry
from lorad.errors import LoradError
from lorad.sizing.adapter_size import AdapterLayout, ModuleRank, pack_adapter
from lorad.sizing.model_shape import ModelShape

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Packed factors, ready to be copied into a run of pages as they are."""

    digest: str
    layout: AdapterLayout
    data: Tensor  # 1-D, serving dtype, layout.nbytes long

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class LinearFactors:
    """What an adapter's files say of one linear: it adds `scaling * (x A^T) B^T`."""

    path: str  # "model.layers.3.self_attn.q_proj"
    scaling: float
    a: Tensor  # [rank, in], the file's dtype
    b: Tensor  # [out, rank]


def read_weights(
    directory: Path, digest: str, shape: ModelShape, dtype: torch.dtype, *, verify: bool = False
) -> AdapterWeights:
    """Read both files of an adapter once, cast to `dtype`, and pack; gaps are zero.

    With `verify`, what was read must have this `digest`: `store.digest_mismatch` otherwise. Raises
    what `read_adapter` raises, and `adapter.nonfinite_weights` naming the tensor, also for values
    that are finite in the file and overflow in `dtype`.

    It runs beside the step loop, which needs the interpreter too: every byte is read once, and
    nothing is asked of a tensor that can be asked of all of them together.
    """
    with open_adapter(directory, shape) as (adapter, file):
        layout = shared_layout(shape, tuple(adapter.module_ranks().items()), dtype.itemsize)
        data = torch.zeros(layout.nbytes // dtype.itemsize, dtype=dtype)
        places = _places(layout, shape)
        found = ServedDigest()
        for module in adapter.digest_order:
            contents = [_content(file, entry) for entry in (module.a, module.b)]
            if verify:
                found.add(module, contents)
            a, b = map(_tensor, contents, (module.a, module.b))
            for factor in served_slices(module, shape):
                a_offset, b_offset = places[factor.path]
                data[a_offset : a_offset + a.numel()] = a.view(-1)
                # A fused module's B is cut into its slices' rows.
                rows = b[factor.row_start : factor.row_stop].view(-1)
                data[b_offset : b_offset + rows.numel()] = rows
    if verify and found.text != digest:
        raise LoradError(
            "store.digest_mismatch",
            f"the files in {directory} have the digest {found.text}, not {digest}",
            hint="push the same content again",
        )
    if not _all_finite(data):
        raise _nonfinite(adapter, shape, places, data)
    return AdapterWeights(digest, layout, data)


def read_factors(directory: Path, shape: ModelShape) -> Iterator[LinearFactors]:
    """The factors as they are in the files, one linear at a time: neither packed nor cast.

    Raises what `read_adapter` raises.
    """
    with open_adapter(directory, shape) as (adapter, file):
        for factor in adapter.served_factors(shape):
            a, b = (_tensor(_content(file, entry), entry) for entry in (factor.a, factor.b))
            rows = b[factor.row_start : factor.row_stop]
            yield LinearFactors(factor.path, factor.rank.scaling, a, rows)


@lru_cache(maxsize=64)
def shared_layout(
    shape: ModelShape, ranks: tuple[tuple[str, ModuleRank], ...], itemsize: int
) -> AdapterLayout:
    """`pack_adapter`, once for all adapters of one form: a layout is some hundred objects."""
    return pack_adapter(shape, dict(ranks), itemsize)


def _places(layout: AdapterLayout, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Module path -> offsets of its A and B."""
    return {
        f"model.layers.{layer}.{projection.parent}.{part.leaf}": (place.a_offset, place.b_offset)
        for layer, projections in enumerate(layout.slices)
        for projection, places in zip(shape.projections, projections, strict=True)
        for part, place in zip(projection.slices, places, strict=True)
        if place.rank
    }


def _content(file: ByteSource, entry: TensorEntry) -> bytearray:
    return bytearray(file.read_at(entry.start, entry.end - entry.start))


def _tensor(content: bytearray, entry: TensorEntry) -> Tensor:
    return torch.frombuffer(content, dtype=_DTYPES[entry.dtype]).view(entry.shape)


def _all_finite(data: Tensor) -> bool:
    """NaN is both the least and the greatest of what it is among. A tenth of isfinite's time."""
    return all(bool(torch.isfinite(end)) for end in data.aminmax())


def _nonfinite(
    adapter: PeftAdapter, shape: ModelShape, places: dict[str, tuple[int, int]], data: Tensor
) -> LoradError:
    """The error for data that is known to hold NaN or infinity: in which tensor?"""
    factors = (
        (entry.name, offset, rows * entry.shape[1])
        for factor in adapter.served_factors(shape)
        for entry, offset, rows in (
            (factor.a, places[factor.path][0], factor.a.shape[0]),
            (factor.b, places[factor.path][1], factor.row_stop - factor.row_start),
        )
    )
    name = next(
        name for name, offset, count in factors if not _all_finite(data[offset : offset + count])
    )
    return LoradError(
        "adapter.nonfinite_weights",
        f"{name} holds NaN or infinity as {data.dtype}",
        hint="the training run diverged; push an earlier checkpoint",
        details={"tensor": name},
    )
