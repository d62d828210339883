"""Text as man(7) source: escaped, so that whatever it holds is shown as it is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

_ESCAPES = str.maketrans(
    {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti", '"': r"\(dq"}
)
_CODE = re.compile(r"`([^`]+)`")
_WIDTH = 79
_AFTER_HEADING = re.compile(r"^(\.S[HS] .*)\n\.PP$", re.MULTILINE)


def page(parts: Iterable[str]) -> str:
    """A whole page. The first paragraph under a heading needs no macro, and gets none."""
    return _AFTER_HEADING.sub(r"\1", "\n".join(parts)) + "\n"


def title(name: str, section: int, source: str) -> str:
    """The page's head: no date, so that the same program gives the same page; and no hyphens
    in the names of variables and options.
    """
    return f'.TH {name.upper()} {section} "" "{source}" "lorad manual"\n.nh\n.ad l'


def section(name: str) -> str:
    return f'.SH "{_escaped(name.upper())}"'


def subsection(name: str) -> str:
    return f'.SS "{_escaped(name)}"'


def bold(text: str) -> str:
    return rf"\fB{_escaped(text)}\fR"


def italic(text: str) -> str:
    return rf"\fI{_escaped(text)}\fR"


def prose(text: str) -> str:
    """Lines of filled text, in which `backticks` mean bold."""
    parts = enumerate(_CODE.split(text))
    marked = "".join(bold(part) if place % 2 else _escaped(part) for place, part in parts)
    lines = textwrap.wrap(marked, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(_no_request, lines))


def paragraph(text: str) -> str:
    return f".PP\n{prose(text)}"


def item(term: str, text: str) -> str:
    """A term, roff already, and its explanation."""
    return f".TP\n{term}\n{prose(text)}"


def example(intent: str, lines: Iterable[str]) -> str:
    """A sentence, and lines that are shown as they are."""
    shown = "\n".join(_no_request(_escaped(line)) for line in lines)
    return f".PP\n{prose(intent)}\n.PP\n.RS 4\n.nf\n{shown}\n.fi\n.RE"


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def _no_request(line: str) -> str:
    r"""A line that begins with a dot would be a request to roff; `\&` is nothing, and shown so."""
    return rf"\&{line}" if line.startswith(".") else line
