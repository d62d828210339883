"""How the benchmarks tell what they do and what they found."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def tell(row: dict[str, object]) -> None:
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(rounded), flush=True)


_told = 0.0


def progress(text: str) -> None:
    """A line on the terminal, twice a second at most; in a log, one each half minute."""
    global _told
    screen = sys.stderr.isatty()
    if time.monotonic() - _told > (0.5 if screen else 30.0):
        _told = time.monotonic()
        print(f"\r{text:<70}" if screen else text, end="" if screen else "\n", file=sys.stderr)


def write_table(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the two marks of that name in a page of the documentation."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, rest = page.read_text("utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}", "utf-8")
