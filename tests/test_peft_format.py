"""Adapters from many trainers: read exactly as PEFT reads them, or refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.adapters.patterns import PatternTable
from lorad.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_digest,
    open_adapter,
    read_adapter,
)
from lorad.adapters.regex import RegexUnsupported, compile_regex
from lorad.adapters.spectrum import read_factor
from lorad.errors import LoradError
from lorad.sizing.adapter_size import pack_adapter
from lorad.sizing.model_shape import ModelShape

LLAMA = ModelShape(
    model_type="llama",
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=40,
    vocab_size=50,
)
PHI3 = replace(LLAMA, model_type="phi3")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PARENT = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), "self_attn")
Tensors = dict[str, tuple[str, np.ndarray]]


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def save(directory: Path, config: dict[str, Any], tensors: Tensors, **header: Any) -> Path:
    """Write both files; `header` is put in front of the tensors' entries."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    encode: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "F32": np.float32,
        "F16": np.float16,
        "F64": np.float64,
        "BF16": bf16_bits,
    }
    entries, blobs, position = dict(header), [], 0
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(encode[dtype](values)).tobytes()
        offsets = [position, position + len(raw)]
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        blobs.append(raw)
        position += len(raw)
    text = json.dumps(entries).encode()
    (directory / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return directory


def lora_config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny/base",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        **changes,
    }


def fused_linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    return {p.name: (p.out_features, p.in_features) for p in shape.projections}


def factors(
    shape: ModelShape = LLAMA,
    leaves: tuple[str, ...] = ALL,
    layers: tuple[int, ...] = (0, 1, 2),
    rank: int | Callable[[int, str], int] = 4,
    dtype: str = "F32",
    prefix: str = "base_model.model.model.layers",
    suffix: str = "",
) -> Tensors:
    """Random factors, named the way PEFT names them unless told otherwise."""
    random = np.random.default_rng(7)
    linears = fused_linears(shape) if shape.model_type == "phi3" else shape.linears
    tensors: Tensors = {}
    for layer in layers:
        for leaf in leaves:
            out_features, in_features = linears[leaf]
            r = rank(layer, leaf) if callable(rank) else rank
            parent = "self_attn" if leaf in (*PARENT, "o_proj") else "mlp"
            name = f"{prefix}.{layer}.{parent}.{leaf}"
            tensors[f"{name}.lora_A{suffix}.weight"] = (
                dtype,
                random.standard_normal((r, in_features)),
            )
            tensors[f"{name}.lora_B{suffix}.weight"] = (
                dtype,
                random.standard_normal((out_features, r)),
            )
    return tensors


def refused(directory: Path, shape: ModelShape | None = LLAMA, **options: Any) -> LoradError:
    with pytest.raises(LoradError) as caught:
        read_adapter(directory, shape, **options)
    assert caught.value.hint
    return caught.value


def scalings(directory: Path, shape: ModelShape = LLAMA) -> dict[str, tuple[int, float]]:
    adapter = read_adapter(directory, shape)
    return {module.path: (module.rank, module.scaling) for module in adapter.modules}


# --- what is served -----------------------------------------------------------------------


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    save(tmp_path, lora_config(lora_alpha=6, use_rslora=True), factors())
    found = scalings(tmp_path)
    assert len(found) == 21
    assert set(found.values()) == {(4, 3.0)}


def test_patterns_give_each_module_its_own_rank_and_scaling(tmp_path: Path) -> None:
    config = lora_config(
        rank_pattern={"layers.2.mlp.up_proj": 6, "v_proj": 2}, alpha_pattern={"up_proj": 30}
    )
    own = {"v_proj": 2}
    tensors = factors(
        rank=lambda layer, leaf: 6 if (layer, leaf) == (2, "up_proj") else own.get(leaf, 4)
    )
    found = scalings(save(tmp_path, config, tensors))
    assert found["model.layers.1.self_attn.v_proj"] == (2, 4.0)
    assert found["model.layers.1.mlp.up_proj"] == (4, 7.5)
    assert found["model.layers.2.mlp.up_proj"] == (6, 5.0)
    assert found["model.layers.2.self_attn.q_proj"] == (4, 2.0)


