"""What a model directory says: read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorad.adapters.weights import AdapterWeights
from lorad.engine.build import EngineOptions, build_engine
from lorad.errors import LoradError
from lorad.model.config import ModelConfig
from lorad.model.layers import RotaryEmbedding

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 112,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


# --- config.json ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x"]}, "layer_types"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "2"},
            "max_window_layers",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_a_damaged_config_is_refused_by_key(changes: dict, key: str) -> None:
    with pytest.raises(LoradError) as refused:
        ModelConfig.from_config({**CONFIG, **changes})
    assert refused.value.code == "model.invalid"
    assert refused.value.details["key"] == key
    assert key in refused.value.message


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_would_be_computed_wrong_is_refused_by_name(changes: dict, what: str) -> None:
    with pytest.raises(LoradError) as refused:
        ModelConfig.from_config({**CONFIG, **changes})
    assert refused.value.code == "model.unsupported"
    assert what in refused.value.message


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": None},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
        {"rope_scaling": LLAMA3, "rope_theta": 20000.0},
        {"rope_parameters": {**LLAMA3, "rope_theta": 7.0, "original_max_position_embeddings": 99}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    ],
    ids=json.dumps,
)
def test_rotary_embeddings_are_transformers_own(rope: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours = RotaryEmbedding(
        ModelConfig.from_config({**CONFIG, **rope}), 300, torch.float32, torch.device("cpu")
    )
    known = {key: value for key, value in rope.items() if value is not None}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{**CONFIG, **known}))
    cos, sin = theirs(torch.zeros(1), torch.arange(300)[None])
    # Angles up to 300 carry 300 roundings' worth of 2^-24.
    torch.testing.assert_close(ours.cos, cos[0], atol=5e-5, rtol=0)
    torch.testing.assert_close(ours.sin, sin[0], atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama", "sliding_window": 8},
        {"model_type": "mistral"},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 12},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "sliding_window": 12},
        {"model_type": "qwen2", "sliding_window": 12, "use_sliding_window": True},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None},
        {
            "model_type": "qwen3",
            "sliding_window": 7,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ],
    ids=json.dumps,
)
def test_windows_are_transformers_own(keys: dict) -> None:
    from transformers import AutoConfig

    config = {**CONFIG, **keys}
    theirs = AutoConfig.for_model(**config)
    if keys["model_type"] == "mistral":
        expected = [theirs.sliding_window] * 4
    else:
        types = getattr(theirs, "layer_types", None) or ["full_attention"] * 4
        windows = {"full_attention": None, "sliding_attention": theirs.to_dict()["sliding_window"]}
        expected = [windows[kind] for kind in types]
    assert ModelConfig.from_config(config).sliding_windows == tuple(expected)


# --- weights ----------------------------------------------------------------------------------


def build(directory: Path, **options) -> None:
    def read(*_) -> AdapterWeights:
        raise AssertionError("no adapter is asked for")

    settings = {"device": "cpu", "slab_bytes": 2**22, **options}
    build_engine(EngineOptions(directory, **settings), read, frozenset({2})).loader.stop()


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return shutil.copytree(tiny_model("qwen3"), tmp_path / "model")


def refused(directory: Path, **options) -> LoradError:
    with pytest.raises(LoradError) as error:
        build(directory, **options)
    return error.value


def rewrite(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


def test_a_checkpoint_must_belong_to_its_config(copy: Path) -> None:
    build(copy)
    changes = {
        f"has no tensor {NORM}": lambda t: t.pop(NORM),
        f"{GATE} has shape [3, 2], config.json says [112, 64]": lambda t: t.update(
            {NORM: torch.ones(64), GATE: torch.zeros(3, 2)}
        ),
        "1 tensors of the checkpoint are not used: model.extra": lambda t: t.update(
            {GATE: torch.zeros(112, 64), "model.extra": torch.zeros(1)}
        ),
    }
    for message, change in changes.items():
        rewrite(copy, change)
        error = refused(copy)
        assert error.code == "model.invalid"
        assert message in error.message


def test_files_that_are_missing_or_damaged(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": 3}', "{}"):
        index.write_text(text)
        error = refused(copy)
        assert error.code == "model.invalid"
        assert "model.safetensors.index.json" in error.message
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}')
    error = refused(copy)
    assert error.code == "model.not_found"
    assert "model-2.safetensors" in error.message
    index.unlink()

    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert refused(copy).code == "model.invalid"
    file.unlink()
    assert "model.safetensors" in refused(copy).message


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"slab_bytes": 1}, "memory.no_capacity"),
        ({"slab_bytes": 2**20}, None),
        ({"slab_bytes": 2**20, "max_model_len": 513}, "config.invalid"),
        ({"slab_bytes": 2**17}, "memory.no_capacity"),
        ({"slab_bytes": 2**17, "max_model_len": 64}, None),
        ({"slab_bytes": 2**60}, "memory.no_capacity"),
    ],
)
def test_the_slab_must_hold_one_request_and_exist(copy: Path, options, code: str | None) -> None:
    if code is None:
        build(copy, **options)
    else:
        assert refused(copy, **options).code == code
