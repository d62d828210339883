"""`loractl operation`: what became of a change that nobody waited for."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import JsonOption, SocketOption, TimeoutOption
from loractl.output import (
    local_time,
    print_columns,
    print_fields,
    print_json,
    reported,
    user_name,
)
from lorad import wire
from lorad.admin_client import AdminClient
from lorad.errors import LoradError

_HEADER = ("ID", "STATE", "ACTION", "STARTED", "SECONDS", "WHO", "TARGET")


def operation(
    operation_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="As --detach printed it; all if not given."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it has ended; exit 9 after --timeout.")
    ] = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Show an operation, or the last of them. The exit code is that of the change itself."""
    with reported(json):
        client = AdminClient(socket, timeout)
        if operation_id is None:
            _print_all(client.operations(50), as_json=json)
            return
        found = _ended(client, operation_id, timeout) if wait else client.operation(operation_id)
        if found["error"] is not None:
            raise LoradError.from_dict(found["error"])
    print_json("lorad/operation/v1", found) if json else print_fields(_fields(found))


def _ended(client: AdminClient, operation_id: str, timeout: float) -> wire.OperationInfo:
    found = client.operation(operation_id, wait=timeout)
    if found["state"] == "running":
        raise LoradError(
            "operation.timeout",
            f"{operation_id} has not ended within {timeout:g} seconds; it goes on",
            details={"operation": operation_id},
        )
    return found


def _print_all(found: wire.OperationList, *, as_json: bool) -> None:
    if as_json:
        print_json("lorad/operations/v1", found)
    else:
        print_columns(_HEADER, (_row(operation) for operation in found["operations"]))


def _row(operation: wire.OperationInfo) -> tuple[object, ...]:
    ended = operation["ended_at"]
    return (
        operation["id"],
        operation["state"],
        operation["action"],
        local_time(operation["started_at"]),
        f"{ended - operation['started_at']:.2f}" if ended else "-",
        user_name(operation["who"]["uid"]),
        operation["target"],
    )


def _fields(operation: wire.OperationInfo) -> dict[str, object]:
    shown = dict(zip((h.lower() for h in _HEADER), _row(operation), strict=True))
    result = operation["result"] or {}
    return {**shown, **{key: value for key, value in result.items() if value is not None}}
