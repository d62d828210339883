"""Bytes of weights, pages and adapters, against transformers and PEFT on the meta device."""

from __future__ import annotations

import json
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.errors import LoradError
from lorad.sizing.adapter_size import ModuleRank, pack_adapter, uniform_modules
from lorad.sizing.architecture import Architecture
from lorad.sizing.catalogue import KnownModel, find_model, known_models
from lorad.sizing.families import architecture
from lorad.sizing.fleet import assign_kinds, kind_of_modules, kind_of_rank
from lorad.sizing.gpus import GPUS, find_gpu, parse_size
from lorad.sizing.memory_plan import (
    device_slab_bytes,
    page_bytes,
    pages_for,
    plan_slab,
    scratch_bytes,
    weight_bytes,
)
from lorad.sizing.model_shape import ModelShape, read_config
from lorad.sizing.prefill_memory import prefill_bytes
from lorad.sizing.targets import resolve_targets

LAYERS = 2  # of each model in the comparisons: the widths are the real ones

# config.json of meta-llama/Llama-3.1-8B and Qwen/Qwen3-30B-A3B as published, in full.
LLAMA_31_8B = json.loads(
    '{"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,'
    '"bos_token_id":128000,"eos_token_id":128001,"hidden_act":"silu","hidden_size":4096,'
    '"initializer_range":0.02,"intermediate_size":14336,"max_position_embeddings":131072,'
    '"mlp_bias":false,"model_type":"llama","num_attention_heads":32,"num_hidden_layers":32,'
    '"num_key_value_heads":8,"pretraining_tp":1,"rms_norm_eps":1e-05,"rope_scaling":{"factor":8.0,'
    '"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192,'
    '"rope_type":"llama3"},"rope_theta":500000.0,"tie_word_embeddings":false,'
    '"torch_dtype":"bfloat16","transformers_version":"4.43.0.dev0","use_cache":true,'
    '"vocab_size":128256}'
)
QWEN3_30B_A3B = json.loads(
    '{"architectures":["Qwen3MoeForCausalLM"],"attention_bias":false,"attention_dropout":0.0,'
    '"bos_token_id":151643,"decoder_sparse_step":1,"eos_token_id":151645,"head_dim":128,'
    '"hidden_act":"silu","hidden_size":2048,"initializer_range":0.02,"intermediate_size":6144,'
    '"max_position_embeddings":40960,"max_window_layers":48,"mlp_only_layers":[],'
    '"model_type":"qwen3_moe","moe_intermediate_size":768,"norm_topk_prob":true,'
    '"num_attention_heads":32,"num_experts":128,"num_experts_per_tok":8,"num_hidden_layers":48,'
    '"num_key_value_heads":4,"output_router_logits":false,"rms_norm_eps":1e-06,'
    '"rope_scaling":null,"rope_theta":1000000.0,"router_aux_loss_coef":0.001,'
    '"sliding_window":null,"tie_word_embeddings":false,"torch_dtype":"bfloat16",'
    '"transformers_version":"4.51.0","use_cache":true,"use_sliding_window":false,'
    '"vocab_size":151936}'
)


def known(name: str) -> KnownModel:
    found = find_model(name)
    assert found is not None
    return found


def shallow(config: dict[str, Any], layers: int = LAYERS) -> dict[str, Any]:
    """The same model with fewer layers, in the language model's own config."""
    text = config.get("text_config", config)
    return {**text, "num_hidden_layers": layers}


def distinct_shapes() -> list[KnownModel]:
    """The catalogue without models that differ in name and depth only."""
    seen: dict[str, KnownModel] = {}
    for model in known_models():
        config = shallow(model.config)
        config.pop("max_position_embeddings", None)
        seen.setdefault(json.dumps(config, sort_keys=True), model)
    return list(seen.values())


@cache
def meta_model(name: str, layers: int = LAYERS) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shallow(known(name).config, layers)
    family = config.pop("model_type")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))


