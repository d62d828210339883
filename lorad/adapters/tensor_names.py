"""What a tensor of an adapter file is, told by its name alone.

The part after the module path says which kind of tensor it is; the module path is brought to
the one spelling that `ModelShape.module_path` uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal[
    "lora_A",
    "lora_B",
    "embedding_lora",
    "base_layer",
    "magnitude",
    "lora_bias",
    "bias",
    "token_rows",
    "full_weight",
    "other",
]

# Wrappers that rename a module and change nothing else: torch.compile, FSDP, activation
# checkpointing.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT_PREFIX = ("base_model", "model")
# Module lists that are the decoder's layers: the causal model itself, the bare decoder, and the
# text half of a multimodal model in its old and new spelling.
_DECODERS = frozenset(
    {"model", "", "model.language_model", "language_model.model", "language_model"}
)

_ADAPTER = r"(?:\.(?P<adapter>[^.]+))?"  # a name left in by a raw state dict
_SUFFIXES: tuple[tuple[str, Kind], ...] = (
    (rf"lora_A{_ADAPTER}\.weight", "lora_A"),
    (rf"lora_B{_ADAPTER}\.weight", "lora_B"),
    (rf"lora_B{_ADAPTER}\.bias", "lora_bias"),
    (rf"lora_embedding_[AB]{_ADAPTER}", "embedding_lora"),
    (rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?", "magnitude"),
    (r"base_layer\.(?:weight|bias)", "base_layer"),
    (rf"(?:token_adapter\.)?trainable_tokens_(?:delta|original|indices){_ADAPTER}", "token_rows"),
    (r"bias", "bias"),
    (r"weight", "full_weight"),
)
_FORMS = tuple((re.compile(rf"(?P<module>.+)\.{suffix}"), kind) for suffix, kind in _SUFFIXES)
_NAMES_KEPT = 4096  # all adapters of a base model have the same few hundred
_LAYER = re.compile(r"(?:(?P<decoder>.*)\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class TensorName:
    """A name taken apart. `adapter` is the segment a raw state dict leaves in, or ""."""

    kind: Kind
    module: str  # as trained: what PEFT matches its patterns against
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class DecoderModule:
    """A linear of a decoder layer: `parent.leaf` is "self_attn.q_proj"."""

    layer: int
    parent: str
    leaf: str

    @property
    def path(self) -> str:
        return f"model.layers.{self.layer}.{self.parent}.{self.leaf}"


def _trained_path(module: str) -> str:
    """The module's path in the model that was trained: PEFT's own prefix is not part of it."""
    parts = module.split(".")
    while parts and parts[0] in _WRAPPER_PARTS:
        del parts[0]
    if tuple(parts[:2]) == _PEFT_PREFIX:
        del parts[:2]
    return ".".join(parts)


@lru_cache(maxsize=_NAMES_KEPT)
def split_name(name: str) -> TensorName:
    """Take a tensor's name apart; what fits no known form has the kind "other"."""
    for pattern, kind in _FORMS:
        match = pattern.fullmatch(name)
        if match:
            adapter = match.groupdict().get("adapter") or ""
            return TensorName(kind, _trained_path(match["module"]), adapter)
    return TensorName("other", name)


@lru_cache(maxsize=_NAMES_KEPT)
def decoder_module(trained_path: str) -> DecoderModule | None:
    """The decoder linear that a path means, or None when it is not in a decoder layer."""
    parts = [part for part in trained_path.split(".") if part not in _WRAPPER_PARTS]
    match = _LAYER.fullmatch(".".join(parts))
    if match is None or (match["decoder"] or "") not in _DECODERS:
        return None
    parent, _, leaf = match["rest"].rpartition(".")
    return DecoderModule(int(match["layer"]), parent, leaf)
