"""`loractl list`: every adapter with its live version and where that is."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.commands.events import print_event
from loractl.options import (
    IntervalOption,
    JsonOption,
    SocketOption,
    TimeoutOption,
    WatchOption,
)
from loractl.output import human_bytes, note, print_columns, print_json, reported, watched
from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.admin_client import AdminClient

_HEADER = ("NAME", "LIVE", "CANARY", "VERSIONS", "RANK", "SIZE", "TIER", "RUNNING", "WAITING")


def list_adapters(
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Only this tenant's.", show_default=False)
    ] = None,
    watch: WatchOption = False,
    interval: IntervalOption = 2.0,
    socket: SocketOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """List the adapters: live version, rank, size, and the tier of memory it is in.

    With --watch and --json: the list on one line, then each change of it on a line of its own.
    """
    client = AdminClient(socket, timeout)

    def show() -> None:
        found = client.adapters(tenant)
        if json:
            print_json("lorad/adapters/v1", found, line=watch)
        elif found["adapters"]:
            print_columns(_HEADER, (_row(adapter) for adapter in found["adapters"]))
        else:
            note("no adapters: loractl push NAME DIRECTORY makes the first")

    with reported(json):
        if watch and json:
            _follow(client, tenant)
        watched(show, interval=interval, on=watch)


def _follow(client: AdminClient, tenant: str | None) -> None:
    """The list says up to which event it is, so that nothing between is lost."""
    found = client.adapters(tenant)
    print_json("lorad/adapters/v1", found, line=True)
    for event in client.events(found["cursor"], follow=True):
        if tenant in (None, AdapterName.parse(event["name"]).tenant):
            print_event(event, as_json=True)


def _row(adapter: wire.AdapterInfo) -> tuple[object, ...]:
    """Of the live version, or of the newest when none is live."""
    versions = adapter["versions"]
    shown = next((v for v in versions if v["live"]), versions[-1])
    failed, canary = shown["state"] == "failed", adapter["canary"]
    return (
        adapter["name"],
        adapter["live"] or "-",
        f"{canary['version']} {canary['percent']:g}%" if canary else "-",
        len(versions),
        shown["rank"],
        human_bytes(shown["bytes"]),
        "FAILED" if failed else shown["residency"]["tier"],
        shown["residency"]["running_requests"],
        shown["residency"]["waiting_requests"],
    )
