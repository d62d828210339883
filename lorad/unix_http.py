"""HTTP over a UNIX socket, with what the standard library has."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from lorad.errors import LoradError


class UnixConnection(http.client.HTTPConnection):
    """`http.client` over AF_UNIX; raises LoradError when the socket cannot be reached."""

    def __init__(self, path: Path, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self.path))
        except PermissionError:
            raise LoradError(
                "socket.permission",
                f"you may not open the admin socket {self.path}",
                hint="run as the daemon's user, or ask for its admin_group",
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise LoradError(
                "daemon.unreachable",
                f"no daemon answers on {self.path}: {reason}",
                hint="start one with `lorad start`, or name its socket by --socket or LORAD_SOCKET",
                details={"socket": str(self.path)},
            ) from None


def call(path: Path, method: str, route: str, timeout: float = 10.0) -> dict[str, Any]:
    """One request without a body; the JSON object it answers, or the LoradError it carries."""
    connection = UnixConnection(path, timeout)
    try:
        connection.request(method, route)
        response = connection.getresponse()
        body = json.loads(response.read() or b"{}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LoradError("daemon.unreachable", f"the daemon broke off: {error}") from None
    finally:
        connection.close()
    if response.status >= 400:
        raise LoradError.from_dict(body.get("error", {}))
    return dict(body)
