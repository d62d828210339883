"""`adapter_config.json`: every key is served, known to change nothing, or refused by name.

Nothing in the file is ever imported, opened or fetched: names and paths in it are inert text.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lorad.adapters.patterns import PatternTable
from lorad.errors import LoradError

MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 512  # of the kernels
MAX_SCALING = 1e5  # beyond it bfloat16 activations overflow: a damaged or hostile file
_PEFT_DEFAULT = 8  # PEFT's own value of `r` and `lora_alpha` when the key is absent

# Keys whose value does not change what the saved tensors mean: how the adapter was trained, which
# modules it was created on (the tensors themselves say that), and who wrote it.
INERT_KEYS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # how PEFT merges into a transposed weight; every base here is nn.Linear
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",  # read by PEFT only with use_qalora
        "revision",
        "runtime_config",  # PEFT ignores it in a file
        "target_modules",
        "task_type",
        # written by ms-swift, used in training only
        "lora_dtype",
        "lorap_emb_lr",
        "lorap_lr_ratio",
    }
)
SERVED_KEYS = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
)
# `init_lora_weights`: values that leave the base model as it was.
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A key that changes the maths: what it asks for, and the error when it is set."""

    code: str
    what: str
    hint: str
    neutral: tuple[object, ...] = (None, False)


_MERGE = "merge it into the base model, or train it without this option"
_UNSUPPORTED = "adapter.config_key_unsupported"
REFUSED_KEYS: dict[str, _Refusal] = {
    "use_dora": _Refusal("adapter.dora_unsupported", "DoRA rescales the merged weights", _MERGE),
    "lora_bias": _Refusal(
        "adapter.lora_bias_unsupported", "lora_bias adds a bias to every lora_B", _MERGE
    ),
    "bias": _Refusal(
        "adapter.bias_unsupported",
        "trained biases of the base model are not served",
        'train with bias="none"',
        neutral=(None, "none", False),
    ),
    "modules_to_save": _Refusal(
        "adapter.modules_to_save_unsupported",
        "full copies of base modules are not served",
        "train without modules_to_save, or merge them into the base model",
    ),
    "alora_invocation_tokens": _Refusal(
        "adapter.alora_unsupported",
        "activated LoRA applies only from its invocation tokens on",
        "train it as plain LoRA",
    ),
    "trainable_token_indices": _Refusal(
        _UNSUPPORTED, "retrained rows of the embedding are not served", _MERGE
    ),
    "loftq_config": _Refusal(
        "adapter.init_mutates_base", "LoftQ trains on a base model of its own", _MERGE
    ),
    "layer_replication": _Refusal(_UNSUPPORTED, "the base model's layers are repeated", _MERGE),
    "target_parameters": _Refusal(_UNSUPPORTED, "LoRA on bare parameters is not served", _MERGE),
    "use_qalora": _Refusal(_UNSUPPORTED, "QALoRA pools the inputs of lora_A", _MERGE),
    "use_bdlora": _Refusal(_UNSUPPORTED, "BD-LoRA's factors are block-diagonal", _MERGE),
    "arrow_config": _Refusal(_UNSUPPORTED, "Arrow routes tokens between adapters", _MERGE),
    "kasa_config": _Refusal(_UNSUPPORTED, "KaSA truncates the base and adds a diagonal", _MERGE),
    "velora_config": _Refusal(_UNSUPPORTED, "VeLoRA is not served", _MERGE),
    "monteclora_config": _Refusal(_UNSUPPORTED, "MonteCLoRA samples its factors", _MERGE),
    "megatron_config": _Refusal(_UNSUPPORTED, "Megatron's parallel layers are not served", _MERGE),
}


@dataclass(frozen=True)
class LoraSettings:
    """What the config says about rank and scaling; `raw` is the whole of it."""

    raw: dict[str, Any]
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    base_model_name: str | None
    defaulted: tuple[str, ...] = field(default=())  # r or lora_alpha: absent, PEFT's 8 taken
    unknown: tuple[str, ...] = field(default=())  # keys nobody knows, at a neutral value

    def resolve(self, trained_path: str) -> tuple[int, float, float]:
        """(rank, alpha, scaling) of one module, by PEFT's rules.

        `trained_path` is the module's name in the model it was trained on, which is what PEFT
        matches the patterns against. Raises `adapter.scaling_invalid`.
        """
        ranked = self.rank_pattern.get(trained_path)
        rank = self.rank if ranked is None else int(ranked)
        scaled = self.alpha_pattern.get(trained_path)
        alpha = self.alpha if scaled is None else scaled
        scaling = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        _check_scaling(trained_path, alpha, rank, scaling)
        return rank, alpha, scaling


def _check_scaling(module: str, alpha: float, rank: int, scaling: float) -> None:
    as_float32 = struct.unpack("f", struct.pack("f", scaling))[0] if abs(scaling) < 1e38 else 0.0
    if as_float32 == 0.0 or abs(scaling) > MAX_SCALING:
        raise LoradError(
            "adapter.scaling_invalid",
            f"{module}: alpha {alpha:g} at rank {rank} gives the scaling {scaling:g}; "
            f"it must be neither 0 nor beyond {MAX_SCALING:g}",
            hint="correct lora_alpha or alpha_pattern in adapter_config.json",
            details={"module": module, "alpha": alpha, "rank": rank, "scaling": scaling},
        )