def test_the_first_matching_pattern_of_the_file_wins(tmp_path: Path) -> None:
    pattern = {"mlp.up_proj": 6, "layers.0.mlp.up_proj": 2}
    save(tmp_path, lora_config(rank_pattern=pattern), factors(leaves=("up_proj",), rank=6))
    assert set(scalings(tmp_path).values()) == {(6, 8 / 6)}


def test_a_pattern_is_matched_against_the_name_in_training(tmp_path: Path) -> None:
    config = lora_config(alpha_pattern={r"^model\.language_model\.layers\.1\..*": 40})
    tensors = factors(leaves=("q_proj",), prefix="base_model.model.model.language_model.layers")
    found = scalings(save(tmp_path, config, tensors))
    assert [scaling for _, scaling in found.values()] == [2.0, 10.0, 2.0]


def test_a_string_target_modules_is_not_split_or_compiled(tmp_path: Path) -> None:
    config = lora_config(target_modules=r"((a+)+)+$|.*\.(k_proj|o_proj)")
    save(tmp_path, config, factors(leaves=("k_proj", "o_proj")))
    assert read_adapter(tmp_path, LLAMA).targets == ("k_proj", "o_proj")


def test_part_of_a_fused_group_leaves_the_rest_untouched(tmp_path: Path) -> None:
    save(tmp_path, lora_config(), factors(leaves=("k_proj", "up_proj")))
    adapter = read_adapter(tmp_path, LLAMA)
    layout = pack_adapter(LLAMA, adapter.module_ranks(), 4)
    ranks = [[part.rank for part in projection] for projection in layout.slices[0]]
    assert ranks == [[0, 4, 0], [0], [0, 4], [0]]


def test_some_layers_only(tmp_path: Path) -> None:
    config = lora_config(layers_to_transform=[1], layers_pattern="layers")
    save(tmp_path, config, factors(layers=(1,)))
    assert {module.layer for module in read_adapter(tmp_path, LLAMA).modules} == {1}


def test_mixed_dtypes_are_kept_apart(tmp_path: Path) -> None:
    tensors = factors(leaves=("q_proj",), layers=(0,))
    tensors |= factors(leaves=("v_proj",), layers=(0,), dtype="BF16")
    tensors |= factors(leaves=("o_proj",), layers=(0,), dtype="F16")
    save(tmp_path, lora_config(), tensors)
    with open_adapter(tmp_path, LLAMA) as (adapter, source):
        assert adapter.dtypes == ("BF16", "F16", "F32")
        for module in adapter.modules:
            values = tensors[module.b.name][1]
            error = {"F32": 1e-7, "F16": 1e-3, "BF16": 8e-3}[module.b.dtype]
            np.testing.assert_allclose(read_factor(source, module.b), values, rtol=error)


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("base_model.model.model.layers", ""),
        ("base_model.model.model.layers", ".default"),
        ("base_model.model.model.layers", ".my-adapter"),
        ("base_model.model.model.language_model.layers", ""),
        ("base_model.model.language_model.model.layers", ""),
        ("base_model.model.layers", ""),
        ("base_model.model._orig_mod.model.layers", ""),
        ("_orig_mod.base_model.model.model.layers", ""),
        ("model.layers", ""),
        ("layers", ""),
    ],
)
def test_prefixes_that_mean_the_same_module(tmp_path: Path, prefix: str, suffix: str) -> None:
    plain = save(tmp_path / "plain", lora_config(), factors())
    save(tmp_path / "odd", lora_config(), factors(prefix=prefix, suffix=suffix))
    assert scalings(tmp_path / "odd") == scalings(plain)
    assert adapter_digest(tmp_path / "odd") == adapter_digest(plain)


