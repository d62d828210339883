"""`loractl pin` and `loractl unpin`: what is never evicted, and loaded at every start."""

from __future__ import annotations

import typer

from loractl.options import DryRunOption, JsonOption, RefArgument, SocketOption, TimeoutOption
from loractl.output import end_dry_run, print_json, printable, reported
from loractl.refs import one_version
from lorad import wire
from lorad.admin_client import AdminClient


def pin(
    ref: RefArgument,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Load a version and keep it loaded, also after a restart."""
    with reported(json):
        client = AdminClient(socket, timeout)
        result = client.set_pinned(*one_version(client, ref), True, dry_run=dry_run)
    _print("lorad/pin/v1", result, as_json=json)


def unpin(
    ref: RefArgument,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Let a pinned version be evicted again when it is idle."""
    with reported(json):
        client = AdminClient(socket, timeout)
        result = client.set_pinned(*one_version(client, ref), False, dry_run=dry_run)
    _print("lorad/unpin/v1", result, as_json=json)


def _print(schema: str, result: wire.PinResult, *, as_json: bool) -> None:
    state = "pinned" if result["pinned"] else "not pinned"
    how = " already" if not result["changed"] else " after this" if result["dry_run"] else ""
    if as_json:
        print_json(schema, result)
    else:
        typer.echo(printable(f"{result['name']}@{result['version']} is {state}{how}"))
    end_dry_run(dry_run=result["dry_run"], changed=result["changed"])
