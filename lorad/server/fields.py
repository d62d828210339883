"""Reads a JSON body field by field; every error names the field and what it must be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from lorad.errors import LoradError

_SHOWN = 60


def invalid(param: str, why: str) -> LoradError:
    return LoradError("request.invalid", f"{param}: {why}", details={"param": param})


def shown(value: Any) -> str:
    """A value from outside, short enough for an error message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def text_of(value: Any, param: str) -> str:
    """A JSON string that is real text: `"\\ud800"` is valid JSON but no character."""
    if not isinstance(value, str):
        raise invalid(param, f"must be a string, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(param, "has half of a surrogate pair, which is not a character") from None
    return value


def integer_of(value: Any, param: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise invalid(param, f"must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def number_of(value: Any, param: str, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        raise invalid(param, f"must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def list_of(value: Any, param: str, limit: int) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(param, f"must be a list, not {shown(value)}")
    if len(value) > limit:
        raise invalid(param, f"has {len(value)} entries, more than {limit}")
    return value


def object_of(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(param, f"must be an object, not {shown(value)}")
    return value


class Fields:
    """The members of one JSON object. `null` counts as absent, as OpenAI's clients send it."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._known: set[str] = set()

    def raw(self, name: str) -> Any:
        self._known.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str:
        """A required string."""
        value = self.raw(name)
        if value is None:
            raise invalid(self._prefix + name, "is required")
        return text_of(value, self._prefix + name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw(name)
        return None if value is None else integer_of(value, self._prefix + name, low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.raw(name)
        return default if value is None else number_of(value, self._prefix + name, low, high)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(self._prefix + name, f"must be true or false, not {shown(value)}")
        return bool(value)

    def unknown(self) -> Iterator[str]:
        """Names that no call has asked for and that hold a value."""
        for name, value in self._values.items():
            if name not in self._known and value is not None:
                yield self._prefix + name


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body.

    Refuses what parsers disagree on: duplicate names, NaN and Infinity, bytes that are not
    UTF-8, nesting and numbers without end.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_not_a_number
        )
    except UnicodeDecodeError as error:
        raise LoradError(
            "request.invalid", f"the body is not UTF-8 at byte {error.start}"
        ) from None
    except RecursionError:
        raise LoradError("request.invalid", "the body is nested too deeply") from None
    except ValueError as error:
        raise LoradError("request.invalid", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoradError("request.invalid", f"the body must be a JSON object, not {shown(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise invalid(shown(twice), "is given twice")
    return members


def _not_a_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
