"""The fields of a request body that carry what to continue or to answer."""

from __future__ import annotations

from typing import Any

from lorad.server.fields import integer_of, invalid, list_of, object_of, shown, text_of
from lorad.server.limits import Limits, context_error

Prompt = str | tuple[int, ...]

ROLES = ("system", "developer", "user", "assistant")
_PASSED_ON = ("name", "reasoning_content")
_UNSERVED = ("tool_calls", "function_call", "tool_call_id", "audio")


def read_prompts(value: Any, limits: Limits) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (text_of(value, "prompt"),)
    if not isinstance(value, list) or not value:
        what = "is required" if value is None else f"must be text or tokens, not {shown(value)}"
        raise invalid("prompt", what)
    if type(value[0]) is int:
        return (_token_ids(value, "prompt", limits),)
    list_of(value, "prompt", limits.max_choices)
    return tuple(_prompt(entry, f"prompt[{i}]", limits) for i, entry in enumerate(value))


def _prompt(value: Any, param: str, limits: Limits) -> Prompt:
    if isinstance(value, str):
        return text_of(value, param)
    if isinstance(value, list):
        return _token_ids(value, param, limits)
    raise invalid(param, f"must be a string or a list of token ids, not {shown(value)}")


def _token_ids(values: list[Any], param: str, limits: Limits) -> tuple[int, ...]:
    """Checked fast, and not at all when they cannot fit: a body has room for millions."""
    if len(values) >= limits.max_model_len:
        raise context_error(limits, len(values), None, param)
    top = limits.vocab_size
    for i, token in enumerate(values):
        if type(token) is not int or not 0 <= token < top:
            integer_of(token, f"{param}[{i}]", 0, top - 1)
    return tuple(values)


def read_messages(value: Any, limits: Limits) -> tuple[dict[str, Any], ...]:
    """Messages with plain text as content, ready for a chat template."""
    if value is None:
        raise invalid("messages", "is required")
    entries = list_of(value, "messages", limits.max_messages)
    if not entries:
        raise invalid("messages", "must have at least one message")
    return tuple(_message(entry, f"messages[{i}]") for i, entry in enumerate(entries))


def _message(value: Any, param: str) -> dict[str, Any]:
    message = object_of(value, param)
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{param}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    for name in _UNSERVED:
        if message.get(name):
            raise invalid(f"{param}.{name}", "tool calls and audio are not supported")
    kept = {name: message[name] for name in _PASSED_ON if message.get(name) is not None}
    passed = {name: text_of(text, f"{param}.{name}") for name, text in kept.items()}
    return {"role": role, "content": _content(message.get("content"), f"{param}.content"), **passed}


def _content(value: Any, param: str) -> str:
    """Text, or the texts of a list of text parts, each on a line of its own."""
    if value is None:
        raise invalid(param, "is required")
    if isinstance(value, list):
        return "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(value))
    return text_of(value, param)


def _part(value: Any, param: str) -> str:
    part = object_of(value, param)
    if part.get("type") != "text":
        raise invalid(f"{param}.type", f"must be text, not {shown(part.get('type'))}")
    return text_of(part.get("text"), f"{param}.text")
