"""The two programs as values: every command with its arguments and options.

Read from the command objects that Typer builds, which know what a command line is parsed by,
and from the signatures behind them, which alone know types and limits in every Typer version.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

_NUMBERS = {int: "N", float: "X"}


@dataclass(frozen=True)
class Option:
    """`flags` as typed, the long one first, what turns it off last.

    `metavar` is "" for a switch that takes no value.
    """

    flags: tuple[str, ...]
    metavar: str
    help: str
    default: str = ""
    limits: str = ""
    environment: str = ""
    group: str = ""
    is_path: bool = False
    required: bool = False
    multiple: bool = False

    @property
    def name(self) -> str:
        return self.flags[0]


@dataclass(frozen=True)
class Argument:
    metavar: str
    help: str
    default: str = ""
    is_path: bool = False
    required: bool = True
    multiple: bool = False

    @property
    def usage(self) -> str:
        shown = self.metavar + ("..." if self.multiple else "")
        return shown if self.required or shown.startswith("[") else f"[{shown}]"


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return self.help.split("\n\n")[0].split(". ")[0].rstrip(".").replace("\n", " ")

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for option in self.options for flag in option.flags)


@dataclass(frozen=True)
class Program:
    """`options` are those in front of the command; none of them takes a value."""

    name: str
    help: str
    options: tuple[Option, ...]
    commands: tuple[Command, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for option in self.options for flag in option.flags)

    def command(self, name: str) -> Command:
        """Raises StopIteration for one that does not exist."""
        return next(command for command in self.commands if command.name == name)


def read_program(app: typer.Typer, name: str) -> Program:
    """Every visible command of a Typer app of one level."""
    group: Any = typer.main.get_command(app)
    help_option = Option(
        tuple(sorted(group.context_settings["help_option_names"], key=len, reverse=True)),
        "",
        "Show the help and exit.",
    )
    options = (*(_option(one, {}) for one in group.params if not one.hidden), help_option)
    if any(option.metavar for option in options):
        raise ValueError(f"an option in front of {name}'s commands takes a value")
    commands = [
        _command(command_name, command, help_option)
        for command_name, command in group.commands.items()
        if not command.hidden
    ]
    return Program(name, inspect.cleandoc(group.help), options, tuple(commands))


def _command(name: str, command: Any, help_option: Option) -> Command:
    function = inspect.unwrap(command.callback)
    hints = typing.get_type_hints(function, include_extras=True)
    shown = [one for one in command.params if not one.hidden]
    return Command(
        name=name,
        help=inspect.cleandoc(command.help),
        arguments=tuple(_argument(p, hints) for p in shown if p.param_type_name == "argument"),
        options=(
            *(_option(p, hints) for p in shown if p.param_type_name == "option"),
            help_option,
        ),
    )


def _argument(param: Any, hints: dict[str, Any]) -> Argument:
    return Argument(
        metavar=param.metavar or param.name.upper(),
        help=_sentence(param.help),
        default=_default(param),
        is_path=_kind(hints.get(param.name)) is Path,
        required=param.required,
        multiple=param.nargs != 1,
    )


def _option(param: Any, hints: dict[str, Any]) -> Option:
    hint = hints.get(param.name)
    kind = _kind(hint)
    metavar = param.metavar or ("PATH" if kind is Path else _NUMBERS.get(kind, "TEXT"))
    return Option(
        flags=(*sorted(param.opts, key=len, reverse=True), *param.secondary_opts),
        metavar="" if param.is_flag or kind is bool else metavar,
        help=_sentence(param.help),
        default=_default(param),
        limits=_limits(hint),
        environment=param.envvar or "",
        group=param.rich_help_panel or "",
        is_path=kind is Path,
        required=param.required,
        multiple=param.multiple,
    )


def _kind(hint: Any) -> type:
    """The type of one value: `Annotated[list[Path] | None, ...]` -> Path."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    for part in typing.get_args(hint):
        if part is not type(None):
            return _kind(part)
    return hint if isinstance(hint, type) else str


def _limits(hint: Any) -> str:
    given = next((m for m in getattr(hint, "__metadata__", ()) if hasattr(m, "min")), None)
    if given is None or (given.min is None and given.max is None):
        return ""
    if given.max is None:
        return f"at least {given.min:g}"
    if given.min is None:
        return f"at most {given.max:g}"
    return f"{given.min:g} to {given.max:g}"


def _default(param: Any) -> str:
    """What is worth saying: not the absence of a value, and not that a switch is off."""
    if not param.show_default or param.default in (None, "", False, (), []):
        return ""
    if isinstance(param.default, float):
        return f"{param.default:g}"
    return str(param.default)


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())
