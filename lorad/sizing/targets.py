"""Which linears an adapter has factors on: the names people use for sets of them."""

from __future__ import annotations

from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMED_TARGETS: dict[str, tuple[str, ...]] = {
    "qv": ("q_proj", "v_proj"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attn": ATTENTION,
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def resolve_targets(text: str, shape: ModelShape) -> tuple[str, ...]:
    """`qv`, `qkv`, `attn`, `mlp`, `all-linear`, or leaf names joined by commas.

    Returns leaves of `shape.linears` in its order; raises `usage.invalid` for an unknown one.
    """
    if text == "all-linear":
        return tuple(shape.linears)
    wanted = set(NAMED_TARGETS.get(text) or (part.strip() for part in text.split(",")))
    unknown = sorted(wanted - set(shape.linears))
    if unknown:
        names = ", ".join([*NAMED_TARGETS, "all-linear"])
        raise LoradError(
            "usage.invalid",
            f"--targets: {', '.join(map(repr, unknown))} is no linear layer of this model",
            hint=f"use {names}, or some of {', '.join(shape.linears)} joined by commas",
            details={"unknown": unknown},
        )
    return tuple(leaf for leaf in shape.linears if leaf in wanted)
