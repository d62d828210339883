"""What is written about the programs is what the programs are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import loractl.main
import lorad.main
from lorad.config import SETTINGS, environment_name
from lorad.errors import ERROR_CODES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))  # as when make_docs.py runs

import make_docs  # noqa: E402
from docgen.commands import Command  # noqa: E402
from docgen.completion_values import CHOICES, PATHS  # noqa: E402
from docgen.settings import setting_of  # noqa: E402

APPS = {"lorad": lorad.main.app, "loractl": loractl.main.app}
PROGRAMS = make_docs.programs()
GENERATED = make_docs.generated()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def command_options() -> Iterator[tuple[str, str, list[str]]]:
    """(program, command, its flags), from Typer itself."""
    for program, app in APPS.items():
        for name, command in typer.main.get_command(app).commands.items():
            flags = [f for p in command.params for f in (*p.opts, *p.secondary_opts)]
            yield program, name, [flag for flag in flags if flag.startswith("-")]


COMMANDS = [pytest.param(*found, id=f"{found[0]}-{found[1]}") for found in command_options()]


# --- generated files ------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_generated_file_is_up_to_date(name):
    assert (ROOT / name).read_text("utf-8") == GENERATED[name], "run `make docs`"


def test_nothing_else_lies_beside_the_generated_files():
    found = {str(p.relative_to(ROOT)) for d in ("man", "completions") for p in (ROOT / d).iterdir()}
    assert found == {name for name in GENERATED if not name.startswith("docs/")}


def test_generation_depends_on_no_terminal_and_no_locale():
    environment = {**os.environ, "COLUMNS": "40", "FORCE_COLOR": "1", "LANG": "C", "LC_ALL": "C"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = [sys.executable, str(ROOT / "scripts/make_docs.py"), "--check"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_check_names_what_is_out_of_date(monkeypatch, capsys):
    monkeypatch.setattr(make_docs, "generated", lambda: {"man/lorad.1": "an older page"})
    assert make_docs.main(check=True) == 1
    assert capsys.readouterr().out == "man/lorad.1 is out of date\n"


# --- man pages ------------------------------------------------------------------------------


def shown_text(roff: str) -> str:
    """What a reader sees of a page, near enough to search in."""
    text = re.sub(r"\\f[BIR]|\\&", "", roff)
    return text.replace(r"\-", "-").replace(r"\(dq", '"').replace(r"\(aq", "'")


def has_flag(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


@pytest.mark.parametrize(("program", "command", "flags"), COMMANDS)
def test_man_page_has_every_command_and_option(program, command, flags):
    page = shown_text(GENERATED[f"man/{program}.1"])
    sections = re.split(r'^\.S[SH] "(.*)"$', page, flags=re.MULTILINE)
    text = sections[sections.index(f"{program} {command}") + 1]
    terms = "\n".join(re.findall(r"^\.TP\n(.*)$", text, re.MULTILINE))
    assert [flag for flag in (*flags, "--help") if not has_flag(terms, flag)] == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_lorad_toml_page_has_every_setting(setting):
    section, key = setting.split(".")
    page = shown_text(GENERATED["man/lorad.toml.5"])
    text = page.split(f'.SS "[{section}]"')[1].split(".SS")[0]
    entry = re.search(rf"^{key} = \w+\n((?:[^.].*\n)+)", text, re.MULTILINE)
    assert entry is not None
    assert f"Environment: {environment_name(setting)}." in " ".join(entry[1].split())
    assert " ".join(SETTINGS[setting].metadata["help"].replace("`", "").split()) in " ".join(
        entry[1].split()
    )


@pytest.mark.parametrize("page", ["lorad.1", "loractl.1", "lorad.toml.5"])
def test_man_formats_the_page_without_a_warning(page):
    if not (shutil.which("man") and shutil.which("groff")):
        pytest.skip("man-db or groff is not installed")
    command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(ROOT / "man" / page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_start_sets_the_settings_its_page_names(monkeypatch):
    """Every option is given; what reaches the configuration is what the page says it sets."""
    seen: dict[str, object] = {}

    def capture(_, flags):
        seen.update(flags)
        raise typer.Exit(0)

    monkeypatch.setattr(lorad.main, "_load", capture)
    start = PROGRAMS["lorad"].command("start")
    valued = [option for option in start.options if option.metavar and setting_of(option.name)]
    words = {option.name: str(7000 + place) for place, option in enumerate(valued)}
    switches = [o.name for o in start.options if not o.metavar and setting_of(o.name)]
    line = [*switches, *(word for pair in words.items() for word in pair)]
    assert CliRunner().invoke(lorad.main.app, ["start", *line]).exit_code == 0
    documented = {setting_of(option): float(value) for option, value in words.items()}
    documented |= {setting_of(option): 1.0 for option in switches}
    assert {key: float(value) for key, value in seen.items()} == documented


# --- errors ---------------------------------------------------------------------------------


def test_errors_page_has_every_code_with_its_statuses():
    page = (ROOT / "docs/errors.md").read_text("utf-8")
    parts = re.split(r"^## (\w+)$", page, flags=re.MULTILINE)
    found = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        for code, http, code_exit, meaning in re.findall(
            r"^\| `([\w.]+)` \| (\d+) \| (\d+) \| (.+) \|$", text, re.MULTILINE
        ):
            assert meaning.endswith(".")
            found[code] = (name, int(http), int(code_exit))
    assert found == {
        code: (kind.name.lower(), kind.http_status, kind.exit_code)
        for code, kind in ERROR_CODES.items()
    }


# --- command lines and settings in prose ----------------------------------------------------


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    yield from re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.S)


def shell_lines(language: str, content: str) -> Iterator[str]:
    """Whole command lines: every line of a script, the lines behind `$ ` of a session."""
    script = language in ("sh", "bash", "shell")
    held = ""
    for line in content.splitlines():
        if held:
            held += "\n" + line
        elif line.startswith("$ ") or script:
            held = line.removeprefix("$ ")
        if held and not held.endswith("\\") and is_complete(held):
            yield held.replace("\\\n", " ")
            held = ""
    assert not held, f"an unfinished command line: {held}"


def is_complete(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def simple_commands(line: str) -> Iterator[list[str]]:
    """`a && b | c` -> a, b, c; assignments and `sudo` before a program are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if not set(token) <= set("();<>|&"):
            words.append(token)
            continue
        while words and (words[0] == "sudo" or re.fullmatch(r"\w+=.*", words[0])):
            del words[0]
        yield words
        words = []


