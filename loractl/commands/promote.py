"""`loractl promote` and `loractl rollback`: which version a bare name stands for."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import (
    DryRunOption,
    GenerationOption,
    JsonOption,
    NameArgument,
    ReasonOption,
    RefArgument,
    SocketOption,
    TimeoutOption,
)
from loractl.output import end_dry_run, print_json, printable, reported
from loractl.refs import name_and_version
from lorad import wire
from lorad.adapter_ref import AdapterName, check_version_label
from lorad.admin_client import AdminClient


def promote(
    ref: RefArgument,
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="Version; the newest if not given."),
    ] = None,
    reason: ReasonOption = "",
    if_generation: GenerationOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Make a version live: loaded first, then switched in one step.

    Running requests end on the version they began with.
    """
    with reported(json):
        name, label = name_and_version(ref, version)
        moved = AdminClient(socket, timeout).promote(
            str(name), label, reason=reason, generation=if_generation, dry_run=dry_run
        )
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
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Make the version that was live before live again. A second rollback goes further back."""
    with reported(json):
        target = AdapterName.parse(name)
        label = check_version_label(to) if to is not None else None
        moved = AdminClient(socket, timeout).rollback(
            str(target), label, reason=reason, generation=if_generation, dry_run=dry_run
        )
    _print("lorad/rollback/v1", moved, as_json=json)


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
