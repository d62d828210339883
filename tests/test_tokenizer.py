"""The tokenizer of a model directory, against transformers reading the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
TEXTS = [
    "",
    "Hello world",
    "  two  spaces\n\nand lines ",
    "naïve 日本語 👩‍👩‍👧‍👦",
    "<|im_start|>user\nhi<|im_end|>",
    "a<s>b</s>c <|tool|> d",
]


@pytest.fixture(scope="module")
def backend_json() -> str:
    """A byte-level BPE of the Llama 3 and Qwen kind, with its special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL[:-1],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Hello world, two spaces and lines, user"] * 2, trainer)
    backend.add_tokens([tokenizers.AddedToken("<|tool|>", special=False, normalized=False)])
    return backend.to_str()


@pytest.fixture
def model_dir(tmp_path: Path, backend_json: str) -> Path:
    (tmp_path / "tokenizer.json").write_text(backend_json, "utf-8")
    return tmp_path


def write(model_dir: Path, name: str, **content: Any) -> None:
    (model_dir / name).write_text(json.dumps(content), "utf-8")


BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "tokens named": {"bos_token": "<s>", "eos_token": "</s>"},
    "bos added": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    "bos and eos added": {
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    "bos refused": {"bos_token": "<s>", "add_bos_token": False},
    "bos wanted but not named": {"eos_token": "</s>", "add_bos_token": True},
    "extra special": {"eos_token": "</s>", "additional_special_tokens": ["<|tool|>"]},
    "plain token named": {"eos_token": "<|tool|>"},
    "own special": {"eos_token": "</s>", "tool_token": "<|tool|>"},
}


@pytest.mark.parametrize("post_processor", [None, BOS_TEMPLATE], ids=["plain", "bos in file"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_ids_text_and_special_tokens_are_those_of_transformers(
    model_dir: Path, config: dict[str, Any], post_processor: dict[str, Any] | None
) -> None:
    from transformers import AutoTokenizer

    if post_processor:
        spec = json.loads((model_dir / "tokenizer.json").read_text("utf-8"))
        spec["post_processor"] = post_processor
        spec["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        (model_dir / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    write(model_dir, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **config)
    theirs = AutoTokenizer.from_pretrained(str(model_dir))
    ours = Tokenizer.from_dir(model_dir)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id


def test_special_tokens_map_counts_when_the_config_lists_no_added_tokens(model_dir: Path) -> None:
    write(model_dir, "tokenizer_config.json", bos_token="</s>")
    write(model_dir, "special_tokens_map.json", bos_token={"content": "<s>"}, eos_token="</s>")
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    write(model_dir, "tokenizer_config.json", bos_token="</s>", added_tokens_decoder={})
    assert Tokenizer.from_dir(model_dir).special_tokens == {"bos_token": "</s>"}


def test_a_special_token_without_an_embedding_gets_no_id(model_dir: Path) -> None:
    size = Tokenizer.from_dir(model_dir).vocab_size
    write(model_dir, "tokenizer_config.json", pad_token="[PAD]", eos_token="</s>")
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.vocab_size == size
    assert max(tokenizer.encode("x [PAD] y")) < size


@pytest.mark.parametrize(
    ("generation", "config", "eos_token", "expected"),
    [
        (None, None, None, set()),
        (None, None, "</s>", {1}),
        (None, {"eos_token_id": 3}, None, {3}),
        (None, {"eos_token_id": [1, 3]}, None, {1, 3}),
        ({"eos_token_id": 1}, {"eos_token_id": 3}, None, {1}),
        ({"temperature": 0.6}, {"eos_token_id": 3}, None, {3}),
        ({"eos_token_id": [1]}, None, "<|im_end|>", {1, 3}),
        ({"eos_token_id": None}, {"eos_token_id": None}, "not in the vocabulary", set()),
    ],
)
def test_end_tokens_come_from_all_three_files(
    model_dir: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any] | None,
    eos_token: str | None,
    expected: set[int],
) -> None:
    if generation is not None:
        write(model_dir, "generation_config.json", **generation)
    if config is not None:
        write(model_dir, "config.json", **config)
    write(model_dir, "tokenizer_config.json", eos_token=eos_token)
    assert Tokenizer.from_dir(model_dir).eos_token_ids == expected


def test_token_bytes_join_to_the_text(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""
    assert not tokenizer.has_token(10**6)


def test_a_part_of_a_character_reads_as_the_replacement_character(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    first, *_ = tokenizer.encode("日")
    assert tokenizer.token_bytes(first) == "日".encode()[: len(tokenizer.token_bytes(first))]
    assert tokenizer.token_text(first) == "\ufffd"


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("tokenizer.json", "not json", "model.invalid"),
        ("tokenizer.json", "{}", "model.invalid"),
        ("tokenizer_config.json", "[]", "model.invalid"),
        ("tokenizer_config.json", "{", "model.invalid"),
        ("generation_config.json", '{"eos_token_id": "2"}', "model.invalid"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "model.invalid"),
        ("generation_config.json", '{"eos_token_id": [true]}', "model.invalid"),
    ],
)
def test_a_broken_file_is_named(model_dir: Path, file: str, content: str, code: str) -> None:
    (model_dir / file).write_text(content, "utf-8")
    with pytest.raises(LoradError) as caught:
        Tokenizer.from_dir(model_dir)
    assert caught.value.code == code
    assert str(model_dir) in caught.value.message


def test_a_directory_without_a_tokenizer_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(LoradError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_dir(tmp_path)
    assert caught.value.code == "model.not_found"
    assert caught.value.hint
