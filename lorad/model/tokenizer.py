"""The tokenizer of a model directory: text to ids, ids to text, and one token's bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lorad.errors import LoradError
from lorad.model.token_bytes import token_decoding


class Tokenizer:
    """A `tokenizer.json` with what the model's other files say about its special tokens.

    `eos_token_ids` end a generation; `special_tokens` maps names such as `bos_token` to
    texts, as chat templates expect them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decoding = token_decoding(_decoder_settings(backend))
        self._special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and generation_config.json of `path`.

        Raises `model.not_found`, `model.invalid` or `model.unsupported`.
        """
        backend = _read_backend(path / "tokenizer.json")
        config = _read_tokenizer_config(path)
        named = _named_tokens(config)
        _mark_special(backend, named.values())
        return cls(
            backend,
            special_tokens=named,
            eos_token_ids=_eos_ids(path, backend, named.get("eos_token")),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        bos = self.special_tokens.get("bos_token")
        return self.backend.token_to_id(bos) if bos else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A rendered chat template has its special tokens already.

        Whether special tokens such as `<s>` are added is for tokenizer.json alone to say, as in
        transformers 5: `add_bos_token` of tokenizer_config.json is for models without that file.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding may skip this token (end of text, chat markers)."""
        return token_id in self._special_ids

    def has_token(self, token_id: int) -> bool:
        """False for ids that only pad the embedding: they decode to nothing."""
        return self.backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that goes before it: maybe only a part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = b"" if token is None else self.decoding.token_bytes(token)
            self._bytes[token_id] = known
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """Like `token_bytes`, at the very start of a text, where a word mark is no space."""
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self.decoding.first_token_bytes(token)

    def token_text(self, token_id: int) -> str:
        """The token as text, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")


def _decoder_settings(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The library gives a decoder's settings only as its pickled state, which is JSON."""
    decoder = backend.decoder
    if decoder is None:
        return None
    settings: dict[str, Any] = json.loads(decoder.__getstate__())
    return settings


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise LoradError(
            "model.not_found",
            f"there is no {file}",
            hint="a model directory needs a tokenizer.json; AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...) writes one",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise LoradError("model.invalid", f"{file} is not a tokenizer: {error}") from None
    # A file saved during training may cut or pad every input.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or {} when there is no such file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoradError("model.invalid", f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise LoradError("model.invalid", f"{file} is not a JSON object")
    return content


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older models name special tokens in a second file
        config |= _read_json(path / "special_tokens_map.json")
    return config


def _content(token: Any) -> str | None:
    """A token is written as its text or as an object with a `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and any other `..._token` that has a text."""
    found = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    return {key: text for key, text in found.items() if text is not None}


def _mark_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Mark tokens as special. One that the vocabulary lacks is left out: it has no embedding."""
    known = [token for token in tokens if backend.token_to_id(token) is not None]
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in known]
    )


def _eos_ids(path: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> set[int]:
    """Every id that ends a text.

    generation_config.json goes before config.json. The tokenizer's own end token counts as
    well: some chat models name their end of turn only there.
    """
    listed = _read_json(path / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _read_json(path / "config.json").get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if not all(type(index) is int and index >= 0 for index in ids):
        raise LoradError(
            "model.invalid",
            f"{path}: eos_token_id is {listed!r}, not a token id or a list of token ids",
        )
    own = backend.token_to_id(eos_token) if eos_token else None
    return ids if own is None else ids | {own}
