"""Turns the tokens of one request into text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lorad.engine.stop_matcher import StopMatcher
from lorad.model.tokenizer import Tokenizer

# Enough of a prompt's end to know how its text goes on: a character is at most four bytes.
_PROMPT_TAIL_BYTES = 8


class Detokenizer:
    """Text of one sequence, a token at a time, in constant time a token.

    The deltas joined are what decoding prompt and tokens together adds to the prompt's text.
    Bytes of an unfinished character are held back, and so is text that may be the beginning
    of a stop string. One difference: bytes that are not UTF-8 become U+FFFD as soon as that is
    certain, where the library's byte fallback replaces the valid characters next to them too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._to_strip = tokenizer.decoding.strip_count
        self._matcher = StopMatcher(stop)
        self._follow(prompt_ids)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text: it and all after it are not shown."""
        return self._matcher.stopped

    def push(self, token_id: int) -> str:
        """The text that has become safe to show with this token; "" after a stop string."""
        return self._matcher.push(self._text(token_id))

    def flush(self) -> str:
        """The rest, when the request ends for a reason other than a stop string."""
        rest = self._matcher.push(self._utf8.decode(b"", final=True))
        return rest + self._matcher.flush()

    def _follow(self, prompt_ids: Sequence[int]) -> None:
        """Take up the state at the end of the prompt; only its last few tokens matter."""
        tail: list[int] = []
        size = 0
        for token_id in reversed(prompt_ids):
            if size >= _PROMPT_TAIL_BYTES:
                break
            if not self._skipped(token_id):
                tail.append(token_id)
                size += len(self._tokenizer.token_bytes(token_id))
        for token_id in reversed(tail):
            self._text(token_id)

    def _skipped(self, token_id: int) -> bool:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return True
        return not self._tokenizer.has_token(token_id)

    def _text(self, token_id: int) -> str:
        if self._skipped(token_id):
            return ""
        if self._at_start:
            self._at_start = False
            data = self._tokenizer.first_token_bytes(token_id)
        else:
            data = self._tokenizer.token_bytes(token_id)
        return self._stripped(self._utf8.decode(data))

    def _stripped(self, text: str) -> str:
        """Drop the word mark with which SentencePiece-style tokenizers begin every text."""
        while self._to_strip and text:
            if text[0] != self._tokenizer.decoding.strip_char:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text
