"""Completion for bash: one function without dependencies, not even on bash-completion."""

from __future__ import annotations

from collections.abc import Iterator

from docgen.commands import Command, Program
from docgen.completion_values import Values, values_of

_TEMPLATE = """\
# bash completion for {name}. Written by `make docs`; source it, or copy it as {name} to
# ~/.local/share/bash-completion/completions.
# shellcheck shell=bash

_{name}_words() {{
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2")
}}

_{name}_paths() {{
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$1")
}}

_{name}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}}
    local command="" word i
    COMPREPLY=()
    # `--option=value` comes as three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ $word != -* ]]; then
            command=$word
            break
        fi
    done

    case "$command $previous" in
{values}
    esac

    case $command in
        "") _{name}_words "{top}" "$current" ;;
{commands}
    esac
}}

complete -F _{name} {name}
"""


def bash_completion(program: Program) -> str:
    names = [command.name for command in program.commands]
    return _TEMPLATE.format(
        name=program.name,
        top=" ".join([*names, *program.flags]),
        values="\n".join(_values(program)),
        commands="\n".join(_command(program, command) for command in program.commands),
    )


def _values(program: Program) -> Iterator[str]:
    """One case for every option that takes a value, so that no option is offered in its place."""
    for command in program.commands:
        for option in command.options:
            if not option.metavar:
                continue
            patterns = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
            actions = _offer(program, values_of(program.name, command.name, option))
            yield f"        {patterns}) {actions}return ;;"


def _offer(program: Program, values: Values) -> str:
    words = f'_{program.name}_words "{" ".join(values.words)}" "$current"; ' if values.words else ""
    paths = f'_{program.name}_paths "$current"; ' if values.paths else ""
    return words + paths


def _command(program: Program, command: Command) -> str:
    offered = [values_of(program.name, command.name, one) for one in command.arguments]
    words = f'_{program.name}_words "{" ".join(command.flags)}" "$current"'
    lines = [f"        {command.name})"]
    if any(values.paths for values in offered):
        lines.append(
            f"            if [[ $current == -* ]]; then {words}; "
            f'else _{program.name}_paths "$current"; fi ;;'
        )
    else:
        lines.append(f"            {words} ;;")
    return "\n".join(lines)
