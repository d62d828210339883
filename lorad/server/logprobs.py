"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from lorad.engine.messages import TokenLogprob
from lorad.model.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity: the log-probability of a token that cannot come


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of chat: `bytes` is exact where `token` is a part of a character."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in logprobs], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [_chat_token(tokenizer, token, value) for token, value in entry.top]
    return {**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(logprob, _LEAST),
        "bytes": list(data),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions; knows at which character of the text a token starts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The object for the next tokens of the answer: one chunk's, or all of them."""
        tokens, values, tops, offsets = [], [], [], []
        for entry in logprobs:
            tokens.append(self._name(entry.token_id))
            values.append(max(entry.logprob, _LEAST))
            tops.append(self._top(entry))
            offsets.append(self._offset)
            if not self._tokenizer.is_special(entry.token_id):
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token_id)))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one, so up to one more than asked for."""
        tokens = [*entry.top, (entry.token_id, entry.logprob)]
        return {self._name(token): max(value, _LEAST) for token, value in tokens}

    def _name(self, token_id: int) -> str:
        """Text, or `bytes:\\xe2\\x80` for a part of a character, so that no two tokens collide."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
