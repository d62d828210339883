"""`loractl promote` and `loractl rollback`: which version a bare name stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loractl.options import (
    DetachOption,
    DryRunOption,
    GenerationOption,
    JsonOption,
    NameArgument,
    ReasonOption,
    RefArgument,
    SocketOption,
    TimeoutOption,
)
from loractl.output import end_dry_run, note, print_json, printable, reported
from loractl.refs import name_and_version
from lorad import wire
from lorad.adapter_ref import AdapterName, check_version_label
from lorad.admin_client import AdminClient
from lorad.errors import LoradError

# Nats. Rounding alone moves a log-probability by about 1e-6 in float32; an adapter that was
# trained moves some of them by whole nats.
_NO_EFFECT = 1e-4


def promote(
    ref: RefArgument,
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="Version; the newest if not given."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="FILE",
            help="Prompts that it must answer rightly first: JSON lines with prompt (or messages) "
            "and must_contain (or tokens).",
            show_default=False,
        ),
    ] = None,
    reason: ReasonOption = "",
    if_generation: GenerationOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Make a version live: loaded and tried first, then switched in one step.

    Exit 1 if it fails a check. Running requests end on the version they began with.
    """
    with reported(json):
        name, label = name_and_version(ref, version)
        moved = AdminClient(socket, timeout, detach=detach).promote(
            str(name),
            label,
            reason=reason,
            generation=if_generation,
            checks=read_checks(check) if check else (),
            dry_run=dry_run,
        )
    _warn(moved)
    _print("lorad/promote/v1", moved, as_json=json)


def rollback(
    name: NameArgument,
    to: Annotated[
        str | None,
        typer.Option("--to", help="Version to go back to; the one live before if not given."),
    ] = None,
    reason: ReasonOption = "",
    if_generation: GenerationOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Make the version that was live before live again. A second rollback goes further back."""
    with reported(json):
        target = AdapterName.parse(name)
        label = check_version_label(to) if to is not None else None
        moved = AdminClient(socket, timeout, detach=detach).rollback(
            str(target), label, reason=reason, generation=if_generation, dry_run=dry_run
        )
    _print("lorad/rollback/v1", moved, as_json=json)


def read_checks(file: Path) -> list[dict[str, Any]]:
    """One JSON object a line; empty lines are passed over."""
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoradError("path.not_found", f"cannot read {file}: {error}") from None
    return [_check(file, n, line) for n, line in enumerate(lines, 1) if line.strip()]


def _check(file: Path, number: int, line: str) -> dict[str, Any]:
    from json import loads

    try:
        found = loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LoradError("usage.invalid", f"{file}:{number} is not a JSON object")
    return found


def _warn(moved: wire.PromoteResult) -> None:
    tested = moved.get("self_test")
    if tested and tested["effect"] < _NO_EFFECT:
        note("warning: its answers to the self-test are those of the base model")


def _print(schema: str, moved: wire.MoveResult, *, as_json: bool) -> None:
    if as_json:
        print_json(schema, moved)
    elif not moved["changed"]:
        typer.echo(printable(f"{moved['name']}: {moved['to_version']} is live already"))
    else:
        would = "would be " if moved["dry_run"] else ""
        step = f"{moved['from_version'] or 'none'} -> {moved['to_version']}"
        generation = f"generation {moved['generation']}"
        typer.echo(printable(f"{moved['name']}: {would}live {step} ({generation})"))
    end_dry_run(dry_run=moved["dry_run"], changed=moved["changed"])
