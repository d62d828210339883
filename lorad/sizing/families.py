"""From a Hugging Face config.json to an `Architecture`, family by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from lorad.errors import LoradError
from lorad.sizing.architecture import Architecture, LayerGroup, Linear, Part, Split
from lorad.sizing.model_shape import MAX_LAYERS, ModelShape, config_size

# Families whose layers are those of `ModelShape`; the engine serves the first four.
SERVED = ("llama", "mistral", "qwen2", "qwen3")
_LLAMA_LIKE = (*SERVED, "smollm3", "granite")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "smollm3")

Config = Mapping[str, Any]


@dataclass(frozen=True)
class _Reader:
    """A config with the name of its file, for messages."""

    config: Config
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        return config_size(self.config, key, self.where, default)

    def count(self, key: str, default: int = 0) -> int:
        """A size that may also be 0, or left out."""
        return config_size(self.config, key, self.where, default, least=0)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def items(self, key: str) -> list[Any]:
        value = self.config.get(key)
        return value if isinstance(value, list) else []

    @property
    def experts(self) -> int:
        """Routed experts; transformers 5 saves some families' number under another's key."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        found = [name for name in names if self.config.get(name) is not None]
        return self.size(found[0] if found else names[0])

    @property
    def family(self) -> str:
        return str(self.config.get("model_type"))


def architecture(config: Config, where: str = "config.json") -> Architecture:
    """Raises `model.unsupported` for a family unknown here, `model.invalid` for a bad value."""
    model_type = str(config.get("model_type"))
    if isinstance(config.get("text_config"), Mapping):
        return _with_vision(config, where)
    build = _FAMILIES.get(model_type)
    if build is None:
        raise LoradError(
            "model.unsupported",
            f"{where}: the layers of model_type {model_type!r} are not known here",
            hint=f"known are {', '.join(sorted([*_FAMILIES, 'gemma3']))}",
            details={"model_type": model_type},
        )
    return build(_Reader(config, where))


