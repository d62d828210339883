"""`loractl doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from loractl.options import JsonOption, SocketOption, TimeoutOption
from loractl.output import human_bytes, print_columns, print_json
from lorad import __version__, wire
from lorad.admin_client import AdminClient
from lorad.errors import ErrorClass, LoradError
from lorad.paths import socket_path

_LITTLE_SPACE = 0.05  # of the store's disk
_LEAST_SPACE = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: "ok", "warn" (worth knowing), or "fail" (something does not work)."""

    check: str
    state: Literal["ok", "warn", "fail"]
    message: str
    hint: str = ""


def doctor(
    socket: SocketOption = None, timeout: TimeoutOption = 10.0, json: JsonOption = False
) -> None:
    """Check socket, permissions, versions of both programs, store, disk and adapters.

    Exit 1 when something does not work.
    """
    findings = list(examine(socket, timeout))
    if json:
        print_json("lorad/doctor/v1", {"findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(f.state.upper(), f.check, f.message) for f in findings]
        print_columns(("STATE", "CHECK", "FOUND"), rows)
        for finding in findings:
            if finding.hint and finding.state != "ok":
                typer.echo(f"{finding.check}: {finding.hint}")
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(ErrorClass.NEGATIVE.exit_code)


def examine(socket: Path | None, timeout: float) -> Iterator[Finding]:
    """From the outside in: what cannot be reached is not looked into."""
    path = socket_path(str(socket) if socket else None)
    yield _socket(path)
    yield _directory(path.parent)
    client = AdminClient(socket, timeout)
    try:
        status = client.status()
    except LoradError as error:
        yield Finding("daemon", "fail", f"{error.message} [{error.code}]", error.hint)
        return
    where = f"pid {status['pid']}, uid {status['uid']}"
    yield Finding("daemon", "ok", f"answers, {where}; you may {_rights(status['role'])}")
    yield _programs(status)
    yield _service(status)
    yield _disk(status["store"])
    yield from _adapters(client, status)


def _socket(path: Path) -> Finding:
    try:
        found = path.lstat()
    except OSError as error:
        hint = "start the daemon, or name its socket: --socket or LORAD_SOCKET"
        return Finding("socket", "fail", f"{path}: {error.strerror}", hint)
    if not stat.S_ISSOCK(found.st_mode):
        return Finding("socket", "fail", f"{path} is not a socket", "move it away")
    mode = f"{path}, mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}"
    if found.st_mode & 0o007:
        return Finding("socket", "warn", mode, "other users can open it; the daemon refuses them")
    return Finding("socket", "ok", mode)


def _directory(path: Path) -> Finding:
    try:
        found = path.stat()
    except OSError as error:
        return Finding("directory", "fail", f"{path}: {error.strerror}", "start the daemon")
    mode = f"{path}, mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}"
    if found.st_mode & 0o022:
        hint = "others could replace the socket: chmod go-w"
        return Finding("directory", "fail", mode, hint)
    if not os.access(path, os.X_OK):
        return Finding("directory", "fail", mode, "you may not enter it: join the admin group")
    return Finding("directory", "ok", mode)


def _rights(role: str) -> str:
    return "read and change" if role == "admin" else "read only"


def _programs(status: wire.StatusInfo) -> Finding:
    message = f"lorad {status['daemon_version']}, loractl {__version__}"
    if status["daemon_version"] != __version__:
        hint = "they understand each other; restart the daemon to run the newer one"
        return Finding("versions", "warn", message, hint)
    return Finding("versions", "ok", f"{message}, admin API {status['api_version']}")


def _service(status: wire.StatusInfo) -> Finding:
    engine = status["engine"]
    work = f"{engine['running']} running, {engine['waiting']} waiting, {engine['steps']} steps"
    if status["draining"]:
        return Finding("service", "warn", f"draining: {work}", "`loractl resume` takes requests")
    return Finding("service", "ok", work)


def _disk(store: wire.StoreInfo) -> Finding:
    free, total = store["free_bytes"], store["total_bytes"]
    message = f"{store['path']}: {human_bytes(free)} of {human_bytes(total)} free"
    if total == 0:
        return Finding("disk", "fail", f"{store['path']} cannot be looked at", "see the log")
    if free < min(_LEAST_SPACE, total * _LITTLE_SPACE):
        return Finding("disk", "warn", message, "`loractl gc --keep N` deletes old versions")
    return Finding("disk", "ok", message)


def _adapters(client: AdminClient, status: wire.StatusInfo) -> Iterator[Finding]:
    count = f"{status['adapters']} adapters, {status['live_adapters']} live"
    failed = [
        (f"{adapter['name']}@{version['version']}", version)
        for adapter in client.adapters()["adapters"]
        for version in adapter["versions"]
        if version["state"] == "failed"
    ]
    yield Finding("adapters", "ok", count)
    for ref, version in failed:
        state: Literal["warn", "fail"] = "fail" if version["live"] else "warn"
        hint = "push the same content again, or roll back"
        yield Finding("files", state, f"{ref}: {version['failure']}", hint)
