"""Streaming text: nothing lost, nothing shown too early, whatever the tokenizer and the script."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lorad.engine.detokenizer import Detokenizer
from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 3.14 o'clock, isn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "我能吞下玻璃而不伤身体。 今日は良い天気ですね。 안녕하세요 세계",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 é à",
    "def f(x):\n    return x ** 2\n\n\tdone",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["added token with spaces", "ünmapped"])
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """The Llama 2 and Mistral kind: SentencePiece BPE whose unknown characters become bytes."""
    tokens = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "t", "h", "e", ".", "é", "我"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁")]
    tokens += ["".join(pair) for pair in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(SPECIAL)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def metaspace(prepend: str = "always") -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend)


def word_level() -> Tokenizer:
    vocab = {token: index for index, token in enumerate([*SPECIAL, "<unk>", "one", "two"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "metaspace": metaspace(),
    "metaspace_never": metaspace("never"),
    "word_level": word_level(),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())

GRAPHEMES = st.sampled_from(
    [
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👍🏽",
        "e\u0301",
        "한",
        "我",
        "日本",
        "🙂",
        " ",
        "  ",
        "\n",
        "the",
        " the",
        "é",
        "a",
        "\u200d",
    ]
)
TEXTS = st.lists(GRAPHEMES | st.text(max_size=4), max_size=12).map("".join)


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def added_text(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """What decoding everything at once adds to the prompt: the reference."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + token_ids)
    assert whole.startswith(before)
    return whole[len(before) :]


@every_tokenizer
@given(text=TEXTS)
@example(text="👩‍👩‍👧‍👦👍🏽")
@settings(max_examples=100, deadline=None)
def test_deltas_join_to_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert "".join(stream(Detokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@every_tokenizer
@given(prompt=TEXTS, text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_deltas_go_on_where_the_prompt_ended(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    prompt_ids, token_ids = tokenizer.encode(prompt), tokenizer.encode(text)
    joined = "".join(stream(Detokenizer(tokenizer, prompt_ids), token_ids))
    # A byte-fallback run that spans the border is valid UTF-8 on both sides here.
    assert joined == added_text(tokenizer, prompt_ids, token_ids)


@given(token_ids=st.lists(st.integers(0, TOKENIZERS["byte_level"].vocab_size + 5), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_byte_level_tokens_decode_as_the_library_does(token_ids: list[int]) -> None:
    """Models do emit invalid UTF-8, special tokens, and ids that only pad the embedding."""
    tokenizer = TOKENIZERS["byte_level"]
    assert "".join(stream(Detokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    expected = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "".join(stream(shown, token_ids)) == expected


@given(token_ids=st.lists(st.integers(0, TOKENIZERS["metaspace"].vocab_size + 5), max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_metaspace_tokens_decode_as_the_library_does(token_ids: list[int]) -> None:
    for name in ("metaspace", "metaspace_never"):
        tokenizer = TOKENIZERS[name]
        deltas = stream(Detokenizer(tokenizer), token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)


def test_an_unfinished_character_is_held_back_until_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    token_ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert stream(Detokenizer(tokenizer), token_ids) == ["", "", "", "🙂", ""]


def test_complete_characters_of_a_byte_run_are_shown_at_once() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    token_ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "日本".encode()]
    assert stream(Detokenizer(tokenizer), token_ids) == ["", "", "日", "", "", "本", ""]


def test_invalid_bytes_never_stop_the_stream() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    bad = tokenizer.backend.token_to_id("<0xFF>")
    a = tokenizer.backend.token_to_id("a")
    assert stream(Detokenizer(tokenizer), [bad, bad, a]) == ["\ufffd", "\ufffd", "a", ""]


def test_a_character_cut_by_the_end_is_flushed_as_the_library_decodes_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode("ok 𓀀")[:-1]
    assert "".join(stream(Detokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)
    assert tokenizer.decode(token_ids).endswith("\ufffd")


def test_the_first_word_keeps_its_space_after_a_prompt_and_loses_it_at_the_start() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    the = tokenizer.backend.token_to_id("▁the")
    bos = tokenizer.backend.token_to_id("<s>")
    assert Detokenizer(tokenizer).push(the) == "the"
    assert Detokenizer(tokenizer, [bos]).push(the) == "the"
    assert Detokenizer(tokenizer, tokenizer.encode("a")).push(the) == " the"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert Detokenizer(tokenizer).push(end) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(end) == "<|im_end|>"


# --- stop strings -------------------------------------------------------------------------

STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The plain definition: grow the text until it ends with a stop string, longest first."""
    for end in range(1, len(text) + 1):
        ending = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=st.text("ab🙂", max_size=30), stop=STOPS)
@settings(max_examples=300, deadline=None)
def test_text_is_cut_before_the_first_stop_string(text: str, stop: tuple[str, ...]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=stop)
    joined = "".join(stream(detokenizer, tokenizer.encode(text)))
    assert (joined, detokenizer.stopped) == first_stop(text, stop)


@given(text=st.text("ab", max_size=30), stop=STOPS)
@settings(max_examples=200, deadline=None)
def test_no_shown_text_is_ever_part_of_a_stop_string_and_no_more_is_held_than_needed(
    text: str, stop: tuple[str, ...]
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=stop)
    shown, seen = "", ""
    for token_id in tokenizer.encode(text):
        shown += detokenizer.push(token_id)
        seen += tokenizer.token_text(token_id)
        if detokenizer.stopped is not None:
            break
        held = seen[len(shown) :]
        beginnings = {pattern[:size] for pattern in stop for size in range(len(pattern))}
        assert held == max(
            (
                seen[-size:] if size else ""
                for size in range(len(seen) + 1)
                if (seen[-size:] if size else "") in beginnings
            ),
            key=len,
        )


def test_a_stop_string_may_span_tokens_and_what_follows_it_is_not_shown() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("STOP",))
    deltas = stream(detokenizer, tokenizer.encode("go on STOP and more"))
    assert "".join(deltas) == "go on "
    assert detokenizer.stopped == "STOP"


def test_a_held_beginning_is_flushed_when_the_stop_string_never_comes() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("###END",))
    deltas = stream(detokenizer, tokenizer.encode("a ###EN"))
    assert "".join(deltas[:-1]) == "a "
    assert deltas[-1] == "###EN"
    assert detokenizer.stopped is None


def test_stop_strings_in_the_prompt_do_not_count() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("xx ST"), stop=("STOP",))
    assert "".join(stream(detokenizer, tokenizer.encode("OP on"))) == "OP on"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(TOKENIZERS["byte_level"], stop=("",))


# --- cost and unknown decoders ------------------------------------------------------------


def test_a_token_costs_the_same_at_the_end_of_a_long_text() -> None:
    """The worst cases: bytes that never form a character, and a stop string that nearly matches."""
    tokenizer = TOKENIZERS["byte_fallback"]
    bad = tokenizer.backend.token_to_id("<0x80>")
    a = tokenizer.backend.token_to_id("a")
    for token_id in (bad, a):
        detokenizer = Detokenizer(tokenizer, stop=("a" * 200 + "b",))
        took = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(2000):
                detokenizer.push(token_id)
            took.append(time.perf_counter() - start)
        # Quadratic cost would make the last tenth about 19 times the first.
        assert min(took[-3:]) < 5 * min(took[:3])


def test_a_long_prompt_costs_nothing() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("word ") * 200_000
    took = []
    for _ in range(5):
        start = time.perf_counter()
        Detokenizer(tokenizer, prompt)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(LoradError, match="WordPiece") as caught:
        Tokenizer(backend)
    assert caught.value.code == "model.unsupported"
