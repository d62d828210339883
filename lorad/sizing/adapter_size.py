"""How an adapter lies in memory: its bytes at true rank, matrix by matrix.

The planner prints these numbers and the daemon allocates by them; there is no other place
that computes the size of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lorad.sizing.model_shape import ModelShape

ALIGNMENT = 64  # bytes: one cache line, and enough for any vector load


@dataclass(frozen=True, slots=True)
class ModuleRank:
    """What PEFT resolved for one linear: its rank and its factor on B·A."""

    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """Where one linear's factors lie, in elements from the adapter's first byte.

    A is `[rank, in_features]`, B is `[out_features, rank]`, both row-major. Rank 0 means the
    adapter does not touch this linear.
    """

    rank: int = 0
    scaling: float = 0.0
    a_offset: int = 0
    b_offset: int = 0


UNTOUCHED = SliceLayout()


@dataclass(frozen=True)
class AdapterLayout:
    """All matrices of one adapter, packed back to back.

    `slices[layer][p][s]` follows `ModelShape.projections[p].slices[s]`.
    """

    slices: tuple[tuple[tuple[SliceLayout, ...], ...], ...]
    nbytes: int  # with alignment: what the pages hold
    weight_nbytes: int  # without: the elements alone
    max_rank: int


def lora_elements(rank: int, out_features: int, in_features: int) -> int:
    """Elements of one linear's A `[rank, in]` and B `[out, rank]`."""
    return rank * (in_features + out_features)


def pack_adapter(
    shape: ModelShape, modules: Mapping[str, ModuleRank], itemsize: int
) -> AdapterLayout:
    """Lay out an adapter whose `modules` map `ModelShape.module_path` names to ranks.

    The A factors of a fused projection come first and next to each other, so that one matmul
    can shrink all its slices. `itemsize` is the bytes per element of the serving dtype.
    """
    step = ALIGNMENT // itemsize
    position = used = max_rank = 0

    def place(elements: int) -> int:
        nonlocal position, used
        start = -(-position // step) * step
        position, used = start + elements, used + elements
        return start

    layers = []
    for layer in range(shape.num_layers):
        projections = []
        for projection in shape.projections:
            ranks = [
                modules.get(f"model.layers.{layer}.{projection.parent}.{part.leaf}")
                for part in projection.slices
            ]
            a_offsets = [place(m.rank * projection.in_features) if m else 0 for m in ranks]
            b_offsets = [
                place(m.rank * part.out_features) if m else 0
                for m, part in zip(ranks, projection.slices, strict=True)
            ]
            projections.append(
                tuple(
                    SliceLayout(m.rank, m.scaling, a, b) if m else UNTOUCHED
                    for m, a, b in zip(ranks, a_offsets, b_offsets, strict=True)
                )
            )
            max_rank = max([max_rank, *(m.rank for m in ranks if m)])
        layers.append(tuple(projections))
    nbytes = -(-position // step) * step * itemsize
    return AdapterLayout(tuple(layers), nbytes, used * itemsize, max_rank)


def uniform_modules(
    shape: ModelShape, leaves: tuple[str, ...], rank: int, scaling: float = 1.0
) -> dict[str, ModuleRank]:
    """The module map of an adapter with one rank on the given leaves of every layer."""
    return {
        shape.module_path(layer, leaf): ModuleRank(rank, scaling)
        for layer in range(shape.num_layers)
        for leaf in leaves
    }
