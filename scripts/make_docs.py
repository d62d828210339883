"""Writes man pages, shell completions and docs/errors.md from the programs themselves.

With --check it changes nothing, and exits with 1 if one of them is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docgen.commands import Program, read_program
from docgen.completion_bash import bash_completion
from docgen.completion_fish import fish_completion
from docgen.completion_zsh import zsh_completion
from docgen.config_page import config_page
from docgen.errors_page import errors_page
from docgen.manual_page import manual_page
from docgen.prose import MANUALS

import loractl.main
import lorad.main
from lorad import __version__

ROOT = Path(__file__).resolve().parent.parent


def programs() -> dict[str, Program]:
    apps = {"lorad": lorad.main.app, "loractl": loractl.main.app}
    return {name: read_program(app, name) for name, app in apps.items()}


def generated() -> dict[str, str]:
    """Path below the repository's root -> content; the same for the same programs."""
    found = programs()
    start = found["lorad"].command("start")
    files = {"man/lorad.toml.5": config_page(start, __version__), "docs/errors.md": errors_page()}
    for name, program in found.items():
        files[f"man/{name}.1"] = manual_page(program, MANUALS[name], __version__)
        files[f"completions/{name}.bash"] = bash_completion(program)
        files[f"completions/{name}.zsh"] = zsh_completion(program)
        files[f"completions/{name}.fish"] = fish_completion(program)
    return files


def main(check: bool) -> int:
    stale = []
    for name, content in generated().items():
        path = ROOT / name
        if path.is_file() and path.read_text("utf-8") == content:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, "utf-8")
    for name in stale:
        print(f"{name} is out of date" if check else f"wrote {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
