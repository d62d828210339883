"""An adapter's factors in host memory: one packed tensor, laid out as on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorad.adapters.peft_format import PeftAdapter
from lorad.errors import LoradError
from lorad.sizing.adapter_size import AdapterLayout, pack_adapter
from lorad.sizing.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Packed factors, ready to be copied into a run of pages as they are."""

    digest: str
    layout: AdapterLayout
    data: Tensor  # 1-D, serving dtype, layout.nbytes long

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def read_weights(
    adapter: PeftAdapter, digest: str, shape: ModelShape, dtype: torch.dtype
) -> AdapterWeights:
    """Read, cast once to `dtype`, and pack. Gaps of alignment are zero.

    Raises `adapter.nonfinite_weights` naming the tensor, also for values that are finite in
    the file and overflow in `dtype`; `adapter.load_failed` when the file cannot be read.
    """
    itemsize = dtype.itemsize
    layout = pack_adapter(shape, adapter.module_ranks(), itemsize)
    data = torch.zeros(layout.nbytes // itemsize, dtype=dtype)
    places = _places(layout, shape)
    try:
        with safe_open(str(adapter.weights_file), framework="pt") as file:
            for module in adapter.modules:
                a_offset, b_offset = places[module.path]
                _copy(data, a_offset, file.get_tensor(module.a.name), module.a.name)
                _copy(data, b_offset, file.get_tensor(module.b.name), module.b.name)
    except (OSError, SafetensorError) as error:
        raise LoradError(
            "adapter.load_failed",
            f"{adapter.weights_file.name} of {digest} cannot be read: {error}",
        ) from None
    return AdapterWeights(digest, layout, data)


def _places(layout: AdapterLayout, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Module path -> offsets of its A and B."""
    return {
        f"model.layers.{layer}.{projection.parent}.{part.leaf}": (place.a_offset, place.b_offset)
        for layer, projections in enumerate(layout.slices)
        for projection, places in zip(shape.projections, projections, strict=True)
        for part, place in zip(projection.slices, places, strict=True)
        if place.rank
    }


def _copy(data: Tensor, offset: int, tensor: Tensor, name: str) -> None:
    target = data[offset : offset + tensor.numel()]
    target.copy_(tensor.reshape(-1))
    if not bool(torch.isfinite(target).all()):
        raise LoradError(
            "adapter.nonfinite_weights",
            f"{name} holds NaN or infinity as {data.dtype}",
            hint="the training run diverged; push an earlier checkpoint",
            details={"tensor": name},
        )