def test_wrappers_inside_the_path_are_left_out(tmp_path: Path) -> None:
    tensors = {
        name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."): value
        for name, value in factors(leaves=("q_proj",)).items()
    }
    found = read_adapter(save(tmp_path, lora_config(), tensors), LLAMA)
    assert found.modules[0].path == "model.layers.0.self_attn.q_proj"


def test_fused_linears_are_served_slice_by_slice(tmp_path: Path) -> None:
    leaves = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    save(tmp_path, lora_config(), factors(PHI3, leaves))
    with open_adapter(tmp_path, PHI3) as (adapter, source):
        assert adapter.targets == tuple(sorted(leaves))
        assert set(adapter.module_ranks()) == {
            PHI3.module_path(layer, leaf) for layer in range(3) for leaf in ALL
        }
        served = {factor.path: factor for factor in adapter.served_factors(PHI3)}
        assert served.keys() == adapter.module_ranks().keys()
        module = next(module for module in adapter.modules if module.leaf == "qkv_proj")
        whole = read_factor(source, module.b) @ read_factor(source, module.a)
        parts = [
            read_factor(source, one.b)[one.row_start : one.row_stop] @ read_factor(source, one.a)
            for one in (served[f"model.layers.0.self_attn.{leaf}"] for leaf in ALL[:3])
        ]
        assert [len(part) for part in parts] == [24, 12, 12]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_keys_of_a_newer_peft_at_neutral_values(tmp_path: Path) -> None:
    newer = {
        "brand_new_flag": False,
        "brand_new_config": None,
        "brand_new_list": [],
        "use_qalora": False,
        "qalora_group_size": 16,
        "kasa_config": None,
        "alora_invocation_tokens": None,
        "trainable_token_indices": None,
        "modules_to_save": None,
        "bias": "none",
        "loftq_config": {},
        "peft_version": "9.9.9",
    }
    config = {**lora_config(base_model_name_or_path=None), **newer}
    adapter = read_adapter(save(tmp_path, config, factors()), LLAMA)
    assert len(adapter.modules) == 21
    codes = {finding.code for finding in adapter.warnings}
    assert codes == {"base_name_missing", "unknown_config_keys"}


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone(tmp_path: Path, init: object) -> None:
    save(tmp_path, lora_config(init_lora_weights=init), factors())
    assert len(read_adapter(tmp_path, LLAMA).modules) == 21


