"""What every command prints by: data on stdout, the rest on stderr, foreign strings escaped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from lorad.errors import LoradError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console(*, stderr: bool = False) -> Console:
    """A Rich console that honours NO_COLOR and plain pipes. Rich is imported only here."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=not sys.stdout.isatty())


def printable(value: object) -> str:
    """Text from outside (a name, a path, an error) with control characters made visible."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)
    )


def cell(value: object, style: str = "") -> Text:
    """A table cell whose content is never read as Rich markup."""
    from rich.text import Text

    return Text(printable(value), style=style)


def print_json(schema: str, data: dict[str, Any]) -> None:
    """One JSON document on stdout; `schema` is like "lorad/plan/v1"."""
    typer.echo(json.dumps({"schema": schema, **data}, indent=2))


def human_bytes(count: int | float) -> str:
    """1536 -> "1.5 KiB": binary units, as memory is sold and allocated."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""


def print_error(error: LoradError, *, as_json: bool, request_id: str = "") -> None:
    """An error with its code and hint, on stderr."""
    if as_json:
        body = {"schema": "lorad/error/v1", "error": error.to_dict(request_id)}
        typer.echo(json.dumps(body, indent=2), err=True)
        return
    typer.echo(f"error: {printable(error.message)} [{error.code}]", err=True)
    if error.hint:
        typer.echo(f"hint:  {printable(error.hint)}", err=True)


@contextmanager
def reported(as_json: bool = False) -> Iterator[None]:
    """Turn a LoradError inside a command into its message and its exit code."""
    try:
        yield
    except LoradError as error:
        print_error(error, as_json=as_json)
        raise typer.Exit(error.kind.exit_code) from None
