"""The daemon of `admin_daemon.py` as a process, and a client of its socket.

The registry is a real one; the engine only keeps books. A test file imports the fixtures it uses
under their own names (`daemon as daemon`), where pytest finds them.
"""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

DAEMON = Path(__file__).with_name("admin_daemon.py")
_SHARED = runpy.run_path(str(DAEMON))
write_adapter, BASE = _SHARED["write_adapter"], _SHARED["BASE"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Daemon:
    """The daemon as a process, and a client of its socket."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.socket = root / "run" / "lorad.sock"
        self.log = root / "daemon.log"
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(DAEMON), str(self.state), str(self.socket)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.log.read_text()
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self.http = httpx.Client(transport=transport, base_url="http://lorad", timeout=20)
        wait_until(self.answers)

    def answers(self) -> bool:
        try:
            return self.http.get("/v1/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.http.close()
        self.process.send_signal(number)
        self.process.communicate(timeout=20)

    def flag(self, name: str, on: bool = True) -> None:
        """Steer the engine's books; see admin_daemon.py."""
        flag = self.state / f"engine-{name}"
        flag.touch() if on else flag.unlink()

    def staged(self) -> list[str]:
        return [entry.name for entry in (self.state / "store" / ".staging").iterdir()]

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, **how: Any) -> httpx.Response:
        return self.http.post(path, json=body, **how)

    def push(self, directory: Path, name: str = "tinker", **fields: Any) -> httpx.Response:
        """The three requests of a push; the answer to the last that was sent."""
        dry_run = fields.pop("dry_run", 0)
        created = self.post("/v1/uploads", {"name": name, **fields})
        if created.status_code != 201:
            return created
        upload = created.json()["id"]
        for file in (CONFIG, WEIGHTS):
            content = (directory / file).read_bytes()
            answer = self.http.put(f"/v1/uploads/{upload}/files/{file}", content=content)
            if answer.status_code != 200:
                return answer
        return self.post(f"/v1/uploads/{upload}:commit?dry_run={dry_run}")


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    yield running
    if running.process.poll() is None:
        running.kill(signal.SIGTERM)
    assert "Traceback" not in running.log.read_text()


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    return [write_adapter(tmp_path / f"adapter{seed}", seed) for seed in range(3)]


@pytest.fixture
def tinker(daemon: Daemon, adapters: list[Path]) -> Daemon:
    """`tinker` with v1 (live), v2 and v3."""
    for directory in adapters:
        assert daemon.push(directory).status_code == 200
    assert daemon.post("/v1/adapters/tinker:promote", {"version": "v1"}).status_code == 200
    return daemon


def error(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()["error"]
    assert set(body) == {"code", "message", "hint", "details", "request_id"}
    assert body["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, body["code"]


def live(daemon: Daemon, name: str = "tinker") -> str | None:
    label: str | None = daemon.get(f"/v1/adapters/{name}")["live"]
    return label
