"""What the decoder needs to know beyond shapes: norms, rotary embedding, biases, windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts ("linear" or "llama3")."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One Llama-family decoder."""

    shape: ModelShape
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    # Per layer: how many tokens back attention may look, None = all.
    sliding_windows: tuple[int | None, ...]
    dtype: str  # the checkpoint's: "bfloat16", "float16" or "float32"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config; `model.unsupported` names what would be served wrong."""
        shape = ModelShape.from_config(config)
        if shape.model_type not in SUPPORTED:
            raise _unsupported(
                f"model_type {shape.model_type!r}", f"lorad serves {', '.join(SUPPORTED)}"
            )
        if config.get("quantization_config"):
            raise _unsupported("a quantised checkpoint", "use the bf16 or fp16 checkpoint")
        act = config.get("hidden_act", "silu")
        if act != "silu":
            raise _unsupported(f"hidden_act {act!r}", "only silu is computed")
        theta, scaling = _rope(config)
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            shape=shape,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            # Qwen2 always has biases on q, k and v and never on o; it has no key for it.
            qkv_bias=True if shape.model_type == "qwen2" else attention_bias,
            o_bias=False if shape.model_type == "qwen2" else attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            sliding_windows=_sliding_windows(config, shape),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


def _unsupported(what: str, hint: str) -> LoradError:
    return LoradError("model.unsupported", f"this model has {what}", hint=hint)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or the older two keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(parameters["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    raise _unsupported(f"rope scaling {kind!r}", "only default, linear and llama3 are computed")


def _sliding_windows(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    layers = range(shape.num_layers)
    if shape.model_type == "mistral":
        return tuple(window for _ in layers)
    if not window or not config.get("use_sliding_window", False):
        return tuple(None for _ in layers)
    types = config.get("layer_types")
    if types:
        return tuple(window if types[i] == "sliding_attention" else None for i in layers)
    first = int(config.get("max_window_layers", shape.num_layers))
    return tuple(window if i >= first else None for i in layers)
