"""The daemon as a service: activation, readiness, restart, roles, connections, top and doctor."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorad import systemd
from lorad.server.admin import ROUTES
from lorad.server.admin_contract import plain_path
from lorad.server.admin_openapi import openapi

ROOT = Path(__file__).resolve().parent.parent
DAEMON = Path(__file__).with_name("admin_daemon.py")
write_adapter = runpy.run_path(str(DAEMON))["write_adapter"]
LORACTL = [sys.executable, "-m", "loractl.main"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to act as another user")


class Daemon:
    """Registry and admin API in a process of their own."""

    def __init__(self, root: Path, **env: str) -> None:
        self.state, self.socket = root / "state", root / "run" / "lorad.sock"
        self.env = {**os.environ, "LORAD_SOCKET": str(self.socket), **env}
        command = [sys.executable, str(DAEMON), str(self.state), str(self.socket)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.env)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        transport = httpx.HTTPTransport(uds=str(self.socket), retries=20)
        self.http = httpx.Client(transport=transport, base_url="http://lorad", timeout=20)

    def loractl(self, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        command = [*LORACTL, *words]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, **how
        )

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.communicate(timeout=20)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    yield running
    running.stop()


# --- systemd -------------------------------------------------------------------------------------


def test_notify_reaches_the_service_manager(tmp_path: Path, monkeypatch) -> None:
    assert not systemd.notify("READY=1")  # nobody listens
    for address in (str(tmp_path / "notify"), f"@lorad-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address.replace("@", "\0", 1))
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            assert systemd.notify("READY=1", "STATUS=serving")
            assert manager.recv(100) == b"READY=1\nSTATUS=serving"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not systemd.notify("READY=1")


def test_watchdog_is_told_twice_in_its_time(monkeypatch) -> None:
    assert systemd.watchdog_seconds() is None
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert systemd.watchdog_seconds() == 30
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert systemd.watchdog_seconds() is None


ACTIVATE = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def test_socket_activation_readiness_and_a_clean_end(tmp_path: Path, tiny_chat_model) -> None:
    path, notify = tmp_path / "passed.sock", tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify))
        manager.settimeout(60)
        command = [sys.executable, "-c", ACTIVATE, str(path), "-m", "lorad.main", "start"]
        command += ["--model", str(tiny_chat_model), "--port", "0", "--slab-bytes", "64MiB"]
        command += ["--registry", str(tmp_path / "registry")]
        env = {**os.environ, "NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "200000"}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            # A client that comes before the daemon is ready waits in the queue of the socket.
            status = subprocess.run(
                [*LORACTL, "status", "--json", "--socket", str(path)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert json.loads(status.stdout)["pid"] == process.pid, status.stderr
            said = [manager.recv(200).decode() for _ in range(2)]
            assert said[0].startswith("READY=1\nSTATUS=serving")
            assert said[1] == "WATCHDOG=1"
            process.terminate()
            process.communicate(timeout=30)
        assert process.returncode == 0
        manager.setblocking(False)
        rest = []
        with suppress(BlockingIOError):
            while True:
                rest.append(manager.recv(200).decode())
        assert "STOPPING=1" in rest
    assert path.exists()  # it is the manager's, not ours to remove


def test_something_else_passed_is_refused(tmp_path: Path, tiny_chat_model) -> None:
    script = ACTIVATE.replace("socket.AF_UNIX)", "socket.AF_INET)").replace(
        "listener.bind(sys.argv[1])", "listener.bind(('127.0.0.1', 0))"
    )
    command = [sys.executable, "-c", script, "x", "-m", "lorad.main", "start"]
    done = subprocess.run(
        [*command, "--model", str(tiny_chat_model)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "socket activation" in done.stderr
    assert "Traceback" not in done.stderr


def test_units_name_what_exists() -> None:
    service = (ROOT / "deploy" / "lorad.service").read_text()
    for option in re.findall(r" (--[a-z-]+)", service):
        assert option in {"--now", "--config", "--registry"}
    assert "Type=notify" in service
    # As root, before the sandbox that keeps CUDA from it; and no reason not to start without.
    assert "\nExecStartPre=-+/usr/bin/nvidia-modprobe -u " in service
    assert "ListenStream=/run/lorad/lorad.sock" in (ROOT / "deploy" / "lorad.socket").read_text()


# --- restart -------------------------------------------------------------------------------------


def test_restart_loads_again_what_was_used_last(
    start_daemon, tiny_chat_model, random_adapter, tmp_path
) -> None:
    daemon = start_daemon(tiny_chat_model, "--slab-bytes", "64MiB", "--threads", "1")
    for seed in range(4):
        folder = random_adapter(tiny_chat_model, tmp_path / f"{seed}", 2, ("q_proj",), seed=seed)
        daemon.admin.push(folder, f"a{seed}")
        daemon.admin.promote(f"a{seed}", "v1")
    for name in ("a2", "a0", "a3", "a2"):
        daemon.openai().completions.create(model=name, prompt="x", max_tokens=1)
    daemon.stop()
    listed = json.loads((daemon.directory / "registry" / "warm.json").read_text())
    assert listed == [["default/a2", "v1"], ["default/a3", "v1"], ["default/a0", "v1"]]
    daemon.start()
    deadline = time.monotonic() + 10
    while daemon.admin.status()["tiers"].get("device", 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tiers = {
        a["name"]: a["versions"][0]["residency"]["tier"]
        for a in daemon.admin.adapters()["adapters"]
    }
    assert tiers == {"a0": "device", "a1": "disk", "a2": "device", "a3": "device"}
    (daemon.directory / "registry" / "warm.json").write_text("[[7]] nonsense")
    daemon.kill()
    daemon.start()  # a damaged list is no reason not to start


# --- who may do what -----------------------------------------------------------------------------


@as_root
def test_readers_may_ask_and_change_nothing(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, LORAD_TEST_READ_GROUP="mail")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    curl = ["curl", "-sS", "--unix-socket", str(daemon.socket)]

    def ask(*words: str, group: str = "mail") -> Any:
        done = subprocess.run(
            [*curl, *words],
            capture_output=True,
            text=True,
            user=65534,
            group=group,
            extra_groups=[],
        )
        return json.loads(done.stdout) if done.stdout else done.stderr

    assert ask("http://lorad/v1/status")["role"] == "read"
    assert ask("http://lorad/v1/adapters")["adapters"] == []
    for words in (["-X", "POST", "http://lorad/v1/shutdown"], ["http://lorad/v1/gc", "-d", "{}"]):
        assert ask(*words)["error"]["code"] == "socket.permission"
    assert "onnect" in ask("http://lorad/v1/status", group="daemon")  # the file's mode says no
    assert daemon.http.get("/v1/status").json()["role"] == "admin"
    daemon.stop()


# --- attacks on the socket -----------------------------------------------------------------------


def test_one_process_cannot_take_every_connection(daemon: Daemon) -> None:
    """It opens hundreds; another process is answered all the same, and memory stays flat."""
    before = daemon.memory()
    with ExitStack() as stack:
        for _ in range(400):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(daemon.socket))  # with a time limit a full queue would be an error
        began = time.monotonic()
        assert daemon.loractl("status").returncode == 0
        assert time.monotonic() - began < 10
    assert daemon.memory() < before + (20 << 20)


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    """Nobody accepts for a while: the client tries again until its timeout."""
    from lorad.admin_client import AdminClient
    from lorad.errors import LoradError

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(2):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(str(path))
        began = time.monotonic()
        with pytest.raises(LoradError) as caught:
            AdminClient(path, timeout=0.5).status()
        assert caught.value.code in ("daemon.unreachable", "operation.timeout")
        assert 0.4 < time.monotonic() - began < 5


def test_body_of_ten_gigabytes_is_refused_at_its_header(daemon: Daemon) -> None:
    before = daemon.memory()
    for path in ("/v1/uploads", "/v1/gc", "/v1/adapters/x:promote"):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(daemon.socket))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {10 << 30}\r\n\r\n"
            client.sendall(head.encode())
            answer = b""
            with suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(200):
                    client.sendall(bytes(1 << 16))
            with suppress(ConnectionResetError):
                answer = client.recv(65536)
        assert b"request.too_large" in answer or answer == b""
    assert daemon.memory() < before + (20 << 20)
    assert daemon.loractl("status").returncode == 0


def test_body_that_trickles_is_cut_off(daemon: Daemon) -> None:
    """Each byte comes in time, the whole does not; the limit of this daemon is one second."""
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(daemon.socket))
        client.sendall(b"POST /v1/gc HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 8:
                client.sendall(b" ")
                time.sleep(0.2)
    assert time.monotonic() - began < 5


# --- top, doctor, OpenAPI ------------------------------------------------------------------------


def test_top_once(daemon: Daemon, tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = write_adapter(tmp_path / f"a{seed}", seed)
        assert daemon.loractl("push", "tinker", str(folder)).returncode == 0
    daemon.loractl("promote", "tinker", "v1")
    daemon.loractl("canary", "tinker", "v2", "--percent", "5")
    shown = daemon.loractl("top", "--once")
    assert shown.returncode == 0, shown.stderr
    assert "1 running, 0 waiting" in shown.stdout
    assert re.search(r"default/tinker@v1 +live +device", shown.stdout)
    assert re.search(r"default/tinker@v2 +canary +device", shown.stdout)
    assert "4 pages" in shown.stdout or "60 pages" in shown.stdout
    data = json.loads(daemon.loractl("top", "--json").stdout)
    assert data["schema"] == "lorad/top/v1"
    assert set(data["rows_per_second"]) == {"base", "default/tinker@v1"}


def test_doctor(daemon: Daemon, tmp_path: Path) -> None:
    well = daemon.loractl("doctor", "--json")
    findings = {f["check"]: f for f in json.loads(well.stdout)["findings"]}
    assert well.returncode == 0
    assert set(findings) >= {"socket", "directory", "daemon", "versions", "service", "disk"}
    assert {f["state"] for f in findings.values()} <= {"ok", "warn"}
    daemon.loractl("push", "tinker", str(write_adapter(tmp_path / "a", 1)), "--promote")
    weights = next(daemon.state.glob("store/*/default/tinker/v1/*.safetensors"))
    weights.unlink()
    daemon.loractl("unload", "tinker@v1", "--force")
    daemon.loractl("load", "tinker@v1")
    ill = daemon.loractl("doctor")
    assert ill.returncode == 1
    assert "FAIL   files" in ill.stdout
    nobody = daemon.loractl("doctor", "--socket", str(tmp_path / "nobody"))
    assert nobody.returncode == 1
    assert "FAIL" in nobody.stdout


def test_openapi_document_has_every_route_and_is_up_to_date(daemon: Daemon) -> None:
    document = openapi(ROUTES)
    written = json.loads((ROOT / "docs" / "openapi-admin.json").read_text())
    assert written == document, "run python -m lorad.server.admin_openapi > docs/openapi-admin.json"
    assert daemon.http.get("/v1/openapi.json").json() == document
    told = {(m.upper(), path) for path, item in document["paths"].items() for m in item}
    served = {
        (method, plain_path(route.path))
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert told == served


def test_answers_have_the_fields_that_the_document_requires(daemon: Daemon, tmp_path: Path) -> None:
    daemon.loractl("push", "tinker", str(write_adapter(tmp_path / "a", 1)), "--promote")
    document = openapi(ROUTES)
    schemas = document["components"]["schemas"]

    def check(schema: dict[str, Any], value: Any, where: str) -> None:
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            if value is not None:
                check(next(s for s in schema["anyOf"] if s != {"type": "null"}), value, where)
            return
        kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
        if schema.get("type") in kinds:
            assert isinstance(value, kinds[schema["type"]]), where
        for key in schema.get("required", []):
            assert key in value, f"{where}.{key}"
        for key, inner in schema.get("properties", {}).items():
            if key in value:
                check(inner, value[key], f"{where}.{key}")
        if schema.get("type") == "object" and "properties" in schema:
            assert set(value) <= set(schema["properties"]), where
        for item in value if schema.get("type") == "array" else []:
            check(schema.get("items", {}), item, f"{where}[]")

    for path in ("status", "adapters", "adapters/tinker", "adapters/tinker/history", "steps"):
        template = path.replace("tinker", "{name}")
        answer = document["paths"][f"/v1/{template}"]["get"]["responses"]["200"]
        schema = answer["content"]["application/json"]["schema"]
        check(schema, daemon.http.get(f"/v1/{path}").json(), path)
