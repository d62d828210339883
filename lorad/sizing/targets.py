"""Which linears an adapter has factors on: the names people use for sets of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lorad.errors import LoradError
from lorad.sizing.architecture import Architecture, Linear, Part

EXPERTS, EXPERTS_3D = "experts", "experts-3d"
_NAMED = {
    "qv": ("q_proj", "v_proj"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
}
_PARTS = {"attn": (Part.ATTENTION,), "mlp": (Part.MLP,), "all-linear": (Part.ATTENTION, Part.MLP)}


@dataclass(frozen=True)
class Targets:
    """What an adapter touches: leaves of every layer, and perhaps the routed experts.

    `experts` is "" (none), "experts" (each expert's linears apart, as checkpoints hold them)
    or "experts-3d" (PEFT's `target_parameters`: gate and up of an expert share one A).
    """

    leaves: tuple[str, ...]
    experts: str = ""

    def __str__(self) -> str:
        return ", ".join([*self.leaves, *([self.experts] if self.experts else [])])

    def linears(self, arch: Architecture) -> Iterator[tuple[int, Linear]]:
        """Each targeted linear with the number of layers that have it."""
        for group in arch.groups:
            for linear in group.linears:
                if linear.part in (Part.ATTENTION, Part.MLP) and linear.leaf in self.leaves:
                    yield group.count, linear
            experts = [x for x in group.linears if x.part is Part.EXPERT]
            if self.experts == EXPERTS_3D and experts:
                experts = _fused(experts)
            if self.experts:
                yield from ((group.count, linear) for linear in experts)


def _fused(experts: list[Linear]) -> list[Linear]:
    gate, up, down = experts
    out = gate.out_features + up.out_features
    return [replace(gate, leaf="gate_up_proj", out_features=out), down]


def resolve_targets(text: str, arch: Architecture) -> Targets:
    """`qv`, `qkv`, `attn`, `mlp`, `all-linear`, `experts`, `experts-3d` or leaf names.

    Several are joined by commas. `all-linear` is what PEFT's `all-linear` finds: routers and
    experts are bare parameters there and need a word of their own. Raises `usage.invalid`.
    """
    leaves: set[str] = set()
    experts = ""
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word in (EXPERTS, EXPERTS_3D) and arch.has_experts:
            experts = word
        else:
            leaves.update(_leaves(word, arch))
    if not leaves and not experts:
        raise LoradError("usage.invalid", "--targets names no layer", hint="try all-linear")
    return Targets(tuple(leaf for leaf in arch.leaves if leaf in leaves), experts)


def _leaves(word: str, arch: Architecture) -> set[str]:
    if word in _PARTS:
        return {x.leaf for _, x in arch.linears() if x.part in _PARTS[word]}
    wanted = set(_NAMED.get(word, (word,)))
    unknown = sorted(wanted - set(arch.leaves))
    if unknown:
        named = [*_NAMED, *_PARTS, *([EXPERTS, EXPERTS_3D] if arch.has_experts else [])]
        raise LoradError(
            "usage.invalid",
            f"--targets: this model has no linear layer {', '.join(map(repr, unknown))}",
            hint=f"use {', '.join(named)}, or some of {', '.join(arch.leaves)}",
            details={"unknown": unknown},
        )
    return wanted
