"""Pushes over the admin socket: uploads, refusals, limits, and clients that go away."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from admin_process import CONFIG, WEIGHTS, Daemon, error, wait_until, write_adapter
from admin_process import adapters as adapters
from admin_process import daemon as daemon
from admin_process import tinker as tinker


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
