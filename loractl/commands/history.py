"""`loractl history`: who changed what of an adapter, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import JsonOption, NameArgument, SocketOption, TimeoutOption
from loractl.output import local_time, print_columns, print_json, reported, user_name
from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.admin_client import AdminClient

_HEADER = ("WHEN", "WHO", "PID", "ACTION", "FROM", "TO", "GENERATION", "REASON")


def history(
    name: NameArgument,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="How many changes.")
    ] = 20,
    socket: SocketOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Show the changes of an adapter, newest first."""
    with reported(json):
        found = AdminClient(socket, timeout).history(str(AdapterName.parse(name)), limit)
    if json:
        print_json("lorad/history/v1", found)
    else:
        print_columns(_HEADER, (_row(event) for event in found["events"]))


def _row(event: wire.EventInfo) -> tuple[object, ...]:
    return (
        local_time(event["at"]),
        user_name(event["who"]["uid"]),
        event["who"]["pid"],
        _action(event),
        event["from_version"] or "-",
        event["to_version"] or "-",
        event["generation"],
        event["reason"],
    )


def _action(event: wire.EventInfo) -> str:
    share = event["percent"]
    return event["action"] if share is None else f"{event['action']} {share:g}%"
