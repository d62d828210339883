"""The admin API over its real socket, with a real registry; the engine only keeps books."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorad.server.admin import ROUTES
from lorad.server.admin_contract import plain_path

DAEMON = Path(__file__).with_name("admin_daemon.py")
_SHARED = runpy.run_path(str(DAEMON))
write_adapter, BASE = _SHARED["write_adapter"], _SHARED["BASE"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to act as another user")


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


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
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


# --- pushing --------------------------------------------------------------------------------------


def test_push_tells_what_became_of_it(daemon: Daemon, adapters: list[Path]) -> None:
    pushed = daemon.push(adapters[0], "acme/tinker", message="from ci").json()
    assert (pushed["name"], pushed["outcome"], pushed["changed"]) == (
        "acme/tinker",
        "created",
        True,
    )
    version = pushed["version"]
    assert (version["version"], version["live"], version["rank"]) == ("v1", False, 2)
    assert version["created_by"] == {"uid": os.geteuid(), "pid": os.getpid()}
    assert version["residency"]["tier"] == "disk"
    assert version["bytes"] == sum(file.stat().st_size for file in adapters[0].iterdir())
    again = daemon.push(adapters[0], "acme/tinker").json()
    assert (again["outcome"], again["changed"], again["version"]["version"]) == (
        "unchanged",
        False,
        "v1",
    )
    assert daemon.staged() == []


def test_put_answers_with_the_sha256_of_what_came(daemon: Daemon, adapters: list[Path]) -> None:
    upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
    content = os.urandom(900_000)
    put = daemon.http.put(f"/v1/uploads/{upload}/files/{WEIGHTS}", content=content).json()
    expected = subprocess.run(["sha256sum"], input=content, capture_output=True, check=True)
    assert put == {
        "file": WEIGHTS,
        "bytes": 900_000,
        "sha256": expected.stdout.split()[0].decode(),
    }


def test_dry_run_of_a_push_leaves_nothing(daemon: Daemon, adapters: list[Path]) -> None:
    would = daemon.push(adapters[0], dry_run=1).json()
    assert (would["outcome"], would["changed"], would["dry_run"]) == ("created", True, True)
    assert daemon.get("/v1/adapters")["adapters"] == []
    assert daemon.staged() == []


def test_list_of_those_in_memory_only(tinker: Daemon, tmp_path: Path) -> None:
    """The live version of `tinker` is on the device since its promote; nothing of `idle` is."""
    assert tinker.push(write_adapter(tmp_path / "other", 77), name="idle").status_code == 200
    found = tinker.get("/v1/adapters?in_memory=1")["adapters"]
    assert [adapter["name"] for adapter in found] == ["tinker"]
    assert len(found[0]["versions"]) == 3
    assert len(tinker.get("/v1/adapters?in_memory=0")["adapters"]) == 2


def test_label_conflict(tinker: Daemon, adapters: list[Path], tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", 77)
    assert error(tinker.push(other, version="v2")) == (409, "version.exists")
    assert error(tinker.push(adapters[0], version="v9")) == (409, "version.exists")
    assert tinker.push(adapters[0], version="v1").json()["outcome"] == "unchanged"


def test_bad_adapters_are_refused_with_a_hint_and_leave_nothing(
    daemon: Daemon, tmp_path: Path
) -> None:
    wide = write_adapter(tmp_path / "wide", 0, rank=32)
    dora = write_adapter(tmp_path / "dora", 0, use_dora=True)
    torn = write_adapter(tmp_path / "torn", 0)
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-1])
    no_json = write_adapter(tmp_path / "no_json", 0)
    (no_json / CONFIG).write_bytes(b"\xff{")
    expected = {
        wide: "adapter.rank_exceeds_max",
        dora: "adapter.dora_unsupported",
        torn: "adapter.weights_corrupt",
        no_json: "adapter.config_invalid",
    }
    for directory, code in expected.items():
        answer = daemon.push(directory)
        assert error(answer) == (422, code)
        assert answer.json()["error"]["hint"]
        assert str(daemon.state) not in answer.text  # where the daemon keeps things is its own
    assert daemon.staged() == []
    assert daemon.get("/v1/adapters")["adapters"] == []


def test_incomplete_upload_can_go_on(daemon: Daemon, adapters: list[Path]) -> None:
    upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
    put = f"/v1/uploads/{upload}/files/"
    daemon.http.put(put + CONFIG, content=(adapters[0] / CONFIG).read_bytes())
    refused = daemon.post(f"/v1/uploads/{upload}:commit")
    assert error(refused) == (409, "upload.incomplete")
    assert refused.json()["error"]["details"] == {"missing": [WEIGHTS]}
    daemon.http.put(put + WEIGHTS, content=(adapters[0] / WEIGHTS).read_bytes())
    assert daemon.post(f"/v1/uploads/{upload}:commit").status_code == 200
    assert error(daemon.post(f"/v1/uploads/{upload}:commit")) == (404, "upload.not_found")


def test_discarded_upload_is_gone(daemon: Daemon) -> None:
    upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
    assert len(daemon.staged()) == 1
    assert daemon.http.delete(f"/v1/uploads/{upload}").status_code == 204
    assert daemon.staged() == []
    assert error(daemon.http.delete(f"/v1/uploads/{upload}")) == (404, "upload.not_found")


def test_only_the_two_files_may_be_put(daemon: Daemon) -> None:
    for file in ("weights.bin", "..%2F..%2Fevil", "adapter_config.json%00", "a" * 999):
        upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
        answer = daemon.http.put(f"/v1/uploads/{upload}/files/{file}", content=b"x")
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["code"] in ("request.invalid", "route.not_found")
        assert list((daemon.state / "store" / ".staging").rglob("*.*")) == []
        daemon.http.delete(f"/v1/uploads/{upload}")


def test_bodies_beyond_the_limits_are_refused_unread(daemon: Daemon) -> None:
    def put(file: str, length: str) -> bytes:
        upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
        head = f"PUT /v1/uploads/{upload}/files/{file} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(daemon.socket))
            client.sendall(head.encode())
            return b"".join(iter(lambda: client.recv(65536), b""))  # to the end: it was closed

    assert b"request.too_large" in put(WEIGHTS, f"Content-Length: {10 << 30}")
    assert b"request.too_large" in put(CONFIG, f"Content-Length: {2 << 20}")
    assert b"request.invalid" in put(WEIGHTS, "Transfer-Encoding: chunked")
    assert daemon.staged() == []


def test_client_killed_in_mid_push_leaves_nothing(daemon: Daemon) -> None:
    upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
    path = f"/v1/uploads/{upload}/files/{WEIGHTS}"
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n"
    script = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(sys.argv[2].encode()+bytes(100000)); print('sent', flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(daemon.socket), head]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"sent\n"
    assert len(daemon.staged()) == 1
    client.kill()
    client.communicate()
    wait_until(lambda: daemon.staged() == [])
    assert error(daemon.post(f"/v1/uploads/{upload}:commit")) == (404, "upload.not_found")


def test_client_gone_between_two_requests_leaves_nothing_after_a_while(daemon: Daemon) -> None:
    daemon.post("/v1/uploads", {"name": "tinker"})
    assert len(daemon.staged()) == 1
    wait_until(lambda: daemon.staged() == [])


def test_client_that_stops_sending_is_let_go(daemon: Daemon) -> None:
    upload = daemon.post("/v1/uploads", {"name": "tinker"}).json()["id"]
    path = f"/v1/uploads/{upload}/files/{WEIGHTS}"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(daemon.socket))
        head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nslow"
        client.sendall(head.encode())
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"no byte of the body came" in answer
    wait_until(lambda: daemon.staged() == [])


def test_uploads_are_bounded(daemon: Daemon) -> None:
    for _ in range(3):
        assert daemon.post("/v1/uploads", {"name": "tinker"}).status_code == 201
    assert error(daemon.post("/v1/uploads", {"name": "tinker"})) == (503, "queue.full")
    wait_until(lambda: daemon.post("/v1/uploads", {"name": "tinker"}).status_code == 201)


# --- names ----------------------------------------------------------------------------------------

ATTACKS = [
    "../x", "..", ".", "/etc", "a/../../b", "a\\..\\b", "", "a/", "/a", "a/b/c", "-rf", "nul\0",
    "new\nline", "\x1b[2J", "[red]x[/red]", "ａdmin", "аdmin", "Tinker", "tinker.", "tinker ",
    "name@v1", "name:1", "a" * 65, "a" * 60_000,
]  # fmt: skip


def test_attack_names_are_refused(daemon: Daemon) -> None:
    for name in ATTACKS:
        status, code = error(daemon.post("/v1/uploads", {"name": name}))
        assert (status, code) in ((400, "name.invalid"), (400, "request.invalid")), name
        if len(name) <= 1000:
            path = "/v1/adapters/" + "".join(f"%{byte:02x}" for byte in name.encode())
            status, code = error(daemon.http.get(path))
            assert code in ("name.invalid", "adapter.not_found", "route.not_found"), name
    assert daemon.staged() == []
    assert {entry.name for entry in daemon.state.iterdir()} == {
        *("registry.db", "registry.db-shm", "registry.db-wal", "store")
    }


def test_huge_body_is_refused(daemon: Daemon) -> None:
    answer = daemon.post("/v1/uploads", {"name": "a" * 1_000_000})
    assert error(answer) == (400, "request.too_large")


def test_name_with_tenant_both_encoded_and_plain(daemon: Daemon, adapters: list[Path]) -> None:
    daemon.push(adapters[0], "acme/tinker")
    for path in ("acme/tinker", "acme%2Ftinker"):
        assert daemon.get(f"/v1/adapters/{path}")["name"] == "acme/tinker"
        assert daemon.get(f"/v1/adapters/{path}/history")["events"]
        assert daemon.get(f"/v1/adapters/{path}/versions/v1")["version"] == "v1"
        assert daemon.post(f"/v1/adapters/{path}:promote").status_code == 200
    assert error(daemon.post("/v1/uploads", {"name": "acme/history"})) == (400, "name.reserved")
    assert daemon.get("/v1/adapters?tenant=acme")["adapters"][0]["live"] == "v1"
    assert daemon.get("/v1/adapters?tenant=other")["adapters"] == []


# --- promote and rollback -------------------------------------------------------------------------


def test_promote_loads_first_and_then_moves_the_name(tinker: Daemon) -> None:
    shown = tinker.http.get("/v1/adapters/tinker")
    assert shown.headers["etag"] == '"1"'
    moved = tinker.post(
        "/v1/adapters/tinker:promote",
        {"version": "v2", "reason": "better"},
        headers={"if-match": shown.headers["etag"]},
    ).json()
    assert moved == {
        "name": "tinker",
        "from_version": "v1",
        "to_version": "v2",
        "generation": 2,
        "changed": True,
        "dry_run": False,
        "self_test": None,  # this daemon has no engine to try it with
        "checks": 0,
    }
    version = tinker.get("/v1/adapters/tinker/versions/v2")
    assert (version["live"], version["residency"]["tier"]) == (True, "device")
    newest = tinker.get("/v1/adapters/tinker/history?limit=1")["events"]
    assert [(e["action"], e["reason"]) for e in newest] == [("promote", "better")]
    assert newest[0]["who"] == {"uid": os.geteuid(), "pid": os.getpid()}


def test_promote_takes_the_newest_unless_told(tinker: Daemon) -> None:
    assert tinker.post("/v1/adapters/tinker:promote").json()["to_version"] == "v3"
    again = tinker.post("/v1/adapters/tinker:promote").json()
    assert (again["changed"], again["generation"]) == (False, 2)


def test_failed_load_leaves_the_old_version_live(tinker: Daemon) -> None:
    tinker.flag("full")
    refused = tinker.post("/v1/adapters/tinker:promote", {"version": "v2"})
    assert error(refused) == (503, "memory.no_capacity")
    shown = tinker.get("/v1/adapters/tinker")
    assert (shown["live"], shown["generation"]) == ("v1", 1)
    tinker.flag("full", False)
    assert tinker.post("/v1/adapters/tinker:promote", {"version": "v2"}).status_code == 200


def test_altered_files_are_never_promoted(tinker: Daemon) -> None:
    weights = next(tinker.state.glob(f"store/*/default/tinker/v2/{WEIGHTS}"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(content)
    refused = tinker.post("/v1/adapters/tinker:promote", {"version": "v2"})
    assert error(refused) == (500, "store.digest_mismatch")
    assert live(tinker) == "v1"
    assert tinker.get("/v1/adapters/tinker/versions/v2")["state"] == "failed"
    assert tinker.get("/v1/status")["failed_versions"] == 1
    again = tinker.post("/v1/adapters/tinker:promote", {"version": "v2"})
    assert error(again) == (409, "version.failed")


def test_generation_conflict(tinker: Daemon) -> None:
    for header in ('"0"', "0"):
        answer = tinker.post("/v1/adapters/tinker:promote", headers={"if-match": header})
        assert error(answer) == (409, "generation.changed")
        assert answer.json()["error"]["details"] == {"generation": 1, "live": "v1"}
    malformed = tinker.post("/v1/adapters/tinker:promote", headers={"if-match": "latest"})
    assert error(malformed) == (400, "request.invalid")
    assert live(tinker) == "v1"


def test_of_two_promotes_at_once_with_one_generation_one_wins(tinker: Daemon) -> None:
    tinker.flag("slow")  # both are past the first look before either flips

    def promote(label: str) -> int:
        return tinker.post(
            "/v1/adapters/tinker:promote", {"version": label}, headers={"if-match": "1"}
        ).status_code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(promote, ["v2", "v3"])) == [200, 409]
    assert tinker.get("/v1/adapters/tinker")["generation"] == 2


def test_rollback_goes_back_in_time(tinker: Daemon) -> None:
    for label in ("v2", "v3"):
        tinker.post("/v1/adapters/tinker:promote", {"version": label})
    for expected in ("v2", "v1"):
        rolled = tinker.post("/v1/adapters/tinker:rollback", {"reason": "worse"}).json()
        assert rolled["to_version"] == expected == live(tinker)
    none_left = tinker.post("/v1/adapters/tinker:rollback")
    assert error(none_left) == (409, "rollback.no_previous")
    to_v3 = tinker.post("/v1/adapters/tinker:rollback", {"to": "v3"}).json()
    assert (to_v3["from_version"], to_v3["to_version"]) == ("v1", "v3")


def test_dry_runs_change_nothing(tinker: Daemon) -> None:
    before = tinker.get("/v1/adapters/tinker"), tinker.get("/v1/adapters/tinker/history")
    tried = {
        "POST /v1/adapters/tinker:promote": True,
        "POST /v1/adapters/tinker:rollback": None,
        "POST /v1/adapters/tinker:retire": True,
        "POST /v1/adapters/tinker/versions/v2:load": True,
        "POST /v1/adapters/tinker/versions/v2:unload": False,
        "POST /v1/adapters/tinker/versions/v2:pin": True,
        "POST /v1/adapters/tinker/versions/v2:unpin": False,
        "DELETE /v1/adapters/tinker/versions/v2": True,
    }
    for request, would_change in tried.items():
        method, path = request.split()
        answer = tinker.http.request(method, path, params={"dry_run": "1"})
        if would_change is None:
            assert error(answer) == (409, "rollback.no_previous")
        else:
            assert (answer.json()["changed"], answer.json()["dry_run"]) == (would_change, True)
    assert before == (
        tinker.get("/v1/adapters/tinker"),
        tinker.get("/v1/adapters/tinker/history"),
    )


def test_canary(tinker: Daemon) -> None:
    path = "/v1/adapters/tinker:canary"
    would = tinker.post(f"{path}?dry_run=1", {"percent": 5}).json()
    assert (would["version"], would["changed"], would["dry_run"]) == ("v3", True, True)
    begun = tinker.post(path, {"percent": 5, "version": "v2"}, headers={"if-match": "1"}).json()
    assert begun == {
        "name": "tinker",
        "from_version": None,
        "version": "v2",
        "percent": 5.0,
        "auto_rollback": False,
        "generation": 2,
        "changed": True,
        "dry_run": False,
    }
    shown = tinker.get("/v1/adapters/tinker")
    assert shown["live"] == "v1"
    assert set(shown["canary"]["counts"]) == {"v1", "v2"}
    assert tinker.get("/v1/adapters/tinker/versions/v2")["residency"]["tier"] == "device"
    assert tinker.post(path, {"percent": 5}).json()["changed"] is False
    assert tinker.post(path, {"percent": 9}).json()["version"] == "v2"
    unload = tinker.post("/v1/adapters/tinker/versions/v2:unload")
    assert error(unload) == (409, "version.canary")
    for body in ({}, {"percent": 101}, {"percent": True}, {"percent": 0, "version": "v2"}):
        assert error(tinker.post(path, body)) == (400, "request.invalid")
    assert error(tinker.post(path, {"percent": 5, "version": "v1"})) == (409, "version.live")
    ended = tinker.post(path, {"percent": 0}).json()
    assert (ended["from_version"], ended["version"], ended["changed"]) == ("v2", None, True)
    assert tinker.get("/v1/adapters/tinker")["canary"] is None


def test_canary_that_cannot_be_loaded_gets_no_requests(tinker: Daemon) -> None:
    tinker.flag("full")
    refused = tinker.post("/v1/adapters/tinker:canary", {"percent": 5})
    assert error(refused) == (503, "memory.no_capacity")
    assert tinker.get("/v1/adapters/tinker")["canary"] is None


# --- memory ---------------------------------------------------------------------------------------


def test_load_and_unload(tinker: Daemon) -> None:
    loaded = tinker.post("/v1/adapters/tinker/versions/v2:load").json()
    assert (loaded["pages"], loaded["bytes"], loaded["changed"]) == (1, 4096, True)
    assert tinker.post("/v1/adapters/tinker/versions/v2:load").json()["changed"] is False
    unloaded = tinker.post("/v1/adapters/tinker/versions/v2:unload").json()
    assert (unloaded["freed_device_bytes"], unloaded["freed_host_bytes"]) == (4096, 2048)
    assert tinker.post("/v1/adapters/tinker/versions/v2:unload").json()["changed"] is False
    assert tinker.get("/v1/adapters/tinker/versions/v2")["residency"]["tier"] == "disk"


def test_unload_of_the_live_version_needs_force(tinker: Daemon) -> None:
    path = "/v1/adapters/tinker/versions/v1:unload"
    assert error(tinker.post(path)) == (409, "version.live")
    assert tinker.post(path, {"force": True}).json()["freed_device_bytes"] == 4096
    assert live(tinker) == "v1"  # unloading frees memory; the name still answers


def test_unload_that_cannot_drain_changes_nothing(tinker: Daemon) -> None:
    tinker.post("/v1/adapters/tinker/versions/v2:load")
    tinker.flag("busy")
    path = "/v1/adapters/tinker/versions/v2:unload"
    assert error(tinker.post(path, {"drain_timeout": 0.1})) == (504, "drain.timeout")
    assert tinker.get("/v1/adapters/tinker/versions/v2")["residency"]["tier"] == "device"
    assert error(tinker.post(path, {"drain_timeout": -1})) == (400, "request.invalid")


def test_pin_is_kept_over_a_restart_and_holds_off_unload_and_delete(tinker: Daemon) -> None:
    version = "/v1/adapters/tinker/versions/v2"
    assert tinker.post(f"{version}:pin").json()["changed"] is True
    assert error(tinker.post(f"{version}:unload")) == (409, "version.pinned")
    assert error(tinker.http.delete(version)) == (409, "version.pinned")
    tinker.kill()
    tinker.start()
    assert tinker.get(version)["pinned"] is True
    assert tinker.post(f"{version}:unpin").json()["changed"] is True
    assert tinker.post(f"{version}:unpin").json()["changed"] is False
    assert tinker.http.delete(version).status_code == 200


def test_delete(tinker: Daemon) -> None:
    assert error(tinker.http.delete("/v1/adapters/tinker/versions/v1")) == (409, "version.live")
    assert error(tinker.http.delete("/v1/adapters/tinker")) == (409, "version.live")
    tinker.flag("busy")
    busy = tinker.http.delete("/v1/adapters/tinker/versions/v3")
    assert error(busy) == (504, "drain.timeout")
    tinker.flag("busy", False)
    assert tinker.http.delete("/v1/adapters/tinker/versions/v3").json()["deleted"] == ["v3"]
    everything = tinker.http.delete("/v1/adapters/tinker?force=1").json()
    assert everything["deleted"] == ["v1", "v2"]
    assert error(tinker.http.get("/v1/adapters/tinker")) == (404, "adapter.not_found")
    assert list(tinker.state.glob("store/*/*")) == []
    assert len(tinker.get("/v1/adapters/tinker/history")["events"]) == 8


# --- vLLM's routes --------------------------------------------------------------------------------


def test_vllm_scripts_work(daemon: Daemon, adapters: list[Path]) -> None:
    load = {"lora_name": "sql", "lora_path": str(adapters[0])}
    first = daemon.post("/v1/load_lora_adapter", load)
    assert (first.status_code, first.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    twice = daemon.post("/v1/load_lora_adapter", load)
    assert error(twice) == (400, "request.invalid")
    assert "has already been loaded" in twice.text
    in_place = {**load, "lora_path": str(adapters[1]), "load_inplace": True}
    assert daemon.post("/v1/load_lora_adapter", in_place).status_code == 200
    assert live(daemon, "sql") == "v2"
    gone = daemon.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
    assert live(daemon, "sql") is None
    again = daemon.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert error(again) == (404, "adapter.not_found")
    assert daemon.post("/v1/load_lora_adapter", load).status_code == 200
    assert live(daemon, "sql") == "v1"  # the same content is the same version


def test_vllm_load_fetches_nothing(daemon: Daemon, tmp_path: Path) -> None:
    for path in ("org/adapter", "../x", "http://169.254.169.254/"):
        answer = daemon.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        assert error(answer) == (400, "request.invalid")
    absent = {"lora_name": "x", "lora_path": str(tmp_path / "absent")}
    assert error(daemon.post("/v1/load_lora_adapter", absent)) == (404, "path.not_found")
    assert error(daemon.post("/v1/load_lora_adapter", {"lora_name": "x"})) == (
        400,
        "request.invalid",
    )


# --- the daemon itself ----------------------------------------------------------------------------


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
        client.settimeout(10)
        client.connect(str(daemon.socket))
        if number % 2:
            client.sendall(b"GET /v1/hea")  # and never the rest
        clients.append(client)
    wait_until(daemon.answers, seconds=10)
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