def faults(words: list[str]) -> list[str]:
    """What is wrong with a command line of ours."""
    program = PROGRAMS[Path(words[0]).name]
    words = words[1:]
    while words and words[0] in program.flags:
        words = words[1:]
    if not words:
        return []
    command = next((c for c in program.commands if c.name == words[0]), None)
    if command is None:
        return [f"{program.name} has no command {words[0]}"]
    return list(command_faults(command, words[1:]))


def command_faults(command: Command, words: list[str]) -> Iterator[str]:
    """A usage line, with `[OPTION]` or `...`, need not be complete."""
    usage = any(word.startswith("[") or word.endswith("...") for word in words)
    known = {flag: option for option in command.options for flag in option.flags}
    given, places = set(), 0
    rest = iter([word.strip("[]") for word in words])
    for word in rest:
        flag, equals, _ = word.partition("=")
        if not word.startswith("-"):
            places += 1
        elif flag not in known:
            yield f"{command.name} has no option {flag}"
        else:
            given.add(known[flag])
            if known[flag].metavar and not equals and next(rest, None) is None:
                yield f"{flag} has no value"
    if usage:
        return
    for option in command.options:
        if option.required and option not in given:
            yield f"{command.name} needs {option.name}"
    least, most = sum(a.required for a in command.arguments), len(command.arguments)
    if not least <= places <= most:
        yield f"{command.name} takes {least} to {most} arguments, not {places}"


