"""The admin API as methods: HTTP over the daemon's UNIX socket."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlencode

from lorad import wire
from lorad.admin_http import AdminHttp, LostAnswer, daemon_error, result_of
from lorad.errors import LoradError

_UPLOAD_CHUNK = 1 << 18
_LONGEST_POLL = 30.0  # seconds of one wait for an operation
_POLL_MARGIN = 30.0
_DRAIN_MARGIN = 30.0  # seconds that an unload may take beyond its drain
_PAUSES = (0.05, 0.2, 1.0)  # seconds before a lost answer is asked for again

Progress = Callable[[int], None]  # called with the bytes that were just sent


class Detached(Exception):
    """Not a failure: the daemon goes on with what it was asked, and nobody waits for it."""

    def __init__(self, operation: wire.OperationInfo) -> None:
        super().__init__(operation["id"])
        self.operation = operation


class AdminClient:
    """Every method raises LoradError, with the daemon's code or `daemon.unreachable`,
    `socket.permission`, `operation.timeout`, `daemon.version_mismatch`.

    Each change has an Idempotency-Key of its own: when its answer is lost it is asked for again,
    and made once.
    """

    def __init__(
        self, given_socket: Path | None = None, timeout: float = 120.0, *, detach: bool = False
    ) -> None:
        """With `detach`, a change raises Detached as soon as the daemon has taken it on."""
        self._http = AdminHttp(given_socket, timeout)
        self._timeout = timeout
        self._detach = detach

    # --- reading ----------------------------------------------------------------------------

    def status(self) -> wire.StatusInfo:
        return cast(wire.StatusInfo, self._http.request("GET", wire.STATUS))

    def config(self) -> wire.ConfigInfo:
        """The daemon's effective settings, by their full names."""
        return cast(wire.ConfigInfo, self._http.request("GET", wire.CONFIG))

    def adapters(self, tenant: str | None = None, *, in_memory: bool = False) -> wire.AdapterList:
        """All of them; with `in_memory`, of a daemon that knows it, those with a version there."""
        query: dict[str, object] = {"tenant": tenant} if tenant else {}
        if in_memory:
            query["in_memory"] = 1
        return cast(wire.AdapterList, self._http.request("GET", wire.ADAPTERS, query=query))

    def adapter(self, name: str) -> wire.AdapterInfo:
        return cast(wire.AdapterInfo, self._http.request("GET", wire.adapter_path(name)))

    def version(self, name: str, label: str) -> wire.VersionInfo:
        return cast(wire.VersionInfo, self._http.request("GET", wire.version_path(name, label)))

    def history(self, name: str, limit: int) -> wire.History:
        path = f"{wire.adapter_path(name)}/history"
        return cast(wire.History, self._http.request("GET", path, query={"limit": limit}))

    def operations(self, limit: int) -> wire.OperationList:
        """The newest first."""
        found = self._http.request("GET", wire.OPERATIONS, query={"limit": limit})
        return cast(wire.OperationList, found)

    def operation(self, operation_id: str, wait: float = 0.0) -> wire.OperationInfo:
        """`wait`: seconds until the answer if the operation has not ended before."""
        found = self._http.request(
            "GET",
            wire.operation_path(operation_id),
            query={"wait": wait},
            timeout=max(self._timeout, wait + _POLL_MARGIN),
        )
        return cast(wire.OperationInfo, found)

    def events(self, after: int, *, follow: bool = False) -> Iterator[wire.EventInfo]:
        """Changes of all adapters after the event `after`, oldest first; `follow` never ends."""
        query = urlencode({"after": after, "follow": int(follow), "limit": 10_000})
        with self._http.connection() as connection:
            connection.request("GET", f"{wire.EVENTS}?{query}")
            response = connection.getresponse()
            if response.status != 200:
                result_of(response)
            for line in response:
                if line.strip():
                    yield json.loads(line)

    def steps(self, limit: int) -> wire.StepList:
        """The engine's newest steps, oldest first."""
        return cast(wire.StepList, self._http.request("GET", wire.STEPS, query={"limit": limit}))

    def shutdown(self) -> None:
        """Ask the daemon to end; it answers before it does."""
        self._http.request("POST", wire.SHUTDOWN)

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
        body = {"version": label, "reason": _reason(reason), "checks": list(checks)}
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
        body = {"to": label, "reason": _reason(reason)}
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
        body: dict[str, Any] = {"percent": percent, "reason": _reason(reason)}
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
        return cast(wire.DrainResult, self._once("POST", wire.RESUME, {}, query=_dry(dry_run)))

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
        return cast(wire.PinResult, self._once("POST", path, query=_dry(dry_run)))

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
            text = wire.check_text("message", message)  # before the files are sent
            body = {"name": name, "version": label, "message": text}
            upload: wire.UploadInfo = self._http.request("POST", wire.UPLOADS, body)
            try:
                for file, content in files.items():
                    self._put(wire.upload_file_path(upload["id"], file), content, progress)
                commit = f"{wire.UPLOADS}/{upload['id']}:commit"
                return cast(wire.PushResult, self._change("POST", commit, query=_dry(dry_run)))
            except Detached:
                raise
            except BaseException:
                with suppress(LoradError):  # most likely it is gone already
                    self._http.request("DELETE", f"{wire.UPLOADS}/{upload['id']}", timeout=5)
                raise

    def _put(self, path: str, content: BinaryIO, progress: Progress) -> None:
        with self._http.connection() as connection:
            connection.putrequest("PUT", path)
            connection.putheader("content-length", str(os.fstat(content.fileno()).st_size))
            connection.endheaders()
            with suppress(BrokenPipeError, ConnectionResetError):  # refused: the answer says why
                while chunk := content.read(_UPLOAD_CHUNK):
                    connection.send(chunk)
                    progress(len(chunk))
            result_of(connection.getresponse())

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
        answer = self._once(method, path, body, query=query, headers=asked)
        if "operation" not in answer:  # a daemon that answered at once
            return answer
        operation: wire.OperationInfo = answer["operation"]
        if self._detach:
            raise Detached(operation)
        while operation["state"] == "running":
            left = deadline - time.monotonic()
            if left <= 0:
                raise _still_running(operation, timeout or self._timeout)
            wait = min(left, _LONGEST_POLL)
            operation = self._surely(partial(self.operation, operation["id"], wait))
        if operation["error"] is not None:
            raise daemon_error(operation["error"])
        return operation["result"]

    def _once(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """A change that is made once, however often it has to be asked for."""
        keyed = {**(headers or {}), "idempotency-key": secrets.token_hex(16)}
        ask = partial(self._http.request, method, path, body, query=query, headers=keyed)
        return self._surely(ask)

    def _surely(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives; asked again when the answer was lost on its way."""
        asked_at = time.time()
        for pause in _PAUSES:
            try:
                return ask()
            except LostAnswer as lost:
                time.sleep(pause)
                self._check_same_daemon(asked_at, lost)
        return ask()

    def _check_same_daemon(self, asked_at: float, lost: LostAnswer) -> None:
        """Only the daemon that was asked knows the key; raises if it is gone."""
        try:
            started_at = self.status()["started_at"]
        except LoradError:
            raise lost from None
        if started_at > asked_at:
            raise LoradError(
                "daemon.unreachable",
                "the daemon ended before it answered, and has started again since",
                hint="whether the change was made: `loractl history NAME` and `loractl show NAME`",
            )


_FILES = (wire.CONFIG_FILE, wire.WEIGHTS_FILE)


_reason = partial(wire.check_text, "reason")


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
