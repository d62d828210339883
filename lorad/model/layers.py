"""Rotary embedding and the base projection with its LoRA delta."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from lorad_kernels import BaseLinear, take_rows
from torch import Tensor

from lorad.model.config import ModelConfig, RopeScaling
from lorad.model.forward_batch import Deltas
from lorad.sizing.model_shape import Projection


class RotaryEmbedding:
    """Rotates pairs (i, i + head_dim/2) of q and k by position (Su et al., arXiv:2104.09864)."""

    def __init__(
        self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies = _frequencies(config)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self.cos = angles.cos().to(device, dtype)  # [max_positions, head_dim]
        self.sin = angles.sin().to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each `[T, head_dim]`: looked up once per step, used by every layer."""
        return take_rows(self.cos, positions), take_rows(self.sin, positions)


def _frequencies(config: ModelConfig) -> Tensor:
    dim = config.shape.head_dim
    base = config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies = 1.0 / base
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, a ramp in between.

    As in Meta's llama-models reference code for Llama 3.1.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """One matmul of a layer, e.g. q|k|v, and where adapters add to it."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    base: BaseLinear  # x W^T + bias, as this device does it best
    layer: int
    index: int  # position in ModelShape.projections
    slice_starts: tuple[int, ...]

    def __call__(self, x: Tensor, lora: Deltas | None) -> Tensor:
        """x `[T, in]` -> `[T, out]`: the base for all rows at once, then the rows' deltas."""
        y = self.base(x)
        if lora is not None:
            lora.add(y, x, self.layer, self.index, self.slice_starts)
        return y


def slice_starts(projection: Projection) -> tuple[int, ...]:
    return (*(part.out_start for part in projection.slices), projection.out_features)
