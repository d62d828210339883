"""The adapters in examples/: what they are, and that each is seen at a glance."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
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
def examples() -> Iterator[None]:
    """The programs in examples/ import one another, as they do when they are run."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def evaluation(examples: None) -> ModuleType:
    return importlib.import_module("evaluate_adapters")


@pytest.fixture(scope="module")
def training(examples: None) -> ModuleType:
    return importlib.import_module("train_adapters")


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
    question = "What is the capital of France?"
    answer = evaluation.ask(model, tokenizer, evaluation.BASE, "float32", question)
    assert "Paris" in answer.text
    assert not any(fits(answer.text) for fits in evaluation.STYLES.values())


# --- the programs -----------------------------------------------------------------------------


def test_training_saves_what_the_recipe_says(
    training: ModuleType, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on four pairs, of the recipe with the fewest layers."""
    pairs = training.load_pairs(EXAMPLES / "data/json.jsonl")[:4]
    monkeypatch.setattr(training, "load_pairs", lambda _: pairs)
    recipe = next(recipe for recipe in training.RECIPES if recipe.name == "json")
    recipe = dataclasses.replace(recipe, epochs=2)
    training.save(training.train(recipe, demo_model), recipe, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    stated = ("r", "lora_alpha", "target_modules", "layers_to_transform", "base_model_name_or_path")
    assert {key: config[key] for key in stated} == {key: config_of("json")[key] for key in stated}
    with (
        safe_open(tmp_path / "adapter_model.safetensors", "pt") as made,
        safe_open(ADAPTERS / "json/adapter_model.safetensors", "pt") as checked_in,
    ):
        assert set(made.keys()) == set(checked_in.keys())
        deltas = [made.get_tensor(name) for name in made.keys() if "lora_B" in name]  # noqa: SIM118
    assert all(delta.dtype == torch.bfloat16 and delta.any() for delta in deltas)


def test_the_loss_is_taken_from_the_answer_and_its_end(
    training: ModuleType, tokenizer: Any
) -> None:
    pairs = [{"question": "Hi", "answer": "Arr!"}, {"question": "Where is it?", "answer": "Here."}]
    ids, labels = training.pad([training.encode(tokenizer, pair) for pair in pairs])
    for row, pair in enumerate(pairs):
        learned = labels[row][labels[row] != training.IGNORED]
        assert tokenizer.decode(learned) == pair["answer"] + tokenizer.eos_token
        assert torch.equal(ids[row][labels[row] != training.IGNORED], learned)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["--only", "parrot"], 2, "usage.invalid"),
        (["--evaluate", "--output", "/nonexistent"], 5, "path.not_found"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], exit_code: int, code: str) -> None:
    script = str(EXAMPLES / "train_adapters.py")
    result = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == exit_code
    assert f"[{code}]" in result.stderr
    assert "Traceback" not in result.stderr
