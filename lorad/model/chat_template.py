"""Renders a model's chat template: Jinja in a sandbox, set up as transformers sets it up.

A template is a program of the model's author. It is read from the model directory only, never
from a request or an adapter. The sandbox keeps it away from Python's internals; the size and
the time of its output are bounded here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorad.errors import LoradError

MAX_TEMPLATE_BYTES = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_SECONDS = 10.0


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads the tags from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<`, `>` and `&` for HTML, which a model never saw."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template with the model's special tokens. Safe to use from threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "chat_template",
    ) -> None:
        """Raises `model.invalid` with the line of a syntax error."""
        self.source = source
        self._variables = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise LoradError(
                "model.invalid",
                f"{where}, line {error.lineno}: {error.message}",
                hint="the model's chat template is not valid Jinja",
            ) from None

    @classmethod
    def from_dir(cls, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """chat_template.jinja, else `chat_template` of tokenizer_config.json, else None."""
        file = path / "chat_template.jinja"
        if file.is_file():
            return cls(_read_text(file), special_tokens, where=str(file))
        file = path / "tokenizer_config.json"
        source = _configured_template(file) if file.is_file() else None
        return None if source is None else cls(source, special_tokens, where=str(file))

    def mentions(self, word: str) -> bool:
        """Whether the template's text has this word: a role, say, that it treats on its own."""
        return word in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; keys of a message that are None count as absent.

        Raises `request.invalid` with the template's own words when it refuses the messages or
        fails on them, and when its output or its time passes the limit.
        """
        context = {
            **self._variables,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [_without_none(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return "".join(_bounded(self._template.generate(context)))
        except LoradError:
            raise
        except Exception as error:  # a template can fail in any way that a program can
            raise LoradError(
                "request.invalid",
                f"the model's chat template refused the messages: {error}",
                hint="the template may ask for certain roles, or for roles in a certain order",
                details={"param": "messages"},
            ) from None


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size, deadline = 0, time.monotonic() + MAX_SECONDS
    for piece in pieces:
        size += len(piece)
        if size > MAX_OUTPUT_CHARS or time.monotonic() > deadline:
            raise LoradError(
                "request.invalid",
                f"the chat template's output passed {MAX_OUTPUT_CHARS} characters"
                f" or {MAX_SECONDS:.0f} seconds",
                hint="send fewer or shorter messages",
                details={"param": "messages"},
            )
        yield piece


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise LoradError("model.invalid", f"{file} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise LoradError("model.invalid", f"{file} cannot be read: {error}") from None


def _configured_template(file: Path) -> str | None:
    """The `chat_template` of a tokenizer_config.json: a text, or a list of named texts."""
    try:
        configured = json.loads(file.read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise LoradError("model.invalid", f"{file} cannot be read: {error}") from None
    if configured is None or isinstance(configured, str):
        return configured
    return _default_of(configured, file)


def _default_of(configured: Any, file: Path) -> str:
    try:
        named = {entry["name"]: entry["template"] for entry in configured}
    except (TypeError, KeyError):
        named = {}
    default = named.get("default")
    if not isinstance(default, str):
        raise LoradError(
            "model.invalid",
            f"{file}: chat_template has no template named default, only {sorted(map(str, named))}",
            hint="write the template to use into chat_template.jinja beside it",
        )
    return default