def test_copies_of_base_weights_are_named_and_not_read(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    tensors = {**factors(), name: ("F32", np.zeros((24, 24)))}
    adapter = read_adapter(save(tmp_path, lora_config(), tensors), LLAMA)
    assert [finding.code for finding in adapter.warnings] == ["base_layer_ignored"]
    tensors[name] = ("F32", np.zeros((24, 23)))
    assert refused(save(tmp_path, lora_config(), tensors)).code == "adapter.base_mismatch"


def test_without_a_base_the_names_are_checked_and_the_shapes_are_not(tmp_path: Path) -> None:
    save(tmp_path, lora_config(), factors())
    assert len(read_adapter(tmp_path, None).modules) == 21
    other = replace(LLAMA, hidden_size=48)
    assert refused(tmp_path, other).code == "adapter.base_mismatch"


def test_a_missing_alpha_is_what_peft_makes_of_it(tmp_path: Path) -> None:
    config = lora_config()
    del config["lora_alpha"]
    save(tmp_path, config, factors())
    assert set(scalings(tmp_path).values()) == {(4, 2.0)}
    assert [w.code for w in read_adapter(tmp_path, LLAMA).warnings] == ["config_default_used"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"task_type": "FEATURE_EXTRACTION"}, "task_type_differs"),
        ({"target_modules": ["q_proj", "k_proj", "lost_proj"]}, "target_without_tensors"),
        ({"rank_pattern": {"no_such_module": 3}}, "pattern_unused"),
        ({"alpha_pattern": {r".*\.no_such_(a|b)": 3}}, "pattern_unused"),
    ],
)
def test_warnings(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    save(tmp_path, lora_config(**changes), factors())
    assert [finding.code for finding in read_adapter(tmp_path, LLAMA).warnings] == [code]


# --- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"use_dora": True}, "adapter.dora_unsupported"),
        ({"lora_bias": True}, "adapter.lora_bias_unsupported"),
        ({"bias": "all"}, "adapter.bias_unsupported"),
        ({"bias": "lora_only"}, "adapter.bias_unsupported"),
        ({"modules_to_save": ["lm_head"]}, "adapter.modules_to_save_unsupported"),
        ({"alora_invocation_tokens": [1, 2]}, "adapter.alora_unsupported"),
        ({"init_lora_weights": "pissa"}, "adapter.init_mutates_base"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter.init_mutates_base"),
        ({"init_lora_weights": "olora"}, "adapter.init_mutates_base"),
        ({"init_lora_weights": "loftq"}, "adapter.init_mutates_base"),
        ({"init_lora_weights": "corda"}, "adapter.init_mutates_base"),
        ({"init_lora_weights": "lora_ga"}, "adapter.init_mutates_base"),
        ({"init_lora_weights": 1}, "adapter.init_mutates_base"),
        ({"loftq_config": {"loftq_bits": 4}}, "adapter.init_mutates_base"),
        ({"trainable_token_indices": [3]}, "adapter.config_key_unsupported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "adapter.config_key_unsupported"),
        ({"target_parameters": ["mlp.experts"]}, "adapter.config_key_unsupported"),
        ({"use_qalora": True}, "adapter.config_key_unsupported"),
        ({"use_bdlora": {"nblocks": 2}}, "adapter.config_key_unsupported"),
        ({"kasa_config": {"beta": 1e-4}}, "adapter.config_key_unsupported"),
        ({"arrow_config": {"top_k": 3}}, "adapter.config_key_unsupported"),
        ({"monteclora_config": {"num_samples": 1}}, "adapter.config_key_unsupported"),
        ({"velora_config": {"scale": 1}}, "adapter.config_key_unsupported"),
        ({"megatron_config": {"a": 1}}, "adapter.config_key_unsupported"),
        ({"brand_new_key": 0}, "adapter.config_key_unsupported"),
        ({"brand_new_key": "on"}, "adapter.config_key_unsupported"),
        ({"peft_type": "IA3"}, "adapter.config_key_unsupported"),
        ({"peft_type": None}, "adapter.config_key_unsupported"),
        ({"r": 0}, "adapter.config_invalid"),
        ({"r": True}, "adapter.config_invalid"),
        ({"r": "8"}, "adapter.config_invalid"),
        ({"r": 4.0}, "adapter.config_invalid"),
        ({"r": 2**31}, "adapter.rank_exceeds_max"),
        ({"r": 513}, "adapter.rank_exceeds_max"),
        ({"r": 5}, "adapter.rank_mismatch"),
        ({"lora_alpha": "16"}, "adapter.config_invalid"),
        ({"lora_alpha": None}, "adapter.config_invalid"),
        ({"lora_alpha": 10**400}, "adapter.config_invalid"),
        ({"lora_alpha": 0}, "adapter.scaling_invalid"),
        ({"lora_alpha": 1e30}, "adapter.scaling_invalid"),
        ({"lora_alpha": 1e-60}, "adapter.scaling_invalid"),
        ({"alpha_pattern": {"up_proj": 0}}, "adapter.scaling_invalid"),
        ({"alpha_pattern": {"up_proj": [1]}}, "adapter.config_invalid"),
        ({"rank_pattern": {"up_proj": -1}}, "adapter.config_invalid"),
        ({"rank_pattern": ["up_proj"]}, "adapter.config_invalid"),
        ({"rank_pattern": {"up_proj": 2}}, "adapter.rank_mismatch"),
        ({"rank_pattern": {r"(?=q)q_proj": 2}}, "adapter.pattern_unsupported"),
        ({"rank_pattern": {r"(q)\1": 2}}, "adapter.pattern_unsupported"),
        ({"rank_pattern": {"q" * 600: 2}}, "adapter.pattern_unsupported"),
        ({"use_rslora": "yes"}, "adapter.config_invalid"),
        ({"base_model_name_or_path": 3}, "adapter.config_invalid"),
    ],
)
def test_config_values_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    save(tmp_path, lora_config(**changes), factors())
    error = refused(tmp_path)
    assert error.code == code
    key = next(iter(changes))
    assert key in error.message or code in ("adapter.rank_mismatch", "adapter.scaling_invalid")


ROOT = "base_model.model.model"


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", "adapter.dora_unsupported"),
        ("layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "adapter.dora_unsupported"),
        ("layers.0.self_attn.q_proj.lora_B.bias", "adapter.lora_bias_unsupported"),
        ("layers.0.self_attn.q_proj.bias", "adapter.bias_unsupported"),
        ("embed_tokens.weight", "adapter.modules_to_save_unsupported"),
        ("lm_head.modules_to_save.weight", "adapter.modules_to_save_unsupported"),
        ("embed_tokens.lora_embedding_A", "adapter.target_unsupported"),
        ("embed_tokens.lora_embedding_B.default", "adapter.target_unsupported"),
        ("lm_head.lora_A.weight", "adapter.target_unsupported"),
        ("embed_tokens.token_adapter.trainable_tokens_delta", "adapter.target_unsupported"),
        ("layers.0.mlp.experts.3.gate_proj.lora_A.weight", "adapter.target_unsupported"),
        ("layers.0.mlp.gate.lora_A.weight", "adapter.target_unsupported"),
        ("layers.0.self_attn.qkv_proj.lora_A.weight", "adapter.target_unsupported"),
        ("layers.0.self_attn.q_proj.lora_diag", "adapter.unmatched_tensor"),
        ("layers.00.self_attn.q_proj.lora_A.weight", "adapter.unmatched_tensor"),
        ("vision_tower.layers.0.self_attn.q_proj.lora_A.weight", "adapter.unmatched_tensor"),
        ("layers.0.self_attn.q_proj.lora_A.second.weight", "adapter.unmatched_tensor"),
        ("layers.3.self_attn.q_proj.lora_A.weight", "adapter.unpaired_tensor"),
    ],
)
def test_every_tensor_is_applied_or_named(tmp_path: Path, extra: str, code: str) -> None:
    name = f"{ROOT}.{extra}"
    save(tmp_path, lora_config(), {**factors(), name: ("F32", np.ones((4, 24)))})
    error = refused(tmp_path)
    assert error.code == code
    assert name in error.message or code == "adapter.unpaired_tensor"


