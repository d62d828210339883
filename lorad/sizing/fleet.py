"""The adapters a plan is made for: how large each kind is, and how many there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorad.errors import LoradError
from lorad.sizing.adapter_size import ALIGNMENT
from lorad.sizing.architecture import Architecture, Linear
from lorad.sizing.targets import Targets


@dataclass(frozen=True, slots=True)
class TargetSize:
    """All factors of one linear over the layers that have it."""

    leaf: str
    parent: str
    layers: int
    copies: int  # experts
    rank: int
    out_features: int
    in_features: int

    @property
    def name(self) -> str:
        """The leaf, and with an expert's that it is one."""
        return f"experts.{self.leaf}" if self.copies > 1 else self.leaf

    def nbytes(self, itemsize: int) -> int:
        matrix = self.rank * (self.out_features + self.in_features)
        return self.layers * self.copies * matrix * itemsize

    def allocated(self, itemsize: int) -> int:
        """With each matrix starting on a cache line, as the daemon packs them."""
        return (
            self.layers
            * self.copies
            * (
                _aligned(self.rank * self.in_features * itemsize)
                + _aligned(self.out_features * self.rank * itemsize)
            )
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class AdapterKind:
    """One kind of adapter of the fleet. Sizes are per GPU."""

    label: str  # "rank 16", or the name of a directory
    sizes: tuple[TargetSize, ...]
    needed: AdapterKind | None = None  # at the ranks its spectrum asks for, where it was read

    @property
    def rank(self) -> int:
        """The largest rank: what `max_lora_rank` must admit."""
        return max(size.rank for size in self.sizes)

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(size.leaf for size in self.sizes))

    @property
    def targets(self) -> tuple[str, ...]:
        """For people: leaves, with experts' marked."""
        return tuple(dict.fromkeys(size.name for size in self.sizes))

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the factors alone: what PEFT writes, without the file's header."""
        return sum(size.nbytes(itemsize) for size in self.sizes)

    def allocated(self, itemsize: int) -> int:
        """Bytes the daemon's pages hold, `AdapterLayout.nbytes`."""
        return sum(size.allocated(itemsize) for size in self.sizes)


def _size(linear: Linear, layers: int, rank: int, tp: int) -> TargetSize:
    """A divides with the inputs and B with the outputs; the other factor is on every GPU."""
    return TargetSize(
        linear.leaf,
        linear.parent,
        layers,
        linear.copies,
        rank,
        linear.out_per_gpu(tp),
        linear.in_per_gpu(tp),
    )


def kind_of_rank(arch: Architecture, targets: Targets, rank: int, tp: int = 1) -> AdapterKind:
    """An adapter with one rank on all its targets."""
    sizes = tuple(_size(x, layers, rank, tp) for layers, x in targets.linears(arch))
    return AdapterKind(f"rank {rank}", sizes)


def kind_of_modules(
    arch: Architecture, label: str, ranks: Mapping[str, int], tp: int = 1
) -> AdapterKind:
    """An adapter as read from its files: `ranks` maps "layers.0.self_attn.q_proj" to a rank.

    Raises `adapter.base_mismatch` for a module that the model does not have.
    """
    linears = dict(_paths(arch))
    unknown = sorted(set(ranks) - set(linears))
    if unknown:
        raise LoradError(
            "adapter.base_mismatch",
            f"{label} has factors for {unknown[0]}, which this model does not have",
            hint="give the base model the adapter was trained on",
            details={"modules": unknown[:20]},
        )
    counts: dict[tuple[Linear, int], int] = {}
    for path, rank in ranks.items():
        key = (linears[path], rank)
        counts[key] = counts.get(key, 0) + 1
    return AdapterKind(
        label, tuple(_size(x, layers, rank, tp) for (x, rank), layers in counts.items())
    )


def _paths(arch: Architecture) -> Iterable[tuple[str, Linear]]:
    layer = 0
    for group in arch.groups:
        for _ in range(group.count):
            for linear in group.linears:
                yield f"layers.{layer}.{linear.parent}.{linear.leaf}", linear
            layer += 1


def assign_kinds(count: int, kinds: Sequence[AdapterKind], names: Sequence[str]) -> list[int]:
    """The kind of each adapter: by its name where a kind is so labelled, else in turn."""
    by_label = {kind.label: i for i, kind in enumerate(kinds)}
    turns = iter(range(count))
    return [
        by_label[names[i]] if i < len(names) and names[i] in by_label else next(turns) % len(kinds)
        for i in range(count)
    ]
