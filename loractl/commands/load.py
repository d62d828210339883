"""`loractl load` and `loractl unload`: bring a version onto the device, or free its memory."""

from __future__ import annotations

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
from loractl.output import end_dry_run, human_bytes, print_json, printable, reported
from loractl.refs import one_version
from lorad.admin_client import AdminClient


def load(
    ref: RefArgument,
    pin: Annotated[
        bool, typer.Option("--pin", help="Keep it loaded, also after a restart.")
    ] = False,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Bring a version onto the device now, so that its first request does not wait."""
    with reported(json):
        client = AdminClient(socket, timeout, detach=detach)
        name, label = one_version(client, ref)
        result = client.load(name, label, pin=pin, dry_run=dry_run)
    if json:
        print_json("lorad/load/v1", result)
    elif not result["changed"]:
        typer.echo(printable(f"{name}@{label} is loaded already"))
    elif dry_run:
        typer.echo(printable(f"{name}@{label} would be loaded"))
    else:
        size = f"{human_bytes(result['bytes'])} in {result['pages']} pages"
        typer.echo(printable(f"{name}@{label} loaded: {size}, {result['seconds']:.3f} s"))
    end_dry_run(dry_run=dry_run, changed=result["changed"])


def unload(
    ref: RefArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it is live or pinned (it is unpinned).")
    ] = False,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for its running requests.")
    ] = 30.0,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Free a version's memory. It stays in the registry, and a request loads it again."""
    with reported(json):
        client = AdminClient(socket, timeout, detach=detach)
        name, label = one_version(client, ref)
        result = client.unload(
            name, label, force=force, drain_timeout=drain_timeout, dry_run=dry_run
        )
    if json:
        print_json("lorad/unload/v1", result)
    elif not result["changed"]:
        typer.echo(printable(f"{name}@{label} is not loaded"))
    elif dry_run:
        typer.echo(printable(f"{name}@{label} would be unloaded"))
    else:
        device, host = result["freed_device_bytes"], result["freed_host_bytes"]
        freed = f"{human_bytes(device)} on the device, {human_bytes(host)} in host memory"
        typer.echo(printable(f"{name}@{label} unloaded: freed {freed}"))
    end_dry_run(dry_run=dry_run, changed=result["changed"])