def test_embedding_and_head_are_both_named(tmp_path: Path) -> None:
    extra = ("embed_tokens.lora_embedding_A", "lm_head.lora_A.weight")
    ones = ("F32", np.ones((4, 24)))
    save(tmp_path, lora_config(), {**factors(), **{f"{ROOT}.{name}": ones for name in extra}})
    message = refused(tmp_path).message
    assert all(name in message for name in extra)


def test_tensors_without_numbers(tmp_path: Path) -> None:
    tensors = factors()
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name] = ("F32", np.zeros((0,)))
    error = refused(save(tmp_path, lora_config(), tensors))
    assert error.code == "adapter.empty_tensor"
    assert "layers.1.self_attn.q_proj.lora_A" in error.message
    assert error.details["count"] == 14


def test_no_module_matched_counts_them(tmp_path: Path) -> None:
    tensors = factors(prefix="base_model.model.transformer.h")
    error = refused(save(tmp_path, lora_config(), tensors))
    assert error.code == "adapter.no_module_matched"
    assert "0 of 21" in error.message


def test_a_file_without_lora_tensors_matches_nothing(tmp_path: Path) -> None:
    tensors: Tensors = {"model.embed_tokens.weight": ("F32", np.ones((50, 24)))}
    error = refused(save(tmp_path, lora_config(), tensors))
    assert error.code == "adapter.no_module_matched"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, ["model.layers.0.mlp.down_proj", "[24, 40]", "[32, 40]"]),
        ({"num_layers": 2}, ["model.layers.2.", "2 layers"]),
        ({"num_kv_heads": 1}, ["k_proj", "[12, 24]", "[6, 24]"]),
    ],
)
def test_another_base_is_named_with_both_shapes(
    tmp_path: Path, changes: dict[str, int], words: list[str]
) -> None:
    save(tmp_path, lora_config(), factors())
    error = refused(tmp_path, replace(LLAMA, **changes))
    assert error.code == "adapter.base_mismatch"
    assert all(word in error.message for word in words)