def our_commands(text: str) -> Iterator[list[str]]:
    for language, content in code_blocks(text):
        for line in shell_lines(language, content):
            for words in simple_commands(line):
                if words and Path(words[0]).name in PROGRAMS:
                    yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_in_code_blocks_can_be_typed(page):
    wrong = [
        f"{' '.join(words)}: {fault}"
        for words in our_commands(page.read_text("utf-8"))
        for fault in faults(words)
    ]
    assert wrong == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_of_the_man_page_can_be_typed(program):
    shown = [line for _, lines in make_docs.MANUALS[program].examples for line in lines]
    found = list(our_commands("```sh\n" + "\n".join(shown) + "\n```\n"))
    assert len(found) >= 4
    assert [fault for words in found for fault in faults(words)] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("loractl promte x", "loractl has no command promte"),
        ("echo x | sudo loractl promote x --wayt", "promote has no option --wayt"),
        ("A=1 .venv/bin/lorad start --model", "--model has no value"),
        ("loractl push ./adapter", "push takes 2 to 2 arguments, not 1"),
        ("loractl plan --rank 8 \\\n  --gpu=l4-24g", "plan needs --model"),
        ("true && loractl show 'a b' c", "show takes 1 to 1 arguments, not 2"),
    ],
)
def test_a_wrong_command_line_is_found(line, fault):
    (words,) = our_commands(f"```console\noutput\n$ {line}\n```\n")
    assert faults(words) == [fault]


SOURCES = [p for d in ("lorad", "loractl", "examples") for p in sorted((ROOT / d).rglob("*.py"))]


@pytest.mark.parametrize("page", [*PAGES, *SOURCES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_running_text_exist(page):
    """Hints, docstrings and prose name commands between backticks, often in part."""
    wrong = []
    for span in re.findall(r"`((?:lorad|loractl) [a-z][^`\n]*)`", page.read_text("utf-8")):
        program, command, *words = span.split()
        known = {c.name: c for c in PROGRAMS[program].commands}.get(command)
        flags = [re.split(r"[=,;]", word.strip("[]"))[0] for word in words if word[0] in "-["]
        if known is None or any(f.startswith("-") and f not in known.flags for f in flags):
            wrong.append(span)
    assert wrong == []


@pytest.mark.parametrize("page", [*PAGES, Path("man/lorad.toml.5")], ids=lambda page: page.name)
def test_settings_in_toml_blocks_exist(page):
    if page.suffix == ".5":
        blocks = [shown_text(GENERATED[str(page)]).split(".nf\n")[1].split(".fi")[0]]
    else:
        blocks = [c for lang, c in code_blocks(page.read_text("utf-8")) if lang == "toml"]
    used = [
        f"{section}.{key}"
        for block in blocks
        for section, keys in tomllib.loads(block).items()
        for key in keys
    ]
    assert [key for key in used if key not in SETTINGS] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "scripts/docgen/prose.py"], ids=lambda p: p.name)
def test_settings_named_in_running_text_exist(page):
    sections = "|".join(dict.fromkeys(setting.partition(".")[0] for setting in SETTINGS))
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)`", page.read_text("utf-8"))
    modules = {name for name in named if (ROOT / "lorad" / f"{name.replace('.', '/')}.py").exists()}
    assert set(named) - modules - {*SETTINGS, *ERROR_CODES} == set()


def test_architecture_names_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    layout = text.split("## Layout")[1].split("```")[1]
    tree = {
        path.name for top in ("lorad", "loractl", "kernels") for path in (ROOT / top).rglob("*.py")
    }
    named = re.findall(r"(?<![\w*/])\w+\.py", layout)
    assert len(named) > 80
    assert [name for name in named if name not in tree] == []
    paths = re.findall(r"`((?:\w+/)+\w+\.\w+)`", text)
    roots = (ROOT, ROOT / "lorad")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


# --- words that completion offers -----------------------------------------------------------


def test_completion_values_are_for_options_that_exist():
    known = {
        f"{program.name} {command.name} {name}"
        for program in PROGRAMS.values()
        for command in program.commands
        for name in (*command.flags, *(argument.metavar for argument in command.arguments))
    }
    assert {*CHOICES, *PATHS} <= known


# The others come from the tables that the program itself reads.
PLAN_WORDS = [
    (key.split()[-1], word)
    for key, words in CHOICES.items()
    if key.startswith("loractl plan") and key.split()[-1] not in ("--model", "--gpu", "--plot")
    for word in words
]


@pytest.mark.parametrize(("option", "word"), PLAN_WORDS)
def test_plan_takes_every_word_that_completion_offers(option, word):
    given = {"--model": "qwen1.5-moe-a2.7b", "--rank": "8", "--gpu": "h100-80g", "--fleet": "10"}
    line = [part for pair in {**given, option: word}.items() for part in pair]
    done = CliRunner().invoke(loractl.main.app, ["plan", *line])
    assert done.exit_code in (0, 1), done.output
