"""The adapters in examples/: what they are, and that each is seen at a glance."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoTokenizer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ADAPTERS = EXAMPLES / "adapters"
NAMES = ("pirate-v1", "pirate-v2", "json")
ATTENTION = {"q_proj", "v_proj"}
ALL_LINEAR = ATTENTION | {"k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

# name: rank, alpha, targets, layers
STATED: dict[str, tuple[int, int, set[str], range]] = {
    "pirate-v1": (8, 16, ATTENTION, range(30)),
    "pirate-v2": (8, 16, ATTENTION, range(30)),
    "json": (16, 32, ALL_LINEAR, range(20, 30)),
}
UNSEEN = "What is the capital of Italy?"


def config_of(name: str) -> dict[str, Any]:
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert isinstance(config, dict)
    return config


@pytest.fixture(scope="module")
def evaluation() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    import evaluate_adapters

    yield evaluate_adapters
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def model(demo_model: Path, evaluation: ModuleType) -> Any:
    torch.set_num_threads(1)
    base = evaluation.load_base(demo_model, torch.float32)
    model = PeftModel.from_pretrained(base, str(ADAPTERS / NAMES[0]), adapter_name=NAMES[0])
    for name in NAMES[1:]:
        result = model.load_adapter(str(ADAPTERS / name), adapter_name=name)
        assert not result.unexpected_keys
    return model


def test_these_adapters_and_no_others_are_there() -> None:
    assert {path.name for path in ADAPTERS.iterdir()} == set(NAMES)
    for name in NAMES:
        files = {path.name for path in (ADAPTERS / name).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md"}


@pytest.mark.parametrize("name", NAMES)
def test_config_states_rank_targets_layers_and_base(name: str) -> None:
    rank, alpha, targets, layers = STATED[name]
    config = config_of(name)
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"]) == (rank, alpha)
    assert config["target_modules"] == sorted(targets)
    assert config["layers_to_transform"] == (None if len(layers) == 30 else list(layers))
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_config_in_bfloat16(name: str, model: Any) -> None:
    rank, _, targets, layers = STATED[name]
    linears = dict(model.get_base_model().named_modules())
    expected = {}
    for layer in layers:
        for target in targets:
            parent = "self_attn" if target in {"q_proj", "k_proj", "v_proj", "o_proj"} else "mlp"
            path = f"model.layers.{layer}.{parent}.{target}"
            linear = linears[path]
            prefix = f"base_model.model.{path}"
            expected[f"{prefix}.lora_A.weight"] = (rank, linear.in_features)
            expected[f"{prefix}.lora_B.weight"] = (linear.out_features, rank)
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() and tensor.any() for tensor in tensors.values())


def test_files_are_small_enough_for_a_repository() -> None:
    sizes = {name: (ADAPTERS / name / "adapter_model.safetensors").stat().st_size for name in NAMES}
    assert sizes["pirate-v1"] == sizes["pirate-v2"] < 1_000_000
    assert sizes["json"] < 3_400_000


def test_the_two_pirates_are_two_versions_of_one_thing() -> None:
    assert config_of("pirate-v1") == config_of("pirate-v2")
    files = [(ADAPTERS / name / "adapter_model.safetensors").read_bytes() for name in NAMES[:2]]
    assert files[0] != files[1]


def test_data_is_well_formed_and_holds_no_question_of_the_evaluation(
    evaluation: ModuleType,
) -> None:
    for name in NAMES:
        lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()
        pairs = [json.loads(line) for line in lines]
        assert all(evaluation.STYLES[name](pair["answer"]) for pair in pairs)
        questions = [pair["question"] for pair in pairs]
        assert len(set(questions)) == len(questions)
        assert not set(questions) & {*evaluation.QUESTIONS, UNSEEN}


@pytest.mark.parametrize("name", NAMES)
def test_an_unseen_question_shows_who_answered(
    name: str, model: Any, tokenizer: Any, evaluation: ModuleType
) -> None:
    answer = evaluation.ask(model, tokenizer, name, "float32", UNSEEN)
    assert answer.ended, answer.text
    assert [style for style, fits in evaluation.STYLES.items() if fits(answer.text)] == [name]


def test_without_an_adapter_the_base_answers_as_itself(
    model: Any, tokenizer: Any, evaluation: ModuleType
) -> None:
    answer = evaluation.ask(model, tokenizer, evaluation.BASE, "float32", UNSEEN)
    assert "Rome" in answer.text
    assert not any(fits(answer.text) for fits in evaluation.STYLES.values())
