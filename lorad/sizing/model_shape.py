"""The shapes of a base model's decoder, read from its config.json. No torch, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lorad.errors import LoradError

MAX_LAYERS = 4096  # more is a mistake, and would make lists of them a way to fill the memory


@dataclass(frozen=True, slots=True)
class Slice:
    """One linear layer as the checkpoint names it, and its rows in the fused projection."""

    leaf: str  # "q_proj"
    out_start: int  # first output row inside the projection
    out_features: int


@dataclass(frozen=True, slots=True)
class Projection:
    """One matmul of a decoder layer; q|k|v and gate|up are fused, as they share their input."""

    name: str  # "qkv_proj"
    parent: str  # "self_attn" or "mlp"
    in_features: int
    slices: tuple[Slice, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.slices)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-style decoder: grouped-query attention and a gated MLP."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of k_proj, and of v_proj: with grouped-query attention fewer than q_size."""
        return self.num_kv_heads * self.head_dim

    @property
    def biased_leaves(self) -> tuple[str, ...]:
        """The linears that have a bias; Qwen2 has none on o_proj."""
        leaves: tuple[str, ...] = ()
        if self.attention_bias:
            leaves += ("q_proj", "k_proj", "v_proj")
            leaves += () if self.model_type == "qwen2" else ("o_proj",)
        return leaves + (("gate_proj", "up_proj", "down_proj") if self.mlp_bias else ())

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.kv_size

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """The four matmuls of one decoder layer, in the order they run."""
        q, kv, mid, hidden = self.q_size, self.kv_size, self.intermediate_size, self.hidden_size
        return (
            Projection(
                "qkv_proj",
                "self_attn",
                hidden,
                (Slice("q_proj", 0, q), Slice("k_proj", q, kv), Slice("v_proj", q + kv, kv)),
            ),
            Projection("o_proj", "self_attn", q, (Slice("o_proj", 0, hidden),)),
            Projection(
                "gate_up_proj",
                "mlp",
                hidden,
                (Slice("gate_proj", 0, mid), Slice("up_proj", mid, mid)),
            ),
            Projection("down_proj", "mlp", mid, (Slice("down_proj", 0, hidden),)),
        )

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Leaf name -> (out_features, in_features) of every linear of one decoder layer."""
        return {
            part.leaf: (part.out_features, projection.in_features)
            for projection in self.projections
            for part in projection.slices
        }

    def module_path(self, layer: int, leaf: str) -> str:
        """`model.layers.0.self_attn.q_proj`: the name PEFT gives the linear, without prefix."""
        parent = next(
            projection.parent
            for projection in self.projections
            if any(part.leaf == leaf for part in projection.slices)
        )
        return f"model.layers.{layer}.{parent}.{leaf}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
        """Read the sizes out of a Hugging Face config; raises `model.invalid` naming the key."""
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise LoradError(
                "model.invalid",
                f"{where} has no model_type",
                hint="point at the config.json of a Hugging Face causal language model",
            )
        hidden = config_size(config, "hidden_size", where)
        heads = config_size(config, "num_attention_heads", where)
        # head_dim is not hidden/heads in every model: Qwen3's is 128 unless the config says.
        usual = 128 if model_type == "qwen3" else hidden // heads
        head_dim = config_size(config, "head_dim", where, default=usual)
        return cls(
            model_type=model_type,
            hidden_size=hidden,
            num_layers=config_size(config, "num_hidden_layers", where, most=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=config_size(config, "num_key_value_heads", where, default=heads),
            head_dim=head_dim,
            intermediate_size=config_size(config, "intermediate_size", where),
            vocab_size=config_size(config, "vocab_size", where),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", model_type == "qwen2")),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            max_position_embeddings=config_size(
                config, "max_position_embeddings", where, default=2048
            ),
        )


def config_size(
    config: Mapping[str, Any],
    key: str,
    where: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = 2**31 - 1,
) -> int:
    """A whole number of the config within bounds; raises `model.invalid` naming the key."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise LoradError(
            "model.invalid",
            f"{where}: {key} is {value!r}, not a whole number from {least} to {most}",
            hint="the file must be the config.json of a decoder-only language model",
            details={"key": key},
        )
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory, or the file itself; `model.not_found`/`model.invalid`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise LoradError(
            "model.not_found",
            f"there is no {file}",
            hint="give a directory with a config.json, or a model id of the hub",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoradError("model.invalid", f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise LoradError("model.invalid", f"{file} is not a JSON object")
    return config