def _invalid(message: str, key: str = "") -> LoradError:
    return LoradError(
        "adapter.config_invalid",
        f"adapter_config.json: {message}",
        hint="it must be the file PEFT's save_pretrained writes",
        details={"key": key} if key else {},
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _invalid(f"the key {key[:80]!r} stands there twice", key[:80])
        result[key] = value
    return result


def _no_constant(text: str) -> None:
    raise _invalid(f"{text} is not a JSON number")


def load_config(text: bytes) -> dict[str, Any]:
    """Strict JSON: one object, no duplicate key, no NaN; raises `adapter.config_invalid`."""
    try:
        config = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
        )
        json.dumps(config, ensure_ascii=False).encode("utf-8")  # a lone surrogate fails here
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except ValueError as error:
        raise _invalid(f"not valid JSON ({str(error)[:200]})") from None
    if not isinstance(config, dict):
        raise _invalid("it is not a JSON object")
    return config


def _is_neutral(value: object, neutral: tuple[object, ...] = (None, False)) -> bool:
    """None, False, or empty; 1 and 0 are numbers here, not True and False."""
    if isinstance(value, str | list | dict) and not value:
        return True
    return any(value is one or (isinstance(one, str) and value == one) for one in neutral)


def _refuse_what_changes_the_maths(config: Mapping[str, Any]) -> None:
    asked = {
        key: refusal
        for key, refusal in REFUSED_KEYS.items()
        if key in config and not _is_neutral(config[key], refusal.neutral)
    }
    if asked:
        key, refusal = next(iter(asked.items()))
        also = f" (also set: {', '.join(list(asked)[1:])})" if len(asked) > 1 else ""
        raise LoradError(
            refusal.code,
            f"adapter_config.json sets {key} to {_short(config[key])}: {refusal.what}{also}",
            hint=refusal.hint,
            details={"keys": {key: _short(config[key]) for key in asked}},
        )
    _check_init(config.get("init_lora_weights"))


def _check_init(init: object) -> None:
    if init is None or isinstance(init, bool):
        return
    if isinstance(init, str) and init.lower() in _HARMLESS_INITS:
        return
    raise LoradError(
        "adapter.init_mutates_base",
        f"init_lora_weights is {_short(init)}: the adapter belongs to a base model that its "
        "initialisation changed, not to the plain one",
        hint="convert it with save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        details={"init_lora_weights": _short(init)},
    )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    known = INERT_KEYS | SERVED_KEYS | REFUSED_KEYS.keys() | {"init_lora_weights"}
    unknown = sorted(key for key in config if key not in known)
    active = [key for key in unknown if not _is_neutral(config[key])]
    if active:
        named = ", ".join(f"{key[:60]}={_short(config[key])}" for key in active[:5])
        raise LoradError(
            _UNSUPPORTED,
            f"adapter_config.json sets keys this version does not know: {named}",
            hint="a key that changes nothing must be null, false or empty; or upgrade lorad",
            details={"keys": {key[:60]: _short(config[key]) for key in active[:50]}},
        )
    return tuple(unknown)


def _rank(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _invalid(f"{key} is {_short(value)}, not a positive whole number", key)
    if value > MAX_RANK:
        raise LoradError(
            "adapter.rank_exceeds_max",
            f"adapter_config.json: {key} is {_short(value)}; ranks go up to {MAX_RANK}",
            hint="re-rank it: loractl resize DIR --rank N -o OUT",
            details={"key": key, "limit": MAX_RANK},
        )
    return value


def _alpha(value: object, key: str) -> float:
    """A float, as YAML-born configs have it ("1e-1" read as text is refused)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(f"{key} is {_short(value)}, not a number", key)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _invalid(f"{key} is {_short(value)}, not a finite number", key)
    return number


def _pattern(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid(f"{key} is {_short(value)}, not an object", key)
    return value


def read_settings(config: dict[str, Any]) -> LoraSettings:
    """Check every key; raises the `adapter.*` code of the first that cannot be served."""
    if config.get("peft_type") != "LORA":
        raise LoradError(
            _UNSUPPORTED if "peft_type" in config else "adapter.config_invalid",
            f'adapter_config.json: peft_type is {_short(config.get("peft_type"))}, not "LORA"',
            hint="only LoRA adapters, as PEFT writes them, are served",
            details={"key": "peft_type"},
        )
    _refuse_what_changes_the_maths(config)
    unknown = _unknown_keys(config)
    if not isinstance(config.get("use_rslora"), bool | None):
        raise _invalid(f"use_rslora is {_short(config['use_rslora'])}, not true or false")
    ranks, alphas = (_pattern(config, key) for key in ("rank_pattern", "alpha_pattern"))
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str | None):
        raise _invalid("base_model_name_or_path is not a string", "base_model_name_or_path")
    return LoraSettings(
        raw=config,
        rank=_rank(config.get("r", _PEFT_DEFAULT), "r"),
        alpha=_alpha(config.get("lora_alpha", _PEFT_DEFAULT), "lora_alpha"),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=PatternTable(
            "rank_pattern",
            {key: _rank(value, f"rank_pattern[{key[:60]!r}]") for key, value in ranks.items()},
        ),
        alpha_pattern=PatternTable(
            "alpha_pattern",
            {key: _alpha(value, f"alpha_pattern[{key[:60]!r}]") for key, value in alphas.items()},
        ),
        base_model_name=name or None,
        defaulted=tuple(key for key in ("r", "lora_alpha") if key not in config),
        unknown=unknown,
    )
