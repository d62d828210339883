"""Completion for zsh: `_arguments` specifications, for sourcing and for a directory of fpath."""

from __future__ import annotations

from collections.abc import Iterator

from docgen.commands import Argument, Command, Option, Program
from docgen.completion_values import Values, values_of

_TEMPLATE = """\
#compdef {name}
# zsh completion for {name}. Written by `make docs`; source it after compinit, or copy it as
# _{name} to a directory of $fpath.

_{name}_word_or_file() {{
    _alternative "words:word:($*)" 'files:file:_files'
}}

_{name}() {{
    local context state state_descr line
    typeset -A opt_args
    local -a commands=(
{summaries}
    )
    _arguments -C \\
{options}
        '1: :->command' \\
        '*:: :->arguments' && return
    case $state in
        command) _describe -t commands '{name} command' commands ;;
        arguments)
            case $line[1] in
{commands}
            esac
            ;;
    esac
}}

if [[ $funcstack[1] == _{name} ]]; then
    _{name} "$@"
else
    compdef _{name} {name}
fi
"""


def zsh_completion(program: Program) -> str:
    return _TEMPLATE.format(
        name=program.name,
        summaries="\n".join(
            f"        {_quoted(f'{c.name}:{_escaped(c.summary)}')}" for c in program.commands
        ),
        options="\n".join(
            f"        {spec} \\" for option in program.options for spec in _specs(option, "")
        ),
        commands="\n".join(_command(program, command) for command in program.commands),
    )


def _command(program: Program, command: Command) -> str:
    specs = [
        spec
        for option in command.options
        for spec in _specs(option, _action(program, values_of(program.name, command.name, option)))
    ]
    specs += _arguments(program, command)
    lines = [f"                {command.name}) _arguments \\"]
    lines += [f"                    {spec} \\" for spec in specs[:-1]]
    lines += [f"                    {specs[-1]} ;;"]
    return "\n".join(lines)


def _specs(option: Option, action: str) -> Iterator[str]:
    """One specification for each spelling; a second one is not offered unless it may repeat."""
    exclusive = f"({' '.join(option.flags)})"
    for flag in option.flags:
        head = f"*{flag}" if option.multiple else f"{exclusive}{flag}"
        if option.metavar:
            head += "=" if flag.startswith("--") else "+"
        value = f":{_escaped(option.metavar)}:{action}" if option.metavar else ""
        yield _quoted(f"{head}[{_escaped(option.help)}]{value}")


def _arguments(program: Program, command: Command) -> Iterator[str]:
    for place, argument in enumerate(command.arguments, 1):
        action = _action(program, values_of(program.name, command.name, argument))
        yield _quoted(f"{_place(place, argument)}:{_escaped(argument.metavar)}:{action}")


def _place(place: int, argument: Argument) -> str:
    if argument.multiple:
        return "*"
    return f"{place}" if argument.required else f"{place}:"


def _action(program: Program, values: Values) -> str:
    if values.words and values.paths:
        return f" _{program.name}_word_or_file {' '.join(values.words)}"
    if values.words:
        return "(" + " ".join(word.replace(":", r"\:") for word in values.words) + ")"
    return "_files" if values.paths else " "


def _escaped(text: str) -> str:
    for special in ("\\", ":", "[", "]"):
        text = text.replace(special, f"\\{special}")
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
