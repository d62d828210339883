"""The settings of lorad.toml in words, and which option of `lorad start` sets which of them."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from lorad.config import SETTINGS

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
# Options whose name is not the last part of one setting's name.
_OTHER_NAMES = {
    "--registry-keep": "registry.keep",
    "--model": "model.path",
    "--registry": "registry.path",
    "--log-level": "log.level",
}


def setting_of(option: str) -> str | None:
    """`--max-loras` -> "engine.max_loras"; None for an option that sets none."""
    key = option.removeprefix("--").replace("-", "_")
    found = [setting for setting in SETTINGS if setting.partition(".")[2] == key]
    return _OTHER_NAMES.get(option, found[0] if len(found) == 1 else None)


def type_of(field: Field[Any]) -> str:
    return "size" if field.metadata.get("size") else _TYPES[type(field.default)]


def default_of(field: Field[Any]) -> str:
    """As TOML writes it."""
    if isinstance(field.default, str):
        return f'"{field.default}"'
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"


def limits_of(field: Field[Any]) -> str:
    """A sentence, or "" where any value of the type will do."""
    if choices := field.metadata.get("choices"):
        return f"One of {', '.join(choices)}."
    if "low" in field.metadata:
        return f"Limits: {field.metadata['low']} to {field.metadata['high']}."
    return ""
