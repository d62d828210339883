"""Completion for fish."""

from __future__ import annotations

from collections.abc import Iterator

from docgen.commands import Option, Program
from docgen.completion_values import Values, values_of

_HEAD = """\
# fish completion for {name}. Written by `make docs`; source it, or copy it as {name}.fish to
# ~/.config/fish/completions.

function __{name}_command_is
    # The first word that is no option is the command; without an argument: there is none yet.
    for word in (commandline -opc)[2..]
        string match -q -- '-*' $word; and continue
        test (count $argv) -gt 0; and test $word = $argv[1]
        return
    end
    test (count $argv) -eq 0
end

complete -c {name} -f
"""


def fish_completion(program: Program) -> str:
    return _HEAD.format(name=program.name) + "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    none = f"complete -c {program.name} -n __{program.name}_command_is"
    for option in program.options:
        yield f"{none} {_flags(option)} -d {_quoted(option.help)}"
    for command in program.commands:
        yield f"{none} -a {command.name} -d {_quoted(command.summary)}"
    for command in program.commands:
        inside = f'complete -c {program.name} -n "__{program.name}_command_is {command.name}"'
        for option in command.options:
            offer = _offer(option, values_of(program.name, command.name, option))
            yield f"{inside} {_flags(option)}{offer} -d {_quoted(option.help)}"
        if any(values_of(program.name, command.name, one).paths for one in command.arguments):
            yield f"{inside} -F"


def _flags(option: Option) -> str:
    """`--log-file` -> `-l log-file`, `-m` -> `-s m`."""
    return " ".join(
        f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags
    )


def _offer(option: Option, values: Values) -> str:
    """`-x`: a value and no file names; `-r -F`: a value, and file names too."""
    if not option.metavar:
        return ""
    words = f" -a {_quoted(' '.join(values.words))}" if values.words else ""
    return (" -r -F" if values.paths else " -x") + words


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