def llama_like(shape: ModelShape) -> Architecture:
    """The architecture of a shape; exact for the families the engine serves."""
    linears = _biased(
        [
            *_attention(shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *_gated_mlp(shape.hidden_size, shape.intermediate_size),
        ],
        shape.biased_leaves,
    )
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    group = LayerGroup(shape.num_layers, linears, norms, shape.num_kv_heads, 2 * shape.head_dim)
    return Architecture(
        model_type=shape.model_type,
        attention=_attention_name(shape.num_heads, shape.num_kv_heads),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tied=shape.tie_word_embeddings,
        groups=(group,),
        other_elements=shape.hidden_size,
        max_position=shape.max_position_embeddings,
        served=shape.model_type in SERVED,
    )


def _attention_name(heads: int, kv_heads: int) -> str:
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def _biased(linears: list[Linear], leaves: tuple[str, ...]) -> tuple[Linear, ...]:
    return tuple(replace(x, bias=x.leaf in leaves) for x in linears)


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> list[Linear]:
    def column(leaf: str, count: int) -> Linear:
        out = count * head_dim
        return Linear("self_attn", leaf, out, hidden, Split.COLUMN, Part.ATTENTION, heads=(count,))

    return [
        column("q_proj", heads),
        column("k_proj", kv_heads),
        column("v_proj", kv_heads),
        Linear("self_attn", "o_proj", hidden, heads * head_dim, Split.ROW, Part.ATTENTION),
    ]


def _gated_mlp(
    hidden: int, middle: int, parent: str = "mlp", part: Part = Part.MLP, copies: int = 1
) -> list[Linear]:
    return [
        Linear(parent, "gate_proj", middle, hidden, Split.COLUMN, part, copies=copies),
        Linear(parent, "up_proj", middle, hidden, Split.COLUMN, part, copies=copies),
        Linear(parent, "down_proj", hidden, middle, Split.ROW, part, copies=copies),
    ]


def _router(hidden: int, experts: int, parent: str) -> Linear:
    return Linear(parent, "gate", experts, hidden, Split.REPLICATED, Part.ROUTER)


def _llama_family(reader: _Reader) -> Architecture:
    base = _base(reader)
    if base.model_type != "mistral":
        return base
    (group,) = base.groups
    return replace(base, groups=(replace(group, window=reader.count("sliding_window")),))


def _tied(reader: _Reader) -> bool:
    return reader.flag("tie_word_embeddings", reader.family in _TIED_BY_DEFAULT)


def _base(reader: _Reader) -> Architecture:
    """A dense decoder of these sizes; families change what differs in theirs."""
    shape = ModelShape.from_config(reader.config, reader.where)
    return replace(llama_like(shape), tied=_tied(reader))


def _gemma(reader: _Reader) -> Architecture:
    """Gemma 1: a Llama decoder with wide heads and a tied embedding."""
    head_dim = reader.size("head_dim", 256)
    return _base(_Reader({**reader.config, "head_dim": head_dim}, reader.where))


def _gemma2(reader: _Reader) -> Architecture:
    """Four norms a layer; every other layer looks back `sliding_window` tokens only."""
    return _sandwich(_gemma(reader), reader, pattern=2, qk_norm=False)


def _gemma3(reader: _Reader) -> Architecture:
    """Gemma 2 with q/k norms; of six layers one sees everything."""
    return _sandwich(_gemma(reader), reader, pattern=6, qk_norm=True)


def _sandwich(base: Architecture, reader: _Reader, pattern: int, qk_norm: bool) -> Architecture:
    (group,) = base.groups
    norms = 4 * base.hidden_size + (group.kv_head_elements if qk_norm else 0)
    group = replace(group, other_elements=norms)
    window = reader.size("sliding_window", 4096)
    wide = _full_attention_layers(reader, base.num_layers, pattern)
    groups = (
        replace(group, count=base.num_layers - wide, window=window),
        replace(group, count=wide),
    )
    return replace(base, groups=tuple(g for g in groups if g.count))


def _full_attention_layers(reader: _Reader, layers: int, pattern: int) -> int:
    kinds = reader.items("layer_types")
    if kinds:
        return min(layers, kinds.count("full_attention"))
    return layers // reader.size("sliding_window_pattern", pattern)


def _phi3(reader: _Reader) -> Architecture:
    """q|k|v and gate|up are one linear each, so one A matrix serves all their parts."""
    base = _base(reader)
    (group,) = base.groups
    q, k, v, o, gate, up, down = group.linears
    qkv = replace(
        q,
        leaf="qkv_proj",
        out_features=q.out_features + k.out_features + v.out_features,
        heads=(*q.heads, *k.heads, *v.heads),
    )
    gate_up = replace(gate, leaf="gate_up_proj", out_features=gate.out_features + up.out_features)
    window = reader.count("sliding_window")
    group = replace(group, linears=(qkv, o, gate_up, down), window=window)
    return replace(base, groups=(group,))


def _mixtral(reader: _Reader) -> Architecture:
    base = _base(reader)
    (group,) = base.groups
    experts, hidden = reader.experts, base.hidden_size
    middle = reader.size("intermediate_size")
    block = "block_sparse_moe"
    moe = [
        _router(hidden, experts, block),
        *_gated_mlp(hidden, middle, f"{block}.experts", Part.EXPERT, experts),
    ]
    return replace(
        base,
        groups=(replace(group, linears=(*group.linears[:4], *moe)),),
        experts_per_token=reader.size("num_experts_per_tok", 2),
    )


def _qwen_moe(reader: _Reader) -> Architecture:
    """Qwen2-MoE and Qwen3-MoE: sparse layers, and dense ones where the config says."""
    qwen2 = reader.family == "qwen2_moe"
    biased = qwen2 and reader.flag("qkv_bias", True)
    base = _base(reader)
    (group,) = base.groups
    attention = group.linears[:4]
    if biased:
        attention = _biased(list(attention), ("q_proj", "k_proj", "v_proj"))
    if not qwen2:
        group = replace(group, other_elements=group.other_elements + group.kv_head_elements)
    dense = replace(group, linears=(*attention, *group.linears[4:]))
    sparse = replace(group, linears=(*attention, *_qwen_experts(reader, base.hidden_size)))
    step = reader.size("decoder_sparse_step", 1)
    only_dense = reader.items("mlp_only_layers")
    is_sparse = [
        layer not in only_dense and (layer + 1) % step == 0 for layer in range(base.num_layers)
    ]
    return replace(
        base,
        groups=_runs(is_sparse, sparse, dense),
        experts_per_token=reader.size("num_experts_per_tok", 4),
    )


def _runs(is_sparse: list[bool], sparse: LayerGroup, dense: LayerGroup) -> tuple[LayerGroup, ...]:
    return tuple(
        replace(sparse if kind else dense, count=len(list(run))) for kind, run in groupby(is_sparse)
    )


def _qwen_experts(reader: _Reader, hidden: int) -> list[Linear]:
    experts = reader.experts
    middle = reader.size("moe_intermediate_size")
    linears = [
        _router(hidden, experts, "mlp"),
        *_gated_mlp(hidden, middle, "mlp.experts", Part.EXPERT, experts),
    ]
    if reader.family == "qwen2_moe":
        shared = reader.size("shared_expert_intermediate_size")
        gate = Linear("mlp", "shared_expert_gate", 1, hidden, Split.REPLICATED, Part.MLP)
        linears += [*_gated_mlp(hidden, shared, "mlp.shared_expert"), gate]
    return linears


def _deepseek(reader: _Reader) -> Architecture:
    """DeepSeek V2 and V3: latent attention, a few dense layers, then routed experts."""
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    layers = config_size(reader.config, "num_hidden_layers", reader.where, most=MAX_LAYERS)
    attention, norms = _latent_attention(reader, hidden, heads)
    experts, middle = reader.experts, reader.size("moe_intermediate_size")
    shared = reader.count("n_shared_experts") * middle
    moe = [
        _router(hidden, experts, "mlp"),
        *_gated_mlp(hidden, middle, "mlp.experts", Part.EXPERT, experts),
        *(_gated_mlp(hidden, shared, "mlp.shared_experts") if shared else []),
    ]
    latent = reader.size("kv_lora_rank") + reader.size("qk_rope_head_dim")
    dense_layers = min(layers, reader.count("first_k_dense_replace"))

    def group(count: int, mlp: list[Linear]) -> LayerGroup:
        return LayerGroup(count, (*attention, *mlp), norms, 1, latent)

    groups = (
        group(dense_layers, _gated_mlp(hidden, reader.size("intermediate_size"))),
        group(layers - dense_layers, moe),
    )
    return Architecture(
        model_type=reader.family,
        attention="MLA",
        hidden_size=hidden,
        vocab_size=reader.size("vocab_size"),
        tied=_tied(reader),
        groups=tuple(g for g in groups if g.count),
        other_elements=hidden,
        max_position=reader.size("max_position_embeddings", 4096),
        experts_per_token=reader.size("num_experts_per_tok", 8),
    )


def _latent_attention(reader: _Reader, hidden: int, heads: int) -> tuple[list[Linear], int]:
    """The linears of multi-head latent attention, and the elements of a layer's norms."""
    nope, rope = reader.size("qk_nope_head_dim"), reader.size("qk_rope_head_dim")
    value, latent = reader.size("v_head_dim"), reader.size("kv_lora_rank")
    q_rank = reader.count("q_lora_rank")

    def linear(leaf: str, out: int, inputs: int, split: Split, *parts: int) -> Linear:
        return Linear("self_attn", leaf, out, inputs, split, Part.ATTENTION, heads=parts)

    q_out = heads * (nope + rope)
    queries = (
        [
            linear("q_a_proj", q_rank, hidden, Split.REPLICATED),
            linear("q_b_proj", q_out, q_rank, Split.COLUMN, heads),
        ]
        if q_rank
        else [linear("q_proj", q_out, hidden, Split.COLUMN, heads)]
    )
    keys_values = [
        linear("kv_a_proj_with_mqa", latent + rope, hidden, Split.REPLICATED),
        linear("kv_b_proj", heads * (nope + value), latent, Split.COLUMN, heads),
        linear("o_proj", hidden, heads * value, Split.ROW),
    ]
    return queries + keys_values, 2 * hidden + q_rank + latent


def _with_vision(config: Config, where: str) -> Architecture:
    """Gemma 3 with its SigLIP tower: adapters are planned for the language model alone."""
    text = {"model_type": "gemma3_text", **_GEMMA3_TEXT_DEFAULTS, **config["text_config"]}
    if text["model_type"] != "gemma3_text":
        raise LoradError(
            "model.unsupported",
            f"{where}: of the models with a text_config only Gemma 3 is known here",
            hint="give the config.json of the language model alone",
            details={"model_type": text["model_type"]},
        )
    inner = architecture(text, f"{where}: text_config")
    vision = config.get("vision_config")
    tower = 0
    if isinstance(vision, Mapping):
        tower = _siglip_elements(_Reader(vision, f"{where}: vision_config"), inner.hidden_size)
    return replace(inner, model_type="gemma3", vision_elements=tower)


# Real files leave these out where they equal transformers' defaults of Gemma3TextConfig.
_GEMMA3_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


def _siglip_elements(vision: _Reader, text_hidden: int) -> int:
    """Parameters of the SigLIP tower of `vision_config` and of Gemma's projector."""
    hidden, middle = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    patch, layers = vision.size("patch_size", 14), vision.size("num_hidden_layers", 27)
    patches = (vision.size("image_size", 896) // patch) ** 2
    attention = 4 * hidden * (hidden + 1)
    mlp = hidden * (middle + 1) + middle * (hidden + 1)
    layer = attention + mlp + 4 * hidden
    embeddings = hidden * (3 * patch * patch + 1) + patches * hidden
    projector = hidden * text_hidden + hidden
    return embeddings + layers * layer + 2 * hidden + projector


_FAMILIES: dict[str, Callable[[_Reader], Architecture]] = {
    **dict.fromkeys(_LLAMA_LIKE, _llama_family),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
