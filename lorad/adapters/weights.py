"""An adapter's factors in host memory: one packed tensor, laid out as on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lorad.adapters.adapter_files import ByteSource
from lorad.adapters.peft_format import open_adapter
from lorad.adapters.safetensors_header import TensorEntry
from lorad.errors import LoradError
from lorad.sizing.adapter_size import AdapterLayout, pack_adapter
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
    directory: Path, digest: str, shape: ModelShape, dtype: torch.dtype
) -> AdapterWeights:
    """Read both files of an adapter once, cast to `dtype`, and pack; gaps are zero.

    Raises what `read_adapter` raises, and `adapter.nonfinite_weights` naming the tensor, also
    for values that are finite in the file and overflow in `dtype`.
    """
    with open_adapter(directory, shape) as (adapter, file):
        layout = pack_adapter(shape, adapter.module_ranks(), dtype.itemsize)
        data = torch.zeros(layout.nbytes // dtype.itemsize, dtype=dtype)
        places = _places(layout, shape)
        for factor in adapter.served_factors(shape):
            a_offset, b_offset = places[factor.path]
            _fill(data, a_offset, _read(file, factor.a), factor.a.name)
            # A fused module's B is cut into its slices' rows.
            rows = _read(file, factor.b)[factor.row_start : factor.row_stop]
            _fill(data, b_offset, rows, factor.b.name)
    return AdapterWeights(digest, layout, data)


def read_factors(directory: Path, shape: ModelShape) -> Iterator[LinearFactors]:
    """The factors as they are in the files, one linear at a time: neither packed nor cast.

    Raises what `read_adapter` raises.
    """
    with open_adapter(directory, shape) as (adapter, file):
        for factor in adapter.served_factors(shape):
            rows = _read(file, factor.b)[factor.row_start : factor.row_stop]
            yield LinearFactors(factor.path, factor.rank.scaling, _read(file, factor.a), rows)


def _places(layout: AdapterLayout, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Module path -> offsets of its A and B."""
    return {
        f"model.layers.{layer}.{projection.parent}.{part.leaf}": (place.a_offset, place.b_offset)
        for layer, projections in enumerate(layout.slices)
        for projection, places in zip(shape.projections, projections, strict=True)
        for part, place in zip(projection.slices, places, strict=True)
        if place.rank
    }


def _read(file: ByteSource, entry: TensorEntry) -> Tensor:
    content = bytearray(file.read_at(entry.start, entry.end - entry.start))
    return torch.frombuffer(content, dtype=_DTYPES[entry.dtype]).view(entry.shape)


def _fill(data: Tensor, offset: int, tensor: Tensor, name: str) -> None:
    target = data[offset : offset + tensor.numel()]
    target.copy_(tensor.reshape(-1))
    if not bool(torch.isfinite(target).all()):
        raise LoradError(
            "adapter.nonfinite_weights",
            f"{name} holds NaN or infinity as {data.dtype}",
            hint="the training run diverged; push an earlier checkpoint",
            details={"tensor": name},
        )
