"""What the decoder needs to know beyond shapes: norms, rotary embedding, biases, windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape, config_size

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
        _check_heads(shape)
        theta, scaling = _rope(config)
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            shape=shape,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
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


def _invalid(what: str, key: str) -> LoradError:
    return LoradError(
        "model.invalid",
        f"config.json: {what}",
        hint="the file is damaged, or of a model that lorad does not know",
        details={"key": key},
    )


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number of the config; raises `model.invalid` naming the key."""
    value: Any = config.get(key)
    if value is None:
        value = default
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _invalid(f"{key} is {value!r}, not a positive number", key)
    return float(value)


def _check_heads(shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise _invalid(
            f"num_key_value_heads {shape.num_kv_heads} does not divide {shape.num_heads} heads",
            "num_key_value_heads",
        )
    if shape.head_dim % 2:
        raise _invalid(f"head_dim {shape.head_dim} is odd, so it cannot be rotated", "head_dim")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or the older two keys."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    if not isinstance(parameters, dict):
        raise _invalid(f"{key} is {parameters!r}, not an object", key)
    rotated = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise _unsupported(f"partial_rotary_factor {rotated}", "only whole heads are rotated")
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise _unsupported(f"{key} for {nested[0]} alone", "all layers must rotate alike")
    theta = _number(parameters if parameters.get("rope_theta") else config, "rope_theta", 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(parameters, "factor"))
    if kind == "llama3":
        longest = config.get("max_position_embeddings")
        return theta, RopeScaling(
            "llama3",
            _number(parameters, "factor"),
            _number(parameters, "low_freq_factor"),
            _number(parameters, "high_freq_factor"),
            int(_number(parameters, "original_max_position_embeddings", longest)),
        )
    raise _unsupported(f"rope scaling {kind!r}", "only default, linear and llama3 are computed")


def _sliding_windows(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, ...]:
    layers = range(shape.num_layers)
    used = shape.model_type == "mistral" or (
        shape.model_type in ("qwen2", "qwen3") and bool(config.get("use_sliding_window", False))
    )
    # A key that is missing has transformers' default; null means no window.
    if not used or config.get("sliding_window", 4096) is None:
        return tuple(None for _ in layers)
    window = config_size(config, "sliding_window", "config.json", 4096)
    if shape.model_type == "mistral":
        return tuple(window for _ in layers)
    types = config.get("layer_types")
    if types:
        if not isinstance(types, list) or len(types) != shape.num_layers:
            raise _invalid(f"layer_types does not name {shape.num_layers} layers", "layer_types")
        return tuple(window if types[i] == "sliding_attention" else None for i in layers)
    first = config.get("max_window_layers", 28)
    if type(first) is not int:
        raise _invalid(f"max_window_layers is {first!r}, not a whole number", "max_window_layers")
    return tuple(window if i >= first else None for i in layers)
