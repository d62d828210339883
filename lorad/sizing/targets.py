"""Which linears an adapter has factors on: the names people use for sets of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lorad.errors import LoradError
from lorad.sizing.architecture import Architecture, LayerGroup, Linear, Part

# How an adapter holds the factors of routed experts. EACH: every expert's gate, up and down
# apart, as checkpoints do. STACKED: PEFT's `target_parameters` on the stacked parameters of
# transformers 5, where gate and up of an expert share one A. MERGED: what PEFT makes of
# per-expert targets there: gate's and up's factors side by side, over both their outputs.
EACH, STACKED, MERGED = "experts", "experts-3d", "experts-merged"
ROUTER = "router"
# Families for which PEFT (0.21, transformers 5) turns "all-linear" into attention, router and
# merged experts; their dense and shared MLPs fall out of it.
_MERGED_BY_PEFT = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_NAMED = {"qv": ("q_proj", "v_proj"), "qkv": ("q_proj", "k_proj", "v_proj")}
_PARTS = {"attn": (Part.ATTENTION,), "mlp": (Part.MLP,), "all-linear": (Part.ATTENTION, Part.MLP)}


@dataclass(frozen=True)
class Targets:
    """What an adapter touches: leaves of every layer, and perhaps experts and their router."""

    leaves: tuple[str, ...]
    experts: str = ""  # "", EACH, STACKED or MERGED
    router: bool = False

    def linears(self, arch: Architecture) -> Iterator[tuple[int, Linear]]:
        """Each targeted linear with the number of layers that have it."""
        for group in arch.groups:
            for linear in (*self._plain(group), *self._experts(group)):
                yield group.count, linear

    def _plain(self, group: LayerGroup) -> Iterator[Linear]:
        for linear in group.linears:
            plain = linear.part in (Part.ATTENTION, Part.MLP) and linear.leaf in self.leaves
            if plain or (self.router and linear.part is Part.ROUTER):
                yield linear

    def _experts(self, group: LayerGroup) -> list[Linear]:
        experts = [linear for linear in group.linears if linear.part is Part.EXPERT]
        if not self.experts or not experts:
            return []
        if self.experts == EACH:
            return experts
        gate, up, down = experts
        pairs = 2 if self.experts == MERGED else 1
        fused = replace(
            gate,
            leaf="gate_up_proj",
            out_features=gate.out_features + up.out_features,
            copies=pairs * gate.copies,
        )
        return [fused, down]


def resolve_targets(text: str, arch: Architecture) -> Targets:
    """`qv`, `qkv`, `attn`, `mlp`, `all-linear`, leaf names; `router` and `experts*` of a MoE.

    Several are joined by commas. `all-linear` is what PEFT's `all-linear` writes. Raises
    `usage.invalid`.
    """
    found = Targets(())
    for word in filter(None, (part.strip() for part in text.split(","))):
        found = _with_word(found, word, arch)
    if not found.leaves and not found.experts and not found.router:
        raise LoradError("usage.invalid", "--targets names no layer", hint="try all-linear")
    return replace(found, leaves=tuple(leaf for leaf in arch.leaves if leaf in found.leaves))


def _with_word(found: Targets, word: str, arch: Architecture) -> Targets:
    if arch.has_experts and word in (EACH, STACKED, MERGED):
        return replace(found, experts=word)
    if arch.has_experts and word == ROUTER:
        return replace(found, router=True)
    if word == "all-linear" and arch.model_type in _MERGED_BY_PEFT:
        leaves = found.leaves + _leaves("attn", arch)
        return Targets(leaves, found.experts or MERGED, router=True)
    return replace(found, leaves=found.leaves + _leaves(word, arch))


def _leaves(word: str, arch: Architecture) -> tuple[str, ...]:
    if word in _PARTS:
        return tuple(x.leaf for _, x in arch.linears() if x.part in _PARTS[word])
    wanted = _NAMED.get(word, (word,))
    unknown = sorted(set(wanted) - set(arch.leaves))
    if unknown:
        named = [*_NAMED, *_PARTS, *([ROUTER, EACH, STACKED, MERGED] if arch.has_experts else [])]
        raise LoradError(
            "usage.invalid",
            f"--targets: this model has no linear layer {', '.join(map(repr, unknown))}",
            hint=f"use {', '.join(named)}, or some of {', '.join(arch.leaves)}",
            details={"unknown": unknown},
        )
    return wanted
