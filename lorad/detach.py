"""A daemon in the background: start it, wait until it is ready, look at it, stop it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from lorad.admin_client import AdminClient
from lorad.errors import ERROR_CODES, LoradError
from lorad.paths import state_dir
from lorad.wire import StatusInfo

_POLL = 0.1  # seconds


def start_detached(arguments: list[str], socket: Path, log_file: Path | None) -> None:
    """Run the same command line without --detach in a session of its own.

    Returns once the daemon has printed its ready line, which is repeated here. Raises the error
    with which it ended before that, or `daemon.error` with the end of its log.
    """
    file = log_file or state_dir() / "lorad.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    begin = file.stat().st_size if file.exists() else 0
    with file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorad.main", *(a for a in arguments if a != "--detach")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while not (ready := _ready_lines(file, begin)):
        if process.poll() is not None:
            raise _why_it_ended(_read_from(file, begin), process.returncode, file)
        time.sleep(_POLL)
    typer.echo("\n".join(ready))
    typer.echo(f"  process {process.pid}, log {file}; `lorad stop --socket {socket}` ends it")


def _why_it_ended(log: str, status: int, file: Path) -> LoradError:
    """The error that the daemon printed last, as it would have been in the foreground."""
    found = re.findall(r"^error: (.*) \[([a-z_.]+)\]$(?:\nhint:  (.*))?", log, re.MULTILINE)
    if found and found[-1][1] in ERROR_CODES:
        message, code, hint = found[-1]
        return LoradError(code, message, hint=hint or f"its log is {file}")
    return LoradError(
        "daemon.error",
        f"the daemon ended with status {status}:\n{log[-2000:].strip()}",
        hint=f"its log is {file}",
    )


def _read_from(file: Path, begin: int) -> str:
    with file.open("rb") as log:
        log.seek(begin)
        return log.read().decode("utf-8", "replace")


def _ready_lines(file: Path, begin: int) -> list[str]:
    lines = _read_from(file, begin).splitlines()
    for number, line in enumerate(lines):
        if line.startswith("lorad is ready") and number + 1 < len(lines):
            return lines[number : number + 2]
    return []


def stop_daemon(socket: Path, timeout: float) -> None:
    """Ask the daemon to end and wait for its process; `operation.timeout` if it takes longer."""
    client = AdminClient(socket)
    pid = client.status()["pid"]
    client.shutdown()
    deadline = time.monotonic() + timeout
    while _is_alive(pid):
        if time.monotonic() > deadline:
            raise LoradError(
                "operation.timeout",
                f"process {pid} is still finishing its requests after {timeout:g} s",
                hint="it will end by itself; `lorad status` shows what runs",
                details={"pid": pid},
            )
        time.sleep(_POLL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A zombie that its parent has not collected yet has ended all the same.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def status_lines(status: StatusInfo) -> Iterator[str]:
    """The status for people, a fact a line."""
    engine, tiers = status["engine"], status["tiers"]
    yield f"lorad {status['daemon_version']} serves {status['base_model']} (pid {status['pid']})"
    yield f"adapters   {status['adapters']} registered, {status['live_adapters']} live"
    yield "tiers      " + ", ".join(f"{count} {tier}" for tier, count in tiers.items())
    yield f"requests   {engine['running']} running, {engine['waiting']} waiting"
    yield (
        f"pages      {engine['kv_pages']} KV, {engine['adapter_pages']} adapters, "
        f"{engine['free_pages']} free of {engine['total_pages']}"
    )
    yield f"tokens     {engine['generated_tokens']} generated in {engine['steps']} steps"
