"""The admin API as methods: HTTP over the daemon's UNIX socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlencode

from lorad import wire
from lorad.errors import LoradError
from lorad.paths import SOCKET_NAME, socket_path

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

_SYSTEM_SOCKET = Path("/run/lorad") / SOCKET_NAME
_UPLOAD_CHUNK = 1 << 18
_LONGEST_POLL = 30.0  # seconds of one wait for an operation
_POLL_MARGIN = 30.0
_QUEUE_RETRY = 0.02
_DRAIN_MARGIN = 30.0  # seconds that an unload may take beyond its drain

Progress = Callable[[int], None]  # called with the bytes that were just sent


class DaemonError(LoradError):
    """An error that the daemon answered with; its log knows the request id."""

    request_id = ""


class Detached(Exception):
    """Not a failure: the daemon goes on with what it was asked, and nobody waits for it."""

    def __init__(self, operation: wire.OperationInfo) -> None:
        super().__init__(operation["id"])
        self.operation = operation


class AdminClient:
    """One connection per request. Every method raises LoradError, with the daemon's code or
    `daemon.unreachable`, `socket.permission`, `operation.timeout`, `daemon.version_mismatch`.
    """

    def __init__(
        self, given_socket: Path | None = None, timeout: float = 120.0, *, detach: bool = False
    ) -> None:
        """With `detach`, a change raises Detached as soon as the daemon has taken it on."""
        own = socket_path(str(given_socket) if given_socket else None)
        chosen = given_socket is not None or "LORAD_SOCKET" in os.environ
        self._sockets = [own] if chosen or own == _SYSTEM_SOCKET else [own, _SYSTEM_SOCKET]
        self._timeout = timeout
        self._detach = detach

    # --- reading ----------------------------------------------------------------------------

    def status(self) -> wire.StatusInfo:
        return cast(wire.StatusInfo, self._request("GET", wire.STATUS))

    def config(self) -> wire.ConfigInfo:
        """The daemon's effective settings, by their full names."""
        return cast(wire.ConfigInfo, self._request("GET", wire.CONFIG))

    def adapters(self, tenant: str | None = None, *, in_memory: bool = False) -> wire.AdapterList:
        """All of them; with `in_memory`, of a daemon that knows it, those with a version there."""
        query: dict[str, object] = {"tenant": tenant} if tenant else {}
        if in_memory:
            query["in_memory"] = 1
        return cast(wire.AdapterList, self._request("GET", wire.ADAPTERS, query=query))

    def adapter(self, name: str) -> wire.AdapterInfo:
        return cast(wire.AdapterInfo, self._request("GET", wire.adapter_path(name)))

    def version(self, name: str, label: str) -> wire.VersionInfo:
        return cast(wire.VersionInfo, self._request("GET", wire.version_path(name, label)))

    def history(self, name: str, limit: int) -> wire.History:
        path = f"{wire.adapter_path(name)}/history"
        return cast(wire.History, self._request("GET", path, query={"limit": limit}))

    def operations(self, limit: int) -> wire.OperationList:
        """The newest first."""
        found = self._request("GET", wire.OPERATIONS, query={"limit": limit})
        return cast(wire.OperationList, found)

    def operation(self, operation_id: str, wait: float = 0.0) -> wire.OperationInfo:
        """`wait`: seconds until the answer if the operation has not ended before."""
        found = self._request(
            "GET",
            wire.operation_path(operation_id),
            query={"wait": wait},
            timeout=max(self._timeout, wait + _POLL_MARGIN),
        )
        return cast(wire.OperationInfo, found)

    def events(self, after: int, *, follow: bool = False) -> Iterator[wire.EventInfo]:
        """Changes of all adapters after the event `after`, oldest first; `follow` never ends."""
        query = urlencode({"after": after, "follow": int(follow), "limit": 10_000})
        with self._connection(self._timeout) as connection:
            connection.request("GET", f"{wire.EVENTS}?{query}")
            response = connection.getresponse()
            if response.status != 200:
                _result(response)
            for line in response:
                if line.strip():
                    yield json.loads(line)

    def steps(self, limit: int) -> wire.StepList:
        """The engine's newest steps, oldest first."""
        return cast(wire.StepList, self._request("GET", wire.STEPS, query={"limit": limit}))

    def shutdown(self) -> None:
        """Ask the daemon to end; it answers before it does."""
        self._request("POST", wire.SHUTDOWN)

    # --- names ------------------------------------------------------------------------------

    def promote(
        self,
        name: str,
        label: str | None,
        *,
        reason: str = "",
        generation: int | None = None,
        checks: Sequence[dict[str, Any]] = (),
        dry_run: bool = False,
    ) -> wire.PromoteResult:
        """Without a label, the newest version. `checks` must pass first; see promote_checks."""
        body = {"version": label, "reason": reason, "checks": list(checks)}
        return cast(wire.PromoteResult, self._move(name, "promote", body, generation, dry_run))

    def rollback(
        self,
        name: str,
        label: str | None,
        *,
        reason: str = "",
        generation: int | None = None,
        dry_run: bool = False,
    ) -> wire.MoveResult:
        """Without a label, the version that was live before."""
        body = {"to": label, "reason": reason}
        return cast(wire.MoveResult, self._move(name, "rollback", body, generation, dry_run))

    def canary(
        self,
        name: str,
        label: str | None,
        percent: float,
        *,
        auto_rollback: bool = False,
        reason: str = "",
        generation: int | None = None,
        dry_run: bool = False,
    ) -> wire.CanaryResult:
        """Percent 0 ends it. Without a label, the present canary or the newest version."""
        body: dict[str, Any] = {"percent": percent, "reason": reason}
        if percent:
            body |= {"version": label, "auto_rollback": auto_rollback}
        return cast(wire.CanaryResult, self._move(name, "canary", body, generation, dry_run))

    def gc(self, name: str | None, keep: int | None, *, dry_run: bool) -> wire.GcResult:
        """Without `keep`, the daemon's own policy; without a name, every adapter."""
        body = {key: value for key, value in (("name", name), ("keep", keep)) if value is not None}
        return cast(wire.GcResult, self._change("POST", wire.GC, body, query=_dry(dry_run)))

    def drain(self, timeout: float, *, dry_run: bool) -> wire.DrainResult:
        """Refuse new requests, and wait for the running ones."""
        return cast(
            wire.DrainResult,
            self._change(
                "POST",
                wire.DRAIN,
                {"timeout": timeout},
                query=_dry(dry_run),
                timeout=max(self._timeout, timeout + _DRAIN_MARGIN),
            ),
        )

    def resume(self, *, dry_run: bool) -> wire.DrainResult:
        return cast(wire.DrainResult, self._request("POST", wire.RESUME, {}, query=_dry(dry_run)))

    def _move(
        self, name: str, verb: str, body: dict[str, Any], generation: int | None, dry_run: bool
    ) -> Any:
        headers = {} if generation is None else {"if-match": f'"{generation}"'}
        path = f"{wire.adapter_path(name)}:{verb}"
        return self._change("POST", path, body, query=_dry(dry_run), headers=headers)

    def delete(
        self, name: str, label: str | None, *, force: bool, dry_run: bool
    ) -> wire.DeleteResult:
        """One version, or without a label all of them; `force` is for a live name as a whole."""
        path = wire.adapter_path(name) if label is None else wire.version_path(name, label)
        query = _dry(dry_run) | ({"force": 1} if force else {})
        return cast(wire.DeleteResult, self._change("DELETE", path, query=query))

    # --- memory -----------------------------------------------------------------------------

    def load(self, name: str, label: str, *, pin: bool, dry_run: bool) -> wire.LoadResult:
        path = f"{wire.version_path(name, label)}:load"
        answer = self._change("POST", path, {"pin": pin}, query=_dry(dry_run))
        return cast(wire.LoadResult, answer)

    def unload(
        self, name: str, label: str, *, force: bool, drain_timeout: float, dry_run: bool
    ) -> wire.UnloadResult:
        path = f"{wire.version_path(name, label)}:unload"
        body = {"force": force, "drain_timeout": drain_timeout}
        timeout = max(self._timeout, drain_timeout + _DRAIN_MARGIN)
        answer = self._change("POST", path, body, query=_dry(dry_run), timeout=timeout)
        return cast(wire.UnloadResult, answer)

    def set_pinned(self, name: str, label: str, pinned: bool, *, dry_run: bool) -> wire.PinResult:
        path = f"{wire.version_path(name, label)}:{'pin' if pinned else 'unpin'}"
        return cast(wire.PinResult, self._request("POST", path, query=_dry(dry_run)))

    # --- pushing ----------------------------------------------------------------------------

    def push(
        self,
        directory: Path,
        name: str,
        *,
        label: str | None = None,
        message: str = "",
        dry_run: bool = False,
        progress: Progress = lambda sent: None,
    ) -> wire.PushResult:
        """Stream the two files of a directory to the daemon and make them a version."""
        with ExitStack() as stack:
            files = {file: stack.enter_context(_opened(directory, file)) for file in _FILES}
            body = {"name": name, "version": label, "message": message}
            upload: wire.UploadInfo = self._request("POST", wire.UPLOADS, body)
            try:
                for file, content in files.items():
                    self._put(wire.upload_file_path(upload["id"], file), content, progress)
                commit = f"{wire.UPLOADS}/{upload['id']}:commit"
                return cast(wire.PushResult, self._change("POST", commit, query=_dry(dry_run)))
            except Detached:
                raise
            except BaseException:
                with suppress(LoradError):  # most likely it is gone already
                    self._request("DELETE", f"{wire.UPLOADS}/{upload['id']}", timeout=5)
                raise

    def _put(self, path: str, content: BinaryIO, progress: Progress) -> None:
        with self._connection(self._timeout) as connection:
            connection.putrequest("PUT", path)
            connection.putheader("content-length", str(os.fstat(content.fileno()).st_size))
            connection.endheaders()
            with suppress(BrokenPipeError, ConnectionResetError):  # refused: the answer says why
                while chunk := content.read(_UPLOAD_CHUNK):
                    connection.send(chunk)
                    progress(len(chunk))
            _result(connection.getresponse())

    # --- changes that may take long -----------------------------------------------------------

    def _change(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Ask for a change as an operation and wait for its end; the answer of the change.

        Raises what the change raises; `operation.timeout` with the id when it takes longer; and
        Detached at once if this client does not wait.
        """
        deadline = time.monotonic() + (timeout or self._timeout)
        asked = {**(headers or {}), "prefer": "respond-async"}
        answer = self._request(method, path, body, query=query, headers=asked)
        if "operation" not in answer:  # a daemon that answered at once
            return answer
        operation: wire.OperationInfo = answer["operation"]
        if self._detach:
            raise Detached(operation)
        while operation["state"] == "running":
            left = deadline - time.monotonic()
            if left <= 0:
                raise _still_running(operation, timeout or self._timeout)
            operation = self.operation(operation["id"], wait=min(left, _LONGEST_POLL))
        if operation["error"] is not None:
            raise _daemon_error(operation["error"])
        return operation["result"]

    # --- the wire ---------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        target = f"{path}?{urlencode(query)}" if query else path
        content = json.dumps(body).encode() if body is not None else None
        with self._connection(timeout or self._timeout) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, content, headers or {})
            return _result(connection.getresponse())

    @contextmanager
    def _connection(self, timeout: float) -> Iterator[HTTPConnection]:
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("lorad", timeout=timeout)
        connection.sock = self._dial(timeout)
        try:
            yield connection
        except TimeoutError:
            raise LoradError(
                "operation.timeout",
                f"the daemon did not answer within {timeout:g} seconds; it may still go on",
                hint="look with `loractl status` and `loractl history`, or wait longer: --timeout",
            ) from None
        except (OSError, HTTPException) as error:
            raise LoradError(
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


_FILES = (wire.CONFIG_FILE, wire.WEIGHTS_FILE)


def _dry(dry_run: bool) -> dict[str, Any]:
    return {"dry_run": 1} if dry_run else {}


@contextmanager
def _opened(directory: Path, file: str) -> Iterator[BinaryIO]:
    """A file of an adapter, through links: they are the caller's own."""
    path = directory / file
    if not path.is_file():
        from lorad.adapters.peft_format import read_adapter

        read_adapter(directory, None)  # knows what such a directory lacks, and says it
    try:
        with path.open("rb") as content:
            yield content
    except PermissionError:
        raise LoradError("path.permission", f"{path} cannot be read: permission denied") from None


def _still_running(operation: wire.OperationInfo, seconds: float) -> LoradError:
    return LoradError(
        "operation.timeout",
        f"{operation['action']} has not ended within {seconds:g} seconds; it goes on as "
        f"{operation['id']}",
        hint=f"`loractl operation {operation['id']} --wait` waits for it",
        details={"operation": operation["id"]},
    )


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


def _result(response: HTTPResponse) -> Any:
    """The JSON of a good answer; the error of any other."""
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
        raise _daemon_error(answer.get("error"))
    return answer


def _daemon_error(error: Any) -> DaemonError:
    found = error if isinstance(error, dict) else {}
    rebuilt = DaemonError.from_dict(found)
    if not isinstance(rebuilt, DaemonError):
        raise rebuilt
    rebuilt.request_id = str(found.get("request_id", ""))
    return rebuilt
