"""The completion scripts, sourced and asked as each shell asks them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

import loractl.main
import lorad.main
from lorad.config import DEVICES

COMPLETIONS = Path(__file__).resolve().parent.parent / "completions"
APPS = {"lorad": lorad.main.app, "loractl": loractl.main.app}


def expected_words(program: str) -> dict[str, set[str]]:
    """Command -> its long and short options; "" -> the commands and the program's own options."""
    group = typer.main.get_command(APPS[program])
    words = {"": {*group.commands, "--help", "-h", "--install-completion", "--show-completion"}}
    for name, command in group.commands.items():
        flags = {f for p in command.params for f in (*p.opts, *p.secondary_opts) if f[0] == "-"}
        words[name] = {*flags, "--help", "-h"}
    return words


def run(shell: list[str], script: str, cwd: Path | None = None) -> str:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    done = subprocess.run(
        [*shell, "-c", script], capture_output=True, text=True, cwd=cwd, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# --- bash -----------------------------------------------------------------------------------

BASH = ["bash", "--norc", "--noprofile"]


def bash_offers(program: str, lines: list[list[str]], cwd: Path | None = None) -> list[set[str]]:
    """What bash would offer for the last word of each line, as words of COMP_WORDS."""
    script = [f"source {COMPLETIONS / program}.bash"]
    for words in lines:
        quoted = " ".join(f"'{word}'" for word in (program, *words))
        script += [f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _{program}"]
        script += ['printf "%s\\n" "${COMPREPLY[@]}" @']
    parts = run(BASH, "\n".join(script), cwd).split("@\n")
    return [set(part.split("\n")) - {""} for part in parts[:-1]]


@pytest.mark.parametrize("program", APPS)
def test_bash_registers_the_function(program):
    found = run(BASH, f"source {COMPLETIONS / program}.bash; complete -p {program}")
    assert found == f"complete -F _{program} {program}\n"


@pytest.mark.parametrize("program", APPS)
def test_bash_offers_every_command_and_option(program):
    expected = expected_words(program)
    lines = [[command, "-"] if command else [""] for command in expected]
    assert dict(zip(expected, bash_offers(program, lines), strict=True)) == expected


@pytest.mark.parametrize(
    ("program", "words", "offered"),
    [
        ("lorad", ["st"], {"start", "stop", "status"}),
        ("lorad", ["start", "--device", ""], set(DEVICES)),
        ("lorad", ["start", "--port", "8000", "--device", "c"], {"cpu", "cuda"}),
        ("lorad", ["start", "--config", ""], {"lorad.toml", "adapter"}),
        ("loractl", ["plan", "--gpu", "h200"], {"h200-141g"}),
        ("loractl", ["plan", "--dtype", "=", "fl"], {"float16", "float32"}),
        ("loractl", ["plan", "--dtype", "="], {"bfloat16", "float16", "float32"}),
        ("loractl", ["plan", "--rank", ""], set()),
        ("loractl", ["push", "name", "ad"], {"adapter"}),
        ("loractl", ["push", "name", "adapter", "--prom"], {"--promote"}),
        ("loractl", ["push", "-m", "a word", "--dry"], {"--dry-run"}),
        ("loractl", ["show", "pin", "--tim"], {"--timeout"}),
        ("loractl", ["nosuch", ""], set()),
    ],
)
def test_bash_offers_what_fits(program, words, offered, tmp_path):
    (tmp_path / "lorad.toml").touch()
    (tmp_path / "adapter").mkdir()
    assert bash_offers(program, [words], tmp_path) == [offered]


# --- fish -----------------------------------------------------------------------------------

FISH = ["fish", "--no-config"]


def fish_offers(program: str, lines: list[str], cwd: Path | None = None) -> list[set[str]]:
    script = [f"source {COMPLETIONS / program}.fish"]
    script += [f"complete -C '{program} {line}'; echo @" for line in lines]
    parts = run(FISH, "\n".join(script), cwd).split("@\n")
    return [{line.split("\t")[0] for line in part.splitlines()} for part in parts[:-1]]


@pytest.mark.parametrize("program", APPS)
def test_fish_offers_every_command_and_option(program):
    expected = expected_words(program)
    first, dashes, *others = fish_offers(program, ["", "-", *(f"{c} -" for c in expected if c)])
    found = {"": first | dashes, **dict(zip(list(expected)[1:], others, strict=True))}
    assert found == expected


@pytest.mark.parametrize(
    ("program", "line", "offered"),
    [
        ("lorad", "start --device ", set(DEVICES)),
        ("loractl", "plan --gpu h200", {"h200-141g"}),
        ("loractl", "plan --rank ", set()),
        ("loractl", "push name ad", {"adapter/"}),
        ("loractl", "promote ad", set()),
        ("loractl", "show pin --tim", {"--timeout"}),
    ],
)
def test_fish_offers_what_fits(program, line, offered, tmp_path):
    (tmp_path / "adapter").mkdir()
    assert fish_offers(program, [line], tmp_path) == [offered]


# --- zsh ------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", APPS)
def test_zsh_has_every_command_and_option(program):
    text = (COMPLETIONS / f"{program}.zsh").read_text("utf-8")
    for name, expected in expected_words(program).items():
        if name:
            specs = re.search(rf"^ +{name}\) _arguments \\\n(.*?) ;;$", text, re.S | re.MULTILINE)
            assert specs is not None, name
            assert f"'{name}:" in text.split("commands=(")[1]
            found = re.findall(r"^ +'(?:\([^)]*\)|\*)(--?[\w-]+)", specs[1], re.MULTILINE)
            assert set(found) == expected


@pytest.mark.parametrize("program", APPS)
def test_zsh_registers_the_function(program):
    script = f"autoload -U compinit; compinit -D; source {COMPLETIONS / program}.zsh"
    assert run(["zsh", "-f"], f"{script}; echo $_comps[{program}]") == f"_{program}\n"
