"""The fields of an admin request's JSON body, each checked by its type."""

from __future__ import annotations

from typing import Any

from lorad.adapter_ref import check_version_label
from lorad.errors import LoradError
from lorad.wire import check_text


def invalid(message: str, hint: str = "", **details: Any) -> LoradError:
    return LoradError("request.invalid", message, hint=hint, details=details)


class Fields:
    """The fields of a JSON object, taken out one by one, each of its type."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = dict(body)

    def raw(self, key: str) -> Any:
        """Of any type; None when it is absent."""
        return self._left.pop(key, None)

    def text(self, key: str, default: str = "") -> str:
        value = self._left.pop(key, default)
        if not isinstance(value, str):
            raise invalid(f"{key!r} must be a string")
        return check_text(key, value)

    def required_text(self, key: str) -> str:
        if not self._left.get(key):
            raise invalid(f"{key!r} is missing")
        return self.text(key)

    def label(self, key: str) -> str | None:
        """A version label, or None when it is absent or null."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(f"{key!r} must be a version label")
        return check_version_label(value)

    def flag(self, key: str) -> bool:
        value = self._left.pop(key, False)
        if not isinstance(value, bool):
            raise invalid(f"{key!r} must be true or false")
        return value

    def has(self, key: str) -> bool:
        """Whether the body names the field, and it has not been read yet."""
        return key in self._left

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number from `low` to `high`; required unless there is a default."""
        value = self._left.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{key!r} must be a number from {low:g} to {high:g}")
        if not low <= value <= high:
            raise invalid(f"{key!r} is {value:g}, not a number from {low:g} to {high:g}")
        return float(value)

    def seconds(self, key: str, default: float) -> float:
        return self.number(key, 0, 86400, default)

    def end(self) -> None:
        """Refuse what is left: a misspelt field must not be taken for an absent one."""
        if self._left:
            raise invalid(f"unknown fields: {', '.join(map(repr, list(self._left)[:5]))}"[:300])
