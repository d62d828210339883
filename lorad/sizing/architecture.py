"""Every parameter of a decoder, by shape: what a planner must know of models of any family.

`ModelShape` is what the engine serves today; an `Architecture` also covers what it does not:
experts, latent attention, fused projections, layers that differ, sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How tensor parallelism divides a linear `[out, in]` over the GPUs."""

    COLUMN = "column"  # its outputs
    ROW = "row"  # its inputs
    REPLICATED = "replicated"


class Part(Enum):
    """Which part of a decoder layer a linear belongs to."""

    ATTENTION = "attention"
    MLP = "mlp"  # the dense MLP, or the shared expert beside the routed ones
    EXPERT = "expert"
    ROUTER = "router"  # a bare parameter in transformers, so "all linear layers" leaves it out


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of a decoder layer, as the checkpoint names it; its weight is `[out, in]`."""

    parent: str  # "self_attn"
    leaf: str  # "q_proj"
    out_features: int
    in_features: int
    split: Split
    part: Part
    heads: tuple[int, ...] = ()  # heads per fused part, where outputs divide by whole heads
    copies: int = 1  # experts
    bias: bool = False

    @property
    def elements(self) -> int:
        """Parameters of all copies, bias included."""
        return self.copies * self.out_features * (self.in_features + self.bias)

    def lora_elements(self, rank: int) -> int:
        """Elements of A `[rank, in]` and B `[out, rank]` of all copies."""
        return self.copies * rank * (self.in_features + self.out_features)

    def out_per_gpu(self, tp: int) -> int:
        """Outputs on one of `tp` GPUs. A head is never cut: fewer heads than GPUs repeat."""
        if self.split is not Split.COLUMN:
            return self.out_features
        if not self.heads:
            return -(-self.out_features // tp)
        head_dim = self.out_features // sum(self.heads)
        return head_dim * sum(-(-heads // tp) for heads in self.heads)

    def in_per_gpu(self, tp: int) -> int:
        return -(-self.in_features // tp) if self.split is Split.ROW else self.in_features

    def elements_per_gpu(self, tp: int) -> int:
        return self.copies * self.out_per_gpu(tp) * (self.in_per_gpu(tp) + self.bias)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Decoder layers of the same make."""

    count: int
    linears: tuple[Linear, ...]
    other_elements: int  # norms and the like, of one layer
    kv_heads: int  # 1 for a latent that every GPU keeps whole
    kv_head_elements: int  # K and V of one head and one token
    window: int = 0  # tokens attention looks back; 0 = all

    def kv_elements(self, tp: int = 1) -> int:
        """K and V of one token in these layers, on one of `tp` GPUs."""
        return self.count * self.kv_head_elements * -(-self.kv_heads // tp)


@dataclass(frozen=True)
class Architecture:
    """All parameters of a model, in groups of equal layers."""

    model_type: str
    attention: str  # "MHA", "GQA", "MQA" or "MLA": names the KV formula
    hidden_size: int
    vocab_size: int
    tied: bool  # lm_head is the embedding
    groups: tuple[LayerGroup, ...]
    other_elements: int  # the final norm
    max_position: int
    experts_per_token: int = 0
    vision_elements: int = 0
    served: bool = False  # by this version of lorad

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token over all layers."""
        return self.kv_elements(1)

    def kv_elements(self, tp: int) -> int:
        return sum(group.kv_elements(tp) for group in self.groups)

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """Each kind of linear with the number of layers that have it."""
        for group in self.groups:
            for linear in group.linears:
                yield group.count, linear

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the linears an adapter may target, in the order of a layer."""
        plain = (Part.ATTENTION, Part.MLP)
        return tuple(dict.fromkeys(x.leaf for _, x in self.linears() if x.part in plain))

    @property
    def has_experts(self) -> bool:
        return any(linear.part is Part.EXPERT for _, linear in self.linears())

    @property
    def embedding_elements(self) -> int:
        """The token embedding, and lm_head where it is a matrix of its own."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def decoder_elements(self) -> int:
        linears = sum(count * linear.elements for count, linear in self.linears())
        others = sum(group.count * group.other_elements for group in self.groups)
        return linears + others + self.other_elements

    @property
    def elements(self) -> int:
        """Parameters of the whole model."""
        return self.decoder_elements + self.embedding_elements + self.vision_elements

    def elements_per_gpu(self, tp: int) -> int:
        """Parameters on one of `tp` GPUs: norms and the vision tower are on every one."""
        linears = sum(count * x.elements_per_gpu(tp) for count, x in self.linears())
        others = sum(group.count * group.other_elements for group in self.groups)
        embedding = -(-self.embedding_elements // tp)
        return linears + others + self.other_elements + embedding + self.vision_elements
