"""Bytes of weights, pages and adapters, against transformers and PEFT on the meta device."""

from __future__ import annotations

import pytest

from lorad.errors import LoradError
from lorad.sizing.adapter_size import pack_adapter, uniform_modules
from lorad.sizing.memory_plan import page_bytes, pages_for, plan_slab, weight_bytes
from lorad.sizing.model_shape import ModelShape
from lorad.sizing.targets import resolve_targets

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def adapter_bytes(config: dict, targets: str, rank: int) -> int:
    shape = ModelShape.from_config(config)
    modules = uniform_modules(shape, resolve_targets(targets, shape), rank)
    return pack_adapter(shape, modules, 2).weight_nbytes


def test_llama_8b_reference_values():
    shape = ModelShape.from_config(LLAMA_8B)
    assert adapter_bytes(LLAMA_8B, "qv", 16) == 13_631_488
    assert adapter_bytes(LLAMA_8B, "all-linear", 16) == 83_886_080
    assert 8 * adapter_bytes(LLAMA_8B, "all-linear", 64) == 2_684_354_560
    assert page_bytes(shape, 16, 2) == 2 * 1024 * 1024
    assert weight_bytes(shape, 2) == 16_060_522_496


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"head_dim": 48}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_weights_of_served_families_equal_transformers(family, changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 200,
        "vocab_size": 1000,
        **changes,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    parameters = {id(p): p for p in model.parameters()}.values()
    shape = ModelShape.from_config({"model_type": family, **config})
    assert weight_bytes(shape, 2) == 2 * sum(p.numel() for p in parameters)


def test_slab_is_whole_pages_and_refuses_nothing_at_all():
    assert plan_slab(10 * 100 + 99, 100) == 10
    assert pages_for(1, 100) == 1
    assert pages_for(200, 100) == 2
    with pytest.raises(LoradError) as caught:
        plan_slab(99, 100)
    assert caught.value.code == "memory.no_capacity"


def test_unknown_target_names_it():
    with pytest.raises(LoradError) as caught:
        resolve_targets("q_proj,w1", ModelShape.from_config(LLAMA_8B))
    assert "'w1'" in caught.value.message