def test_a_rank_above_the_limit_names_both_numbers(tmp_path: Path) -> None:
    save(tmp_path, lora_config(r=9), factors(rank=9))
    assert read_adapter(tmp_path, LLAMA, max_lora_rank=9).max_rank == 9
    error = refused(tmp_path, max_lora_rank=8)
    assert error.code == "adapter.rank_exceeds_max"
    assert "9" in error.message
    assert "8" in error.message


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "code"),
    [
        ((4, 24), (24, 3), "adapter.rank_mismatch"),
        ((24, 4), (24, 4), "adapter.rank_mismatch"),
        ((4, 24, 1), (24, 4), "adapter.shape_mismatch"),
        ((4, 24), (24,), "adapter.shape_mismatch"),
        ((4, 20), (24, 4), "adapter.base_mismatch"),
    ],
)
def test_factors_that_do_not_fit(
    tmp_path: Path, shape_a: tuple[int, ...], shape_b: tuple[int, ...], code: str
) -> None:
    name = f"{ROOT}.layers.0.self_attn.q_proj.lora_"
    tensors: Tensors = {
        f"{name}A.weight": ("F32", np.ones(shape_a)),
        f"{name}B.weight": ("F32", np.ones(shape_b)),
    }
    assert refused(save(tmp_path, lora_config(), tensors)).code == code


def test_doubles_are_refused(tmp_path: Path) -> None:
    assert refused(save(tmp_path, lora_config(), factors(dtype="F64"))).code == (
        "adapter.dtype_unsupported"
    )


# --- files --------------------------------------------------------------------------------


def test_missing_files(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").code == "path.not_found"
    assert refused(tmp_path).code == "adapter.config_missing"
    (tmp_path / CONFIG_FILE).write_text(json.dumps(lora_config()))
    assert refused(tmp_path).code == "adapter.weights_missing"
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    error = refused(tmp_path)
    assert error.code == "adapter.unsafe_format"
    assert "safetensors" in error.hint
    assert refused(tmp_path / CONFIG_FILE).code == "path.not_found"


def test_a_truncated_file(tmp_path: Path) -> None:
    weights = save(tmp_path, lora_config(), factors()) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    error = refused(tmp_path)
    assert error.code == "adapter.weights_corrupt"
    assert str(weights.stat().st_size) in error.message


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_links_pipes_and_directories_are_not_read(tmp_path: Path, name: str) -> None:
    def fresh(kind: str) -> Path:
        directory = save(tmp_path / kind, lora_config(), factors())
        (directory / name).rename(directory / "elsewhere")
        return directory

    link, pipe, folder = fresh("link"), fresh("pipe"), fresh("folder")
    (link / name).symlink_to(link / "elsewhere")
    os.mkfifo(pipe / name)
    (folder / name).mkdir()
    for directory in (link, pipe, folder):
        assert refused(directory).code == "adapter.unsafe_format"


def test_an_unreadable_file(tmp_path: Path) -> None:
    directory = save(tmp_path, lora_config(), factors())
    (directory / WEIGHTS_FILE).chmod(0)
    if os.access(directory / WEIGHTS_FILE, os.R_OK):
        pytest.skip("this user reads everything")
    assert refused(directory).code == "path.permission"


# --- digest -------------------------------------------------------------------------------


def test_the_digest_depends_on_what_is_served_alone(tmp_path: Path) -> None:
    tensors = factors(leaves=("q_proj", "v_proj"))
    digest = adapter_digest(save(tmp_path / "a", lora_config(), tensors))
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)
    turned = dict(reversed(tensors.items()))
    config = lora_config(lora_dropout=0.1, peft_version="0.21.0", new=None, r=4, lora_alpha=8.0)
    save(tmp_path / "b", config, turned, __metadata__={"format": "pt"})
    (tmp_path / "b" / CONFIG_FILE).write_text(json.dumps(config, indent=4, sort_keys=True))
    assert adapter_digest(tmp_path / "b") == digest


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}]
)
def test_the_digest_changes_with_the_scaling(tmp_path: Path, changes: dict[str, Any]) -> None:
    tensors = factors(leaves=("q_proj", "v_proj"))
    plain = adapter_digest(save(tmp_path / "a", lora_config(), tensors))
    assert adapter_digest(save(tmp_path / "b", lora_config(**changes), tensors)) != plain


