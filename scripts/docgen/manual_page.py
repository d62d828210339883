"""man/lorad.1 and man/loractl.1: a program's commands, and what one must know around them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from docgen import roff
from docgen.commands import Argument, Command, Option, Program
from docgen.error_meanings import CLASSES
from docgen.prose import Manual
from docgen.settings import default_of, setting_of
from lorad.config import SETTINGS
from lorad.errors import ErrorClass


def manual_page(program: Program, manual: Manual, version: str) -> str:
    parts = [
        roff.title(program.name, 1, f"lorad {version}"),
        roff.section("Name"),
        rf"{program.name} \- {roff.prose(manual.tagline)}",
        roff.section("Synopsis"),
        f"{roff.bold(program.name)} {roff.italic('COMMAND')} [{roff.italic('OPTIONS')}]",
        roff.section("Description"),
        *map(roff.paragraph, manual.description),
        roff.section("Options"),
        *map(_option, program.options),
        roff.section("Commands"),
        *(line for command in program.commands for line in _command(program, command)),
        roff.section("Exit status"),
        *_exit_status(manual),
        roff.section("Environment"),
        *(roff.item(roff.bold(name), text) for name, text in manual.environment),
        roff.section("Files"),
        *(roff.item(roff.italic(path), text) for path, text in manual.files),
        roff.section("Examples"),
        *(roff.example(intent, lines) for intent, lines in manual.examples),
        roff.section("See also"),
        ", ".join(roff.bold(page.partition("(")[0]) + f"({page[-2]})" for page in manual.see_also),
    ]
    return roff.page(parts)


def _command(program: Program, command: Command) -> Iterator[str]:
    yield roff.subsection(f"{program.name} {command.name}")
    yield _synopsis(program, command)
    for text in command.help.split("\n\n"):
        yield roff.paragraph(" ".join(text.split()))
    yield from map(_argument, command.arguments)
    for group, options in groupby(command.options, key=lambda option: option.group):
        if group:
            yield f".PP\n{roff.bold(group)}"
        for option in options:
            yield _option(option, setting_of(option.name) if command.name == "start" else None)


def _synopsis(program: Program, command: Command) -> str:
    required = [f"{roff.bold(o.name)} {roff.italic(o.metavar)}" for o in _required(command)]
    arguments = [roff.italic(argument.usage) for argument in command.arguments]
    words = [roff.bold(f"{program.name} {command.name}"), *arguments, *required]
    return f".PP\n{' '.join(words)} [{roff.italic('OPTIONS')}]"


def _required(command: Command) -> list[Option]:
    return [option for option in command.options if option.required]


def _argument(argument: Argument) -> str:
    text = f"{argument.help} Default: {argument.default}." if argument.default else argument.help
    return roff.item(roff.italic(argument.metavar.strip("[]")), text)


def _option(option: Option, setting: str | None = None) -> str:
    flags = ", ".join(map(roff.bold, reversed(option.flags)))
    term = f"{flags} {roff.italic(option.metavar)}" if option.metavar else flags
    return roff.item(term, " ".join([option.help, *_facts(option), *_set(setting)]))


def _facts(option: Option) -> Iterator[str]:
    if option.required:
        yield "Required."
    if option.limits:
        yield f"Limits: {option.limits}."
    if option.default:
        yield f"Default: `{option.default}`."
    if option.environment:
        yield f"Environment: `{option.environment}`."


def _set(setting: str | None) -> Iterator[str]:
    if setting:
        yield f"Sets `{setting}`. Default: `{default_of(SETTINGS[setting])}`."


def _exit_status(manual: Manual) -> Iterator[str]:
    """0, then one status for each class of error, then what the shell adds.

    A wrong method is left out: no command sends one.
    """
    done, *others = manual.exit_status
    yield roff.item(roff.bold(done[0]), done[1])
    classes = [entry for entry in CLASSES.items() if entry[0] is not ErrorClass.NOT_ALLOWED]
    for kind, meaning in sorted(classes, key=lambda entry: entry[0].exit_code):
        yield roff.item(roff.bold(str(kind.exit_code)), meaning)
    for status, meaning in others:
        yield roff.item(roff.bold(status), meaning)
