"""`loractl delete`: remove a version, or an adapter with all its versions."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loractl.options import (
    DetachOption,
    DryRunOption,
    JsonOption,
    RefArgument,
    SocketOption,
    TimeoutOption,
)
from loractl.output import end_dry_run, print_json, printable, reported
from lorad.adapter_ref import split_version
from lorad.admin_client import AdminClient
from lorad.errors import LoradError


def delete(
    ref: RefArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete an adapter although it is live or pinned.")
    ] = False,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Delete a version and its files, or without a version the whole adapter."""
    with reported(json):
        name, label = split_version(ref)
        if label is not None and force:
            raise LoradError(
                "usage.invalid",
                "--force is for a whole adapter, not for one version",
                hint="promote another version first",
            )
        if not (yes or dry_run):
            _ask(f"delete {name}@{label}" if label else f"delete {name} and all its versions")
        result = AdminClient(socket, timeout, detach=detach).delete(
            str(name), label, force=force, dry_run=dry_run
        )
    if json:
        print_json("lorad/delete/v1", result)
    else:
        verb = "would delete" if dry_run else "deleted"
        versions = ", ".join(f"{result['name']}@{gone}" for gone in result["deleted"])
        typer.echo(printable(f"{verb} {versions}"))
    end_dry_run(dry_run=dry_run, changed=result["changed"])


def _ask(what: str) -> None:
    if not sys.stdin.isatty():
        raise LoradError("usage.invalid", f"to {what}, add --yes", hint="nobody is there to ask")
    typer.confirm(printable(f"{what}?"), abort=True, err=True)
