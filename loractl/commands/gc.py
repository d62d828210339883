"""`loractl gc`: delete old versions that nothing refers to."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import DetachOption, DryRunOption, JsonOption, SocketOption, TimeoutOption
from loractl.output import end_dry_run, human_bytes, note, print_json, printable, reported
from lorad.adapter_ref import AdapterName
from lorad.admin_client import AdminClient


def gc(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Only this adapter.", show_default=False),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Newest versions of each adapter that stay; registry.keep if not given.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 600.0,
    json: JsonOption = False,
) -> None:
    """Delete versions beyond the newest few of each adapter.

    The live version, a canary, pinned versions and the one that a rollback would go to always
    stay; one that still has running requests is passed over.
    """
    with reported(json):
        target = str(AdapterName.parse(name)) if name is not None else None
        client = AdminClient(socket, timeout, detach=detach)
        result = client.gc(target, keep, dry_run=dry_run)
    if json:
        print_json("lorad/gc/v1", result)
    else:
        for ref in result["deleted"]:
            typer.echo(printable(ref))
        for skipped in result["skipped"]:
            note(f"{skipped['ref']} stays: {skipped['why']}")
        verb = "would delete" if dry_run else "deleted"
        count, size = len(result["deleted"]), human_bytes(result["freed_bytes"])
        note(f"{verb} {count} versions, {size}")
    end_dry_run(dry_run=dry_run, changed=result["changed"])
