"""Prompts that a version must answer rightly before it is promoted: `promote --check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lorad.server.admin_fields import Fields, invalid

MOST_CHECKS = 256
_MOST_TOKENS = 1024
_DEFAULT_TOKENS = 64
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Check:
    """One prompt (text, or chat messages) and what its greedy answer must contain or be."""

    number: int  # from 1
    prompt: str | None
    messages: tuple[dict[str, Any], ...]
    must_contain: tuple[str, ...]
    tokens: tuple[int, ...]
    max_tokens: int

    def outcome(self, text: str, tokens: tuple[int, ...]) -> Outcome:
        missing = [part for part in self.must_contain if part not in text]
        if missing:
            return Outcome(self.number, f"the answer does not contain {missing[0][:80]!r}", text)
        if tokens[: len(self.tokens)] != self.tokens:
            got = list(tokens[: len(self.tokens)])
            return Outcome(
                self.number, f"the tokens are {got[:16]}, not {list(self.tokens[:16])}", text
            )
        return Outcome(self.number, "", text)


@dataclass(frozen=True, slots=True)
class Outcome:
    number: int
    wrong: str  # "" when the check passed
    answer: str

    def details(self) -> dict[str, Any]:
        return {"check": self.number, "wrong": self.wrong, "answer": self.answer[:_SHOWN]}


def read_checks(value: Any) -> tuple[Check, ...]:
    """The `checks` of a promote; raises `request.invalid` naming the check."""
    if not isinstance(value, list) or len(value) > MOST_CHECKS:
        raise invalid(f"'checks' must be a list of at most {MOST_CHECKS}")
    return tuple(_read_check(number, entry) for number, entry in enumerate(value, 1))


def _read_check(number: int, entry: Any) -> Check:
    where = f"check {number}"
    if not isinstance(entry, dict):
        raise invalid(f"{where} is not a JSON object")
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if (prompt is None) == (messages is None):
        raise invalid(f"{where} needs either a prompt or messages")
    if prompt is not None and not isinstance(prompt, str):
        raise invalid(f"{where}: the prompt must be a string")
    fields = Fields({k: v for k, v in entry.items() if k not in ("prompt", "messages")})
    contains, tokens = fields.raw("must_contain"), fields.raw("tokens")
    check = Check(
        number,
        prompt,
        _messages(where, messages),
        _texts(where, contains),
        _token_ids(where, tokens),
        int(fields.number("max_tokens", 1, _MOST_TOKENS, _DEFAULT_TOKENS)),
    )
    fields.end()
    if not check.must_contain and not check.tokens:
        raise invalid(f"{where} says nothing about the answer", "add must_contain or tokens")
    return check


def _messages(where: str, value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    whole = isinstance(value, list) and value
    if not whole or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        raise invalid(f"{where}: messages must be a list of objects with role and content")
    return tuple(value)


def _texts(where: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(part, str) and part for part in found):
        raise invalid(f"{where}: must_contain must be a string, or a list of them")
    return tuple(found)


def _token_ids(where: str, value: Any) -> tuple[int, ...]:
    found = value or []
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise invalid(f"{where}: tokens must be a list of token ids")
    return tuple(found)