def test_the_digest_changes_with_one_bit_and_with_the_dtype(tmp_path: Path) -> None:
    tensors = factors(leaves=("q_proj",))
    directory = save(tmp_path / "a", lora_config(), tensors)
    plain = adapter_digest(directory)
    raw = bytearray((directory / WEIGHTS_FILE).read_bytes())
    raw[-1] ^= 1
    (directory / WEIGHTS_FILE).write_bytes(raw)
    half = save(tmp_path / "h", lora_config(), factors(leaves=("q_proj",), dtype="F16"))
    brain = save(tmp_path / "b", lora_config(), factors(leaves=("q_proj",), dtype="BF16"))
    assert len({plain, adapter_digest(directory), adapter_digest(half), adapter_digest(brain)}) == 4


# --- PEFT is the oracle -------------------------------------------------------------------

MODULE_PATHS = [
    LLAMA.module_path(layer, leaf) for layer in (0, 2) for leaf in ("q_proj", "up_proj")
]
SUFFIXES = [
    path.split(".", dots)[-1] for path in MODULE_PATHS for dots in range(path.count(".") + 1)
]
REGEXES = [
    r".*\.(q|v)_proj",
    r"layers\.[01]\.mlp\..*",
    r"^model\.layers\.1\..*",
    r"\d+\.self_attn\.\w+",
    r"(?:self_attn|mlp)\.[a-z]+_proj",
    r"layers.0.+",
    r"q.proj",
    r".*v_pro?j{1,2}",
    r"layers",
    r"[^m].*_proj$",
]
KEYS = st.sampled_from([*SUFFIXES, *REGEXES])
CONFIGS = st.fixed_dictionaries(
    {
        "r": st.integers(1, 9),
        "lora_alpha": st.one_of(st.integers(1, 64), st.floats(0.125, 64, width=16)),
        "use_rslora": st.booleans(),
        "rank_pattern": st.dictionaries(KEYS, st.integers(1, 9), max_size=4),
        "alpha_pattern": st.dictionaries(KEYS, st.integers(1, 64), max_size=4),
    }
)


@pytest.fixture(scope="module")
def llama_factory() -> Callable[[], Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=LLAMA.hidden_size,
        num_hidden_layers=LLAMA.num_layers,
        num_attention_heads=LLAMA.num_heads,
        num_key_value_heads=LLAMA.num_kv_heads,
        head_dim=LLAMA.head_dim,
        intermediate_size=LLAMA.intermediate_size,
        vocab_size=LLAMA.vocab_size,
    )
    return lambda: LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@settings(max_examples=40, deadline=None)
