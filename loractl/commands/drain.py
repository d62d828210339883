"""`loractl drain` and `loractl resume`: take the daemon out of service, and back."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import DryRunOption, JsonOption, SocketOption, TimeoutOption
from loractl.output import end_dry_run, print_json, reported
from lorad.admin_client import AdminClient


def drain(
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the running requests.")
    ] = 30.0,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Refuse new requests with status 503, and wait until the running ones have ended.

    /health says 503 too, so that a load balancer looks elsewhere. Exit 9 when requests still
    run after --drain-timeout; new ones stay refused until resume.
    """
    with reported(json):
        result = AdminClient(socket, timeout).drain(drain_timeout, dry_run=dry_run)
    if json:
        print_json("lorad/drain/v1", result)
    else:
        would = "would be " if dry_run else "is "
        typer.echo(f"the daemon {would}drained: {result['running']} requests running")
    end_dry_run(dry_run=dry_run, changed=result["changed"])


def resume(
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Take requests again after a drain."""
    with reported(json):
        result = AdminClient(socket, timeout).resume(dry_run=dry_run)
    if json:
        print_json("lorad/resume/v1", result)
    else:
        would = "would take" if dry_run else "takes"
        typer.echo(f"the daemon {would} requests")
    end_dry_run(dry_run=dry_run, changed=result["changed"])
