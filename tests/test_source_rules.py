"""Small rules that keep the tree as it is meant to be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM_FOLDERS = ("lorad", "loractl", "kernels", "scripts", "examples")
FOLDERS = (*PROGRAM_FOLDERS, "tests", "docs", "man", "completions")
TOP_FILES = ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run")
TEXT = (".py", ".md", ".toml", ".sql", ".json", ".1", ".5", ".bash", ".zsh", ".fish")

MAX_LINES = 600
# Spelled in parts, so that this file passes too.
LEFT_FOR_LATER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
PLACE_ON_ONE_MACHINE = re.compile(
    r"(?<![\w.~$}-])/(?:ho" r"me|ro" r"ot|wo" r"rk|Us" r"ers|m" r"nt|tmp/v)/\w"
)
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
PATTERN_NAMES = re.compile(r"Manager|Factory|Mixin|Helper")


def text_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path
    yield from (ROOT / name for name in TOP_FILES if (ROOT / name).is_file())


FILES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in text_files()}
SOURCES = {name: text for name, text in FILES.items() if name.endswith(".py")}
PROGRAM = {name: text for name, text in SOURCES.items() if name.startswith(PROGRAM_FOLDERS)}


def lines_with(pattern: re.Pattern[str], files: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_the_rules_see_the_tree():
    assert len(PROGRAM) > 150
    assert {name.split("/")[0] for name in FILES} >= {*FOLDERS, "Makefile", "pyproject.toml"}


def test_kernels_is_no_package():
    """A top-level `kernels` would shadow the PyPI package that transformers imports."""
    assert not (ROOT / "kernels/__init__.py").exists()


def test_files_are_short_enough_to_hold_one_idea():
    long = {name: len(text.splitlines()) for name, text in PROGRAM.items()}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_every_file_says_what_it_is():
    silent = [name for name, text in SOURCES.items() if not ast.get_docstring(ast.parse(text))]
    assert [name for name in silent if not name.endswith("/__init__.py")] == []


def test_nothing_is_left_for_later():
    assert lines_with(LEFT_FOR_LATER, SOURCES) == []


def test_files_are_named_after_what_they_hold():
    assert [name for name in SOURCES if EMPTY_NAMES & set(re.split(r"[_/.]", name))] == []


def test_classes_are_named_after_what_they_are():
    classes = [
        f"{name}: {node.name}"
        for name, text in PROGRAM.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 100
    assert [found for found in classes if PATTERN_NAMES.search(found)] == []


def test_the_programs_assert_nothing():
    """An `assert` is no check of input: Python may run without it."""
    asserts = [
        f"{name}:{node.lineno}"
        for name, text in PROGRAM.items()
        if not name.startswith("examples")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert)
    ]
    assert asserts == []


def test_no_file_names_a_place_on_one_machine():
    """Absolute paths are those of every system: /etc, /run, /var, /proc."""
    assert lines_with(PLACE_ON_ONE_MACHINE, FILES) == []