@given(chosen=CONFIGS)
def test_ranks_and_scalings_are_those_of_peft(
    llama_factory: Callable[[], Any],
    tmp_path_factory: pytest.TempPathFactory,
    chosen: dict[str, Any],
) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    for key in ("rank_pattern", "alpha_pattern"):  # PEFT saves them sorted
        chosen[key] = dict(sorted(chosen[key].items()))
    config = LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], **chosen)
    model = get_peft_model(llama_factory(), config)
    directory = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(directory)
    expected = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert scalings(directory) == expected


def test_every_tensor_that_peft_saves_is_placed(
    llama_factory: Callable[[], Any], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama_factory(), LoraConfig(r=4, target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    paths = {module.path for module in read_adapter(tmp_path, LLAMA).modules}
    assert paths == {LLAMA.module_path(layer, leaf) for layer in range(3) for leaf in ALL}


# --- pattern keys -------------------------------------------------------------------------

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.language_model.layers.3.mlp.up_proj",
    "layers.2.self_attn.k_proj",
]
ATOMS = st.sampled_from(
    [
        r"q",
        r".",
        r"_",
        r"\.",
        r"\d",
        r"\w",
        r"\D",
        r"[0-9]",
        r"[^.]",
        r"[a-z_]",
        r"proj",
        r"mlp",
        r"layers",
        r"(q|v)",
        r"(?:a|o|)",
        r"(mlp|self_attn)",
        r"^",
        r"$",
        r"\A",
        r"\Z",
        r"(l(a|y)*)+",
    ]
)
REPEATS = st.sampled_from(["", "", "", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{,2}", "{2,}"])
EXPRESSIONS = st.lists(st.tuples(ATOMS, REPEATS).map("".join), min_size=1, max_size=7).map("".join)


@settings(max_examples=400, deadline=None)
@given(expression=st.one_of(EXPRESSIONS, st.tuples(EXPRESSIONS, EXPRESSIONS).map("|".join)))
def test_the_automaton_agrees_with_re(expression: str) -> None:
    try:
        expected = [bool(re.match(rf"(.*\.)?({expression})$", path)) for path in PATHS]
    except re.error:
        return
    try:
        matches = compile_regex(expression)
    except RegexUnsupported as reason:
        assert "anchor" in str(reason) or "quantifier" in str(reason), expression
        return
    assert [matches(path) for path in PATHS] == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["q_proj", "q.proj", "proj", "mlp.down_proj", "layers.1.mlp", "x"])
def test_plain_keys_agree_with_re(key: str, path: str) -> None:
    expected = 5.0 if re.match(rf"(.*\.)?({key})$", path) else None
    assert PatternTable("rank_pattern", {key: 5.0}).get(path) == expected


@pytest.mark.parametrize(
    "bomb",
    [
        "(a+)+$",
        "(a|a)*b",
        "(.*)*(.*)*(.*)*z",
        "(((.*)*)*)*z",
        "((((((){200}){200}){200}){200}){200}){200}",
        "((.{50}){50}){50}",
        "(" * 200 + ")" * 200,
        "(.|.)" * 90,
        "(.?.?.?.?){60}z",
    ],
)
def test_regex_bombs_do_not_go_off(bomb: str) -> None:
    from time import perf_counter

    started = perf_counter()
    try:
        table = PatternTable("rank_pattern", {bomb: 1.0})
        for layer in range(300):
            table.get(f"model.layers.{layer}.self_attn." + "a" * 60)
    except LoradError as error:
        assert error.code == "adapter.pattern_unsupported"
    assert perf_counter() - started < 5.0


def test_a_scaling_is_a_plain_float(tmp_path: Path) -> None:
    save(tmp_path, lora_config(r=3, lora_alpha=7, use_rslora=True), factors(rank=3))
    assert set(scalings(tmp_path).values()) == {(3, 7 / math.sqrt(3))}