def parameters_of(model: Any) -> int:
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def peft_bytes(name: str, rank: int, layers: int = LAYERS, **lora: Any) -> int:
    """Bytes of all tensors that PEFT would write for this adapter, in bfloat16."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=rank, task_type="CAUSAL_LM", **lora)
        wrapped = get_peft_model(meta_model(name, layers), config, low_cpu_mem_usage=True)
        # `state_dict` alone: get_peft_model_state_dict would look for a checkpoint of the base.
        state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        wrapped.unload()
    return 2 * sum(tensor.numel() for tensor in state.values())


def predicted_bytes(name: str, targets: str, rank: int, layers: int = LAYERS) -> int:
    arch = architecture(shallow(known(name).config, layers))
    return kind_of_rank(arch, resolve_targets(targets, arch), rank).nbytes(2)


# The catalogue


def test_every_model_has_its_published_parameter_count():
    wrong = {
        model.name: (architecture(model.config).elements, model.parameters)
        for model in known_models()
        if architecture(model.config).elements != model.parameters
    }
    assert wrong == {}


@pytest.mark.parametrize("model", distinct_shapes(), ids=lambda model: model.name)
def test_parameters_equal_transformers(model):
    arch = architecture(shallow(model.config))
    assert arch.elements == parameters_of(meta_model(model.name))


@pytest.mark.parametrize("model", distinct_shapes(), ids=lambda model: model.name)
def test_adapters_equal_what_peft_writes(model):
    assert predicted_bytes(model.name, "all-linear", 16) == peft_bytes(
        model.name, 16, target_modules="all-linear"
    )


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m", "gemma-3-1b"])
def test_whole_models_equal_peft(name):
    """All layers, and targets of which k and v are narrower than q."""
    layers = known(name).config["num_hidden_layers"]
    ours = predicted_bytes(name, "qv", 24, layers)
    assert ours == peft_bytes(name, 24, layers, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b"])
def test_experts_equal_peft_target_parameters(name):
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ours = predicted_bytes(name, "attn,experts-3d", 8)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    theirs = peft_bytes(name, 8, target_modules=attention, target_parameters=parameters)
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "published"), [("llama-3.1-8b", LLAMA_31_8B), ("qwen3-30b-a3b", QWEN3_30B_A3B)]
)
def test_catalogue_agrees_with_published_config(name, published):
    assert known(name).config.items() <= published.items()
    assert architecture(published) == architecture(known(name).config)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.2-1b",
        "mistral-7b-v0.1",
        "qwen2.5-0.5b",
        "qwen3-0.6b",
        "gemma-2-2b",
        "gemma-3-1b",
        "phi-4-mini",
        "smollm3-3b",
        "mixtral-8x7b",
        "qwen1.5-moe-a2.7b",
        "qwen3-30b-a3b",
        "deepseek-v2-lite",
    ],
)
def test_config_saved_by_transformers_is_read_the_same(name, tmp_path):
    """A file of today's transformers has other keys than one of the model's own day."""
    from transformers import AutoConfig

    config = dict(known(name).config)
    AutoConfig.for_model(config.pop("model_type"), **config).save_pretrained(tmp_path)
    saved = read_config(tmp_path)
    assert architecture(saved) == architecture(known(name).config)


def test_models_are_found_by_every_spelling():
    for text in ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B"):
        assert known(text).name == "llama-3.1-8b"
    names = [model.name for model in known_models()]
    assert len(set(names)) == len(names)
    assert find_model("gpt-2") is None


def test_unknown_family_is_refused_by_name():
    with pytest.raises(LoradError) as caught:
        architecture({**LLAMA_31_8B, "model_type": "mamba2"})
    assert caught.value.code == "model.unsupported"
    assert "mamba2" in caught.value.message


@pytest.mark.parametrize("value", [0, -1, "4096", True, None, 2**40])
def test_bad_size_names_the_key(value):
    with pytest.raises(LoradError) as caught:
        architecture({**LLAMA_31_8B, "hidden_size": value})
    assert caught.value.details == {"key": "hidden_size"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.none())
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_under_any_key_is_read_or_refused(data):
    """One key of a real config replaced by something else: never a traceback, never a hang."""
    model = data.draw(st.sampled_from(known_models()))
    config = json.loads(json.dumps(model.config))
    target = config
    if "text_config" in config and data.draw(st.booleans()):
        target = config[data.draw(st.sampled_from(["text_config", "vision_config"]))]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JUNK)
    try:
        arch = architecture(config)
    except LoradError as error:
        assert error.code.startswith("model.")
    else:
        assert arch.elements > 0
        assert arch.kv_elements(3) > 0


def test_sliding_windows_are_known():
    arch = architecture(known("gemma-3-1b").config)
    assert [(group.count, group.window) for group in arch.groups] == [(22, 512), (4, 0)]
    assert architecture(known("mistral-7b-v0.1").config).groups[0].window == 4096


# Served families: what the daemon allocates by


def test_llama_8b_reference_values():
    shape, arch = ModelShape.from_config(LLAMA_31_8B), architecture(LLAMA_31_8B)

    def adapter_bytes(targets: str, rank: int) -> int:
        return kind_of_rank(arch, resolve_targets(targets, arch), rank).nbytes(2)

    assert adapter_bytes("qv", 16) == 13_631_488
    assert adapter_bytes("all-linear", 16) == 83_886_080
    assert 8 * adapter_bytes("all-linear", 64) == 2_684_354_560
    assert page_bytes(shape, 16, 2) == page_bytes(arch, 16, 2) == 2 * 1024 * 1024
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
    shape = ModelShape.from_config({"model_type": family, **config})
    assert weight_bytes(shape, 2) == 2 * parameters_of(model)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b-v0.3"])
@pytest.mark.parametrize("rank", [1, 7, 16, 65])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_planned_bytes_are_the_bytes_the_daemon_packs(name, rank, itemsize):
    """Alignment and all: the planner and `pack_adapter` may not differ by a byte."""
    config = shallow(known(name).config, 3)
    shape, arch = ModelShape.from_config(config), architecture(config)
    targets = resolve_targets("q_proj,v_proj,down_proj", arch)
    layout = pack_adapter(shape, uniform_modules(shape, targets.leaves, rank), itemsize)
    kind = kind_of_rank(arch, targets, rank)
    assert (kind.nbytes(itemsize), kind.allocated(itemsize)) == (
        layout.weight_nbytes,
        layout.nbytes,
    )


def test_mixed_ranks_of_one_adapter_are_packed_as_planned():
    config = shallow(known("smollm2-135m").config, 4)
    shape, arch = ModelShape.from_config(config), architecture(config)
    ranks = {
        shape.module_path(layer, leaf): ModuleRank(rank, 1.0)
        for layer, leaf, rank in [(0, "q_proj", 3), (1, "q_proj", 8), (3, "down_proj", 33)]
    }
    plain = {path.removeprefix("model."): found.rank for path, found in ranks.items()}
    kind = kind_of_modules(arch, "mixed", plain)
    layout = pack_adapter(shape, ranks, 2)
    assert (kind.nbytes(2), kind.allocated(2)) == (layout.weight_nbytes, layout.nbytes)
    assert kind.rank == 33
    with pytest.raises(LoradError) as caught:
        kind_of_modules(arch, "wrong", {"layers.4.self_attn.q_proj": 8})
    assert caught.value.code == "adapter.base_mismatch"


def test_slab_is_whole_pages_and_refuses_nothing_at_all():
    assert plan_slab(10 * 100 + 99, 100) == 10
    assert pages_for(1, 100) == 1
    assert pages_for(200, 100) == 2
    with pytest.raises(LoradError) as caught:
        plan_slab(99, 100)
    assert caught.value.code == "memory.no_capacity"


def test_device_slab_is_what_weights_and_scratch_leave():
    shape = ModelShape.from_config(LLAMA_31_8B)
    scratch = scratch_bytes(shape, 8192, 32, 2, 16, max_model_len=4096, block_size=16)
    assert 0 < scratch.low < scratch.reserved < scratch.high
    wider = scratch_bytes(shape, 8192, 32, 2, 64, max_model_len=4096, block_size=16)
    # Per row and rank there are 14 partial sums of down_proj's input, 14336 wide.
    assert wider.lora - scratch.lora == 8192 * 14 * 48 * 4
    assert wider.graphs - scratch.graphs == 32 * 14 * 48 * 4
    grown = (wider.lora - scratch.lora) * 3 // 2 + wider.graphs - scratch.graphs
    assert wider.reserved - scratch.reserved == grown
    weights = weight_bytes(shape, 2)
    slab = device_slab_bytes(80 * 10**9, 0.9, weights, scratch.reserved)
    assert slab == 72 * 10**9 - weights - scratch.reserved
    assert device_slab_bytes(10 * 10**9, 0.9, weights, scratch.reserved) < 0


def test_scratch_grows_with_the_context():
    shape = ModelShape.from_config(LLAMA_31_8B)
    scratch = scratch_bytes(shape, 8192, 32, 2, 16, max_model_len=131072, block_size=16)
    assert scratch.prefill == 131072 * 2 * 8 * 128 * 2  # K and V of one layer
    assert scratch.rotary == 131072 * 2 * 128 * 2
    tensors = scratch.activations + scratch.logits + scratch.lora + scratch.prefill
    assert scratch.low == scratch.context[0] + tensors + scratch.rotary + scratch.graphs
    assert scratch.reserved - scratch.low == scratch.context[1] - scratch.context[0] + tensors // 2


def test_prefill_in_float32_repeats_heads_and_has_a_mask():
    arch = architecture(LLAMA_31_8B)
    one = prefill_bytes(arch, 8192, 1000, 16, 4)
    assert one == 4 * (1008 * 2 * 8 * 128 + 1000 * 2 * 32 * 128) + 256 * 1000 * 9
    assert prefill_bytes(arch, 100, 1000, 16, 4) == one - 156 * 1000 * 9
    equal_heads = architecture({**LLAMA_31_8B, "num_key_value_heads": 32})
    assert prefill_bytes(equal_heads, 100, 16, 16, 4) == 4 * 16 * 2 * 32 * 128 + 100 * 16 * 9
    assert prefill_bytes(arch, 8192, 1008, 16, 2, tp=4) == 2 * 1008 * 2 * 2 * 128


# Tensor parallelism


def per_gpu(name: str, tp: int) -> tuple[Architecture, int]:
    arch = architecture(known(name).config)
    return arch, arch.elements_per_gpu(tp)


def test_kv_heads_repeat_when_gpus_outnumber_them():
    arch = architecture(LLAMA_31_8B)
    assert arch.kv_elements(8) * 8 == arch.kv_elements(1)
    assert arch.kv_elements(16) == arch.kv_elements(8)
    k_proj = next(linear for _, linear in arch.linears() if linear.leaf == "k_proj")
    assert (k_proj.out_per_gpu(8), k_proj.out_per_gpu(16)) == (128, 128)


def test_latent_attention_is_not_divided():
    arch = architecture(known("deepseek-v3").config)
    assert arch.kv_elements(8) == arch.kv_elements(1) == 61 * 576


def test_fused_qkv_is_divided_part_by_part():
    arch = architecture(known("phi-4").config)
    qkv = next(linear for _, linear in arch.linears() if linear.leaf == "qkv_proj")
    # 40 query and 10 key heads over 4 GPUs: 10 + 3 + 3 heads of 128.
    assert qkv.out_per_gpu(4) == 16 * 128


@pytest.mark.parametrize("name", ["llama-3.1-70b", "mixtral-8x7b"])
def test_split_weights_add_up_but_for_what_every_gpu_holds(name):
    arch, each = per_gpu(name, 8)
    replicated = sum(group.count * group.other_elements for group in arch.groups)
    routers = sum(n * x.elements for n, x in arch.linears() if x.leaf == "gate")
    everywhere = replicated + routers + arch.other_elements
    assert each * 8 == arch.elements + 7 * everywhere


# Words


@pytest.mark.parametrize(
    ("name", "words", "leaves", "experts"),
    [
        ("llama-3.1-8b", "qv", ("q_proj", "v_proj"), ""),
        ("llama-3.1-8b", "attn", ("q_proj", "k_proj", "v_proj", "o_proj"), ""),
        ("llama-3.1-8b", "qv,mlp", ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"), ""),
        ("llama-3.1-8b", " up_proj , q_proj ", ("q_proj", "up_proj"), ""),
        ("phi-4", "all-linear", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), ""),
        ("qwen3-30b-a3b", "qv,experts", ("q_proj", "v_proj"), "experts"),
        ("qwen3-30b-a3b", "experts-3d", (), "experts-3d"),
        ("mixtral-8x7b", "all-linear", ("q_proj", "k_proj", "v_proj", "o_proj"), "experts-merged"),
    ],
)
def test_targets(name, words, leaves, experts):
    targets = resolve_targets(words, architecture(known(name).config))
    assert (targets.leaves, targets.experts) == (leaves, experts)


@pytest.mark.parametrize(
    ("name", "words"),
    [("llama-3.1-8b", "q_proj,w1"), ("phi-4", "qv"), ("llama-3.1-8b", "experts"), ("phi-4", ",")],
)
def test_targets_that_a_model_lacks_are_named(name, words):
    with pytest.raises(LoradError) as caught:
        resolve_targets(words, architecture(known(name).config))
    assert caught.value.code == "usage.invalid"


def test_kinds_go_by_name_and_else_in_turn():
    arch = architecture(LLAMA_31_8B)
    targets = resolve_targets("qv", arch)
    kinds = [kind_of_rank(arch, targets, rank) for rank in (8, 64)]
    assert assign_kinds(5, kinds, ()) == [0, 1, 0, 1, 0]
    assert assign_kinds(4, kinds, ("rank 64", "x", "y", "z"))[0] == 1


def test_sizes_are_read_in_both_worlds():
    assert parse_size("80GiB", "--vram") == parse_size("80G", "--vram") == 80 * 2**30
    assert parse_size("80GB", "--vram") == 80 * 10**9
    assert parse_size("1.5 MiB", "--vram") == 1536 * 1024
    assert parse_size("4096", "--vram") == 4096
    for text in ("", "GiB", "-1GiB", "1e9", "80 bananas"):
        with pytest.raises(LoradError):
            parse_size(text, "--vram")


def test_gpus_are_found_by_name():
    assert find_gpu("H200").name == "h200-141g"
    assert find_gpu("l4").name == "l4-24g"
    assert all(find_gpu(name).total_bytes > 10 * 2**30 for name in GPUS)
    with pytest.raises(LoradError) as caught:
        find_gpu("a100")
    assert "a100-40g, a100-80g" in caught.value.hint
    with pytest.raises(LoradError):
        find_gpu("tpu")
