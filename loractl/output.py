"""What every command prints by: data on stdout, the rest on stderr, foreign strings escaped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from lorad.errors import ErrorClass, LoradError

_CLEAR = "\x1b[2J\x1b[H"  # the terminal's screen, and its cursor to the top

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from lorad import wire


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


def print_json(schema: str, data: Mapping[str, Any], *, line: bool = False) -> None:
    """One JSON document on stdout; `schema` is like "lorad/plan/v1". `line`: all on one line."""
    typer.echo(json.dumps({"schema": schema, **data}, indent=None if line else 2))


def print_columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Left-aligned columns as wide as their cells, with control characters made visible.

    Plain text, because a tool that is asked for one line must not take the time to load Rich.
    """
    lines = [list(header), *([printable(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """One `name  value` line each."""
    width = max(map(len, fields))
    for name, value in fields.items():
        typer.echo(f"{name.ljust(width)}  {printable(value)}".rstrip())


def note(text: str) -> None:
    """A remark for a person, on stderr."""
    typer.echo(printable(text), err=True)


def local_time(seconds: float | None) -> str:
    """Seconds since the epoch as local time; "-" for None."""
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def user_name(uid: int) -> str:
    """The name of a user of this machine; its number when it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def watched(show: Callable[[], None], *, interval: float, on: bool) -> None:
    """Show once, or with --watch again and again until the user stops it."""
    show()
    while on:
        time.sleep(interval)
        if sys.stdout.isatty():
            typer.echo(_CLEAR, nl=False)
        show()


def end_dry_run(*, dry_run: bool, changed: bool) -> None:
    """Exit 1 when a dry run found something to change."""
    if dry_run and changed:
        raise typer.Exit(ErrorClass.NEGATIVE.exit_code)


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


def _print_detached(operation: wire.OperationInfo, *, as_json: bool) -> None:
    if as_json:
        print_json("lorad/operation/v1", operation)
        return
    typer.echo(operation["id"])
    note(f"{operation['action']} goes on: loractl operation {operation['id']} --wait")


@contextmanager
def reported(as_json: bool = False) -> Iterator[None]:
    """Turn a LoradError inside a command into its message and its exit code.

    A change that was only handed over (--detach) prints its operation's id, and ends well.
    """
    from lorad.admin_client import Detached

    try:
        yield
    except Detached as left:
        _print_detached(left.operation, as_json=as_json)
        raise typer.Exit(0) from None
    except LoradError as error:
        print_error(error, as_json=as_json, request_id=getattr(error, "request_id", ""))
        raise typer.Exit(error.kind.exit_code) from None
