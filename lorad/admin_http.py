"""One request to the daemon: HTTP and JSON over its UNIX socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from lorad import wire
from lorad.errors import LoradError
from lorad.paths import SOCKET_NAME, socket_path

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

_SYSTEM_SOCKET = Path("/run/lorad") / SOCKET_NAME
_QUEUE_RETRY = 0.02  # seconds


class DaemonError(LoradError):
    """An error that the daemon answered with; its log knows the request id."""

    request_id = ""


class LostAnswer(LoradError):
    """The connection ended before the answer: the daemon may have done what it was asked."""


class AdminHttp:
    """One connection per request. Every method raises LoradError, with the daemon's code or
    `daemon.unreachable`, `socket.permission`, `operation.timeout`, `daemon.version_mismatch`.
    """

    def __init__(self, given_socket: Path | None, timeout: float) -> None:
        own = socket_path(str(given_socket) if given_socket else None)
        chosen = given_socket is not None or "LORAD_SOCKET" in os.environ
        self._sockets = [own] if chosen or own == _SYSTEM_SOCKET else [own, _SYSTEM_SOCKET]
        self.timeout = timeout  # seconds, unless a request says otherwise

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The JSON of the answer."""
        target = f"{path}?{urlencode(query)}" if query else path
        content = json.dumps(body).encode() if body is not None else None
        with self.connection(timeout) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, content, headers or {})
            return result_of(connection.getresponse())

    @contextmanager
    def connection(self, timeout: float | None = None) -> Iterator[HTTPConnection]:
        from http.client import HTTPConnection, HTTPException

        seconds = timeout or self.timeout
        connection = HTTPConnection("lorad", timeout=seconds)
        connection.sock = self._dial(seconds)
        try:
            yield connection
        except TimeoutError:
            raise LoradError(
                "operation.timeout",
                f"the daemon did not answer within {seconds:g} seconds; it may still go on",
                hint="look with `loractl status` and `loractl history`, or wait longer: --timeout",
            ) from None
        except (OSError, HTTPException) as error:
            raise LostAnswer(
                "daemon.unreachable",
                f"the daemon closed the connection ({error or type(error).__name__})",
                hint="look at its log",
            ) from None
        finally:
            connection.close()

    def _dial(self, timeout: float) -> socket.socket:
        """The first of the sockets that somebody answers on; the error is the first one's."""
        failure: LoradError | None = None
        for path in self._sockets:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout)
            try:
                _connect(connection, path, timeout)
            except OSError as error:
                connection.close()
                failure = failure or _unreachable(path, error)
            else:
                return connection
        raise failure or LoradError("daemon.unreachable", "there is no socket to ask")


def result_of(response: HTTPResponse) -> Any:
    """The JSON of a good answer; raises the error of any other."""
    spoken = response.getheader(wire.API_HEADER)
    body = response.read()
    if spoken is not None and spoken != str(wire.API_VERSION):
        raise LoradError(
            "daemon.version_mismatch",
            f"the daemon speaks admin API {spoken}, this loractl {wire.API_VERSION}",
            hint="use the loractl that came with the daemon",
        )
    try:
        answer = json.loads(body) if body else {}
    except ValueError:
        answer = None
    if spoken is None or not isinstance(answer, dict):
        raise LoradError("daemon.error", f"the answer ({response.status}) is not lorad's JSON")
    if response.status >= 400:
        raise daemon_error(answer.get("error"))
    return answer


def daemon_error(error: Any) -> DaemonError:
    found = error if isinstance(error, dict) else {}
    rebuilt = DaemonError.from_dict(found)
    if not isinstance(rebuilt, DaemonError):
        raise rebuilt
    rebuilt.request_id = str(found.get("request_id", ""))
    return rebuilt


def _connect(connection: socket.socket, path: Path, timeout: float) -> None:
    """A UNIX socket whose queue is full refuses at once, whatever the timeout: try again."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection.connect(str(path))
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_QUEUE_RETRY)


def _unreachable(path: Path, error: OSError) -> LoradError:
    if isinstance(error, PermissionError):
        return LoradError(
            "socket.permission",
            f"{path} may not be opened by this user",
            hint="run loractl as the daemon's user or as root, or join its admin_group",
        )
    return LoradError(
        "daemon.unreachable",
        f"no daemon answers on {path}: {error.strerror or error}",
        hint="start one (`lorad start`), or name its socket: --socket PATH or LORAD_SOCKET",
    )
