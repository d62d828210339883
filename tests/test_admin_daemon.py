"""The admin API's daemon itself: status, routes, restarts, its socket, other users, kill -9."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin_process import BASE, DAEMON, WEIGHTS, Daemon, error, wait_until
from admin_process import adapters as adapters
from admin_process import daemon as daemon
from admin_process import tinker as tinker
from lorad.server.admin import ROUTES
from lorad.server.admin_contract import plain_path

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to act as another user")


def test_status_config_metrics_and_steps(tinker: Daemon) -> None:
    status = tinker.get("/v1/status")
    assert status["pid"] == tinker.process.pid
    assert (status["base_model"], status["adapters"], status["live_adapters"]) == (BASE, 1, 1)
    assert status["tiers"] == {"device": 1}
    assert status["engine"]["running"] == 1
    assert tinker.get("/v1/config") == {"config": {"model": {"id": BASE}}}
    assert "# HELP" in tinker.http.get("/v1/metrics").text
    steps = tinker.get("/v1/steps?limit=2")["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["rows"] == {"base": 1, "default/tinker@v1": 2}
    for limit in ("0", "x", "1" * 30, "-1"):
        assert tinker.http.get(f"/v1/steps?limit={limit}").status_code == 400


def test_unknown_routes_and_fields(daemon: Daemon) -> None:
    for path in ("/v2/status", "/"):
        assert error(daemon.http.get(path)) == (404, "route.not_found")
    for method, path, allowed in (
        ("POST", "/v1/status", "GET, HEAD"),
        ("PUT", "/v1/adapters/x", "DELETE, GET, HEAD"),
        ("GET", "/v1/adapters/x:promote", "POST"),
    ):
        answer = daemon.http.request(method, path)
        assert error(answer) == (405, "route.method_not_allowed")
        assert answer.headers["allow"] == allowed
    misspelt = daemon.post("/v1/uploads", {"name": "x", "verison": "v1"})
    assert error(misspelt) == (400, "request.invalid")
    assert "verison" in misspelt.text
    for body in (b"{", b"[]", b"\xff", b"[" * 50_000):
        assert error(daemon.http.post("/v1/uploads", content=body)) == (400, "request.invalid")
    assert error(daemon.post("/v1/adapters/x:promote?dry_run=maybe")) in (
        (400, "request.invalid"),
        (404, "adapter.not_found"),
    )


def test_request_ids_are_taken_or_given(daemon: Daemon) -> None:
    given = daemon.http.get("/v1/healthz", headers={"x-request-id": "ci-42"})
    assert given.headers["x-request-id"] == "ci-42"
    assert given.headers["lorad-api"] == "1"
    foul = daemon.http.get("/v1/healthz", headers={"x-request-id": "a b\x1b[2J"})
    assert foul.headers["x-request-id"].isalnum()


def test_curl_works_as_the_manual_says(tinker: Daemon) -> None:
    def curl(*arguments: str) -> Any:
        command = ["curl", "-sS", "--unix-socket", str(tinker.socket), *arguments]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    assert curl("http://lorad/v1/status")["base_model"] == BASE
    body = json.dumps({"version": "v2"})
    moved = curl("http://lorad/v1/adapters/tinker:promote", "-H", 'If-Match: "1"', "-d", body)
    assert moved["to_version"] == "v2"
    big = tinker.state.parent / "big"
    big.write_bytes(bytes(1 << 20))  # large enough for curl to send Expect: 100-continue
    upload = curl("http://lorad/v1/uploads", "-d", '{"name": "tinker"}')["id"]
    put = curl("-T", str(big), f"http://lorad/v1/uploads/{upload}/files/{WEIGHTS}")
    assert put["bytes"] == 1 << 20


def test_manual_names_every_route() -> None:
    text = (Path(__file__).parent.parent / "docs" / "admin-api.md").read_text()
    for route in ROUTES:
        path, _, verb = plain_path(route.path).partition(":")
        assert (f":{verb}`" if verb else path) in text, route.path
        assert any(method in text for method in route.methods or ())


def test_shutdown_ends_the_daemon_and_removes_its_socket(daemon: Daemon) -> None:
    daemon.post("/v1/uploads", {"name": "tinker"})
    assert daemon.post("/v1/shutdown").status_code == 202
    daemon.http.close()
    assert daemon.process.wait(timeout=20) == 0
    assert not daemon.socket.exists()
    assert daemon.staged() == []


def test_restart_keeps_names_and_history(tinker: Daemon) -> None:
    before = tinker.get("/v1/adapters/tinker"), tinker.get("/v1/adapters/tinker/history")
    tinker.kill()
    tinker.start()
    adapter = tinker.get("/v1/adapters/tinker")
    for version in (*adapter["versions"], *before[0]["versions"]):
        version.pop("residency")  # memory is empty after a start
    assert (adapter, tinker.get("/v1/adapters/tinker/history")) == before


def test_second_daemon_is_refused_and_says_whose_it_is(daemon: Daemon, tmp_path: Path) -> None:
    for state, path in ((tmp_path / "other", daemon.socket), (daemon.state, tmp_path / "o/s")):
        command = [sys.executable, str(DAEMON), str(state), str(path)]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode != 0
        assert "another lorad" in second.stderr
    assert daemon.answers()


def test_modes_under_the_weakest_umask(daemon: Daemon) -> None:
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (daemon.socket, daemon.socket.parent, daemon.state)
    }
    assert list(modes.values()) == [0o600, 0o700, 0o700]
    assert stat.S_IMODE((daemon.state / "registry.db").stat().st_mode) == 0o600


@as_root
def test_other_users_are_refused_even_with_a_way_in(daemon: Daemon) -> None:
    """The file modes keep them out; if somebody loosens those, the credentials still do."""
    daemon.socket.chmod(0o666)
    with tempfile.TemporaryDirectory() as open_directory:
        Path(open_directory).chmod(0o755)
        way_in = Path(open_directory) / "lorad.sock"
        way_in.hardlink_to(daemon.socket)
        command = ["curl", "-sS", "--unix-socket", str(way_in), "http://lorad/v1/status"]
        answer = subprocess.run(
            command, capture_output=True, text=True, user=65534, group=65534, check=False
        )
    assert json.loads(answer.stdout)["error"]["code"] == "socket.permission", answer.stderr


def test_silent_and_slow_connections_do_not_shut_others_out(daemon: Daemon) -> None:
    clients = []
    for number in range(40):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(daemon.socket))  # with a time limit a full queue would be an error
        client.settimeout(10)
        if number % 2:
            with suppress(BrokenPipeError):  # one more than a process may have: closed already
                client.sendall(b"GET /v1/hea")  # and never the rest
        clients.append(client)
    wait_until(daemon.answers)
    for client in clients:
        with client, suppress(ConnectionResetError):
            assert client.recv(1) == b""  # closed, within the header's time


def test_kill_in_the_middle_of_pushes_and_promotes(daemon: Daemon, adapters: list[Path]) -> None:
    for round_number in range(4):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(churn, daemon, adapters)
            time.sleep(0.05 + 0.07 * round_number)
            daemon.process.kill()
        daemon.process.communicate()
        daemon.start()
        for adapter in daemon.get("/v1/adapters")["adapters"]:
            assert {version["state"] for version in adapter["versions"]} <= {"available"}
            if adapter["live"]:
                load = f"/v1/adapters/tinker/versions/{adapter['live']}:load"
                assert daemon.post(load).status_code == 200  # the digest is checked there
        assert daemon.staged() == []


def churn(daemon: Daemon, adapters: list[Path]) -> None:
    """Push and promote until the daemon is gone."""
    try:
        while True:
            for directory in adapters:
                pushed = daemon.push(directory).json()
                label = pushed["version"]["version"]
                daemon.post("/v1/adapters/tinker:promote", {"version": label})
    except httpx.TransportError:
        return
