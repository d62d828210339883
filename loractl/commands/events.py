"""`loractl events`: what changes, for all adapters, as it happens."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import JsonOption, SocketOption
from loractl.output import local_time, print_json, printable, reported, user_name
from lorad import wire
from lorad.admin_client import AdminClient


def events(
    after: Annotated[
        int, typer.Option(min=0, help="Only what came after the event with this id.")
    ] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens from now on.")
    ] = False,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the changes of every adapter, oldest first.

    With --json one event a line; its `id` is where the next --after begins.
    """
    with reported(json):
        for event in AdminClient(socket).events(after, follow=follow):
            print_event(event, as_json=json)


def print_event(event: wire.EventInfo, *, as_json: bool) -> None:
    if as_json:
        print_json("lorad/event/v1", event, line=True)
        return
    step = f"{event['from_version'] or '-'} -> {event['to_version'] or '-'}"
    share = f" {event['percent']:g} %" if event["percent"] is not None else ""
    line = (
        f"{event['id']:>6}  {local_time(event['at'])}  {user_name(event['who']['uid'])}  "
        f"{event['name']}  {event['action']}{share}  {step}  {event['reason']}"
    )
    typer.echo(printable(line).rstrip())
