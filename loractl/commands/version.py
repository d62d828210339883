"""`loractl version`: of this program, and of the daemon if one answers."""

from __future__ import annotations

from contextlib import suppress

import typer

from loractl.options import JsonOption, SocketOption
from loractl.output import print_json
from lorad import __version__, wire
from lorad.admin_client import AdminClient
from lorad.errors import LoradError


def version(socket: SocketOption = None, json: JsonOption = False) -> None:
    """Print the versions of loractl and of the daemon."""
    daemon: wire.StatusInfo | None = None
    with suppress(LoradError):
        daemon = AdminClient(socket, timeout=2.0).status()
    if json:
        found = {
            "loractl": __version__,
            "api_version": wire.API_VERSION,
            "lorad": daemon["daemon_version"] if daemon else None,
        }
        print_json("lorad/version_info/v1", found)
        return
    typer.echo(f"loractl {__version__} (admin API {wire.API_VERSION})")
    typer.echo(f"lorad {daemon['daemon_version']}" if daemon else "lorad is not running here")
