"""Operations, idempotency keys, the stream of events, garbage collection, drain and resume."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorad.admin_client import AdminClient
from lorad.errors import LoradError

DAEMON = Path(__file__).with_name("admin_daemon.py")
write_adapter = runpy.run_path(str(DAEMON))["write_adapter"]
LORACTL = [sys.executable, "-m", "loractl.main"]
ASYNC = {"prefer": "respond-async"}


class Daemon:
    """Registry and admin API in a process; `cats` has v1 (live), v2 and v3."""

    def __init__(self, root: Path) -> None:
        self.state, self.socket = root / "state", root / "run" / "lorad.sock"
        self.env = {**os.environ, "LORAD_SOCKET": str(self.socket)}
        command = [sys.executable, str(DAEMON), str(self.state), str(self.socket)]
        self.log = root / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        transport = httpx.HTTPTransport(uds=str(self.socket), retries=20)
        self.http = httpx.Client(transport=transport, base_url="http://lorad", timeout=20)
        for seed in range(3):
            self.loractl("push", "cats", str(write_adapter(root / f"a{seed}", seed)))
        self.loractl("promote", "cats", "v1")

    def loractl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*LORACTL, *words], env=self.env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 or not check, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def flag(self, name: str) -> None:
        (self.state / f"engine-{name}").touch()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    yield running
    running.http.close()
    running.process.terminate()
    running.process.communicate(timeout=20)
    assert "Traceback" not in running.log.read_text()


PROMOTE = "/v1/adapters/cats:promote"


def test_a_change_can_be_left_and_asked_for(daemon: Daemon) -> None:
    daemon.flag("slow")
    accepted = daemon.post(PROMOTE, {"version": "v2"}, **ASYNC)
    assert accepted.status_code == 202
    operation = accepted.json()["operation"]
    assert (operation["state"], operation["action"]) == ("running", "promote")
    assert accepted.headers["location"] == f"/v1/operations/{operation['id']}"
    assert daemon.get("/v1/adapters/cats")["live"] == "v1"
    ended = daemon.get(f"/v1/operations/{operation['id']}?wait=30s")
    assert (ended["state"], ended["error"]) == ("succeeded", None)
    assert ended["result"]["to_version"] == "v2"
    assert ended["ended_at"] >= ended["started_at"] + 0.5
    assert daemon.get("/v1/adapters/cats")["live"] == "v2"
    assert daemon.get("/v1/operations")["operations"][0]["id"] == operation["id"]


def test_a_wait_that_ends_first_says_that_it_still_runs(daemon: Daemon) -> None:
    daemon.flag("slow")
    operation = daemon.post(PROMOTE, {"version": "v2"}, **ASYNC).json()["operation"]
    began = time.monotonic()
    assert daemon.get(f"/v1/operations/{operation['id']}?wait=0.1")["state"] == "running"
    assert time.monotonic() - began < 0.9


def test_a_change_that_fails_later_has_its_error(daemon: Daemon) -> None:
    daemon.flag("full")
    operation = daemon.post(PROMOTE, {"version": "v2"}, **ASYNC).json()["operation"]
    ended = daemon.get(f"/v1/operations/{operation['id']}?wait=30")
    assert (ended["state"], ended["result"]) == ("failed", None)
    assert ended["error"]["code"] == "memory.no_capacity"
    gone = daemon.http.get("/v1/operations/op-nobody")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "operation.not_found")


def test_a_client_that_goes_away_does_not_stop_its_change(daemon: Daemon) -> None:
    daemon.flag("slow")
    with pytest.raises(httpx.ReadTimeout):
        daemon.http.post(PROMOTE, json={"version": "v2"}, timeout=0.1)
    for _ in range(100):
        if daemon.get("/v1/adapters/cats")["live"] == "v2":
            return
        time.sleep(0.05)
    pytest.fail("the promote was lost")


def test_an_idempotency_key_makes_a_change_once(daemon: Daemon) -> None:
    key = {"idempotency-key": "deploy-42"}
    first = daemon.post("/v1/adapters/cats:rollback", {"to": "v2"}, **key)
    daemon.post("/v1/adapters/cats:promote", {"version": "v3"})
    again = daemon.post("/v1/adapters/cats:rollback", {"to": "v2"}, **key)
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert daemon.get("/v1/adapters/cats")["live"] == "v3"  # it was not rolled back again
    other = daemon.post("/v1/adapters/cats:rollback", {"to": "v1"}, **key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency.conflict")
    for bad in ("", "x" * 129):
        answer = daemon.post("/v1/adapters/cats:rollback", {}, **{"idempotency-key": bad})
        assert answer.status_code == 400


def whole_message(connection: socket.socket) -> bytes:
    """One HTTP message with a Content-Length or no body."""
    with connection.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n")) + b"\r\n"
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return head + file.read(int(length[1]) if length else 0)


class LosesAnswers:
    """A socket in front of the daemon's that keeps the first answers to changes for itself."""

    def __init__(self, path: Path, daemon: Path, lost: int) -> None:
        self.path, self.daemon, self.lost = path, daemon, lost
        self.keys: list[bytes] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            client, _ = self.listener.accept()
            with client, socket.socket(socket.AF_UNIX) as server:
                server.connect(str(self.daemon))
                asked = whole_message(client)
                server.sendall(asked)
                answer = whole_message(server)
                if asked.startswith(b"POST"):
                    self.keys += re.findall(rb"(?i)idempotency-key: (\w+)", asked)
                    self.lost -= 1
                    if self.lost >= 0:
                        continue
                client.sendall(answer)


def test_a_change_whose_answer_is_lost_is_made_once(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in ("v2", "v3"):
        daemon.post(PROMOTE, {"version": label})
    between = LosesAnswers(tmp_path / "between.sock", daemon.socket, lost=2)
    done = daemon.loractl("rollback", "cats", "--socket", str(between.path))
    assert "live v3 -> v2 (generation 4)" in done.stdout
    assert daemon.get("/v1/adapters/cats")["live"] == "v2"  # a second one would have led to v1
    assert len(between.keys) == 3 and len(set(between.keys)) == 1
    admin = AdminClient(between.path)
    admin.set_pinned("cats", "v1", True, dry_run=False)
    assert len(set(between.keys)) == 2  # the next change has a key of its own
    between.keys, between.lost = [], 99
    with pytest.raises(LoradError, match="closed the connection"):
        admin.promote("cats", "v3")
    assert len(between.keys) == 4
    later = {**admin.status(), "started_at": time.time() + 60}
    monkeypatch.setattr(admin, "status", lambda: later)
    with pytest.raises(LoradError, match="started again") as caught:
        admin.promote("cats", "v2")
    assert caught.value.code == "daemon.unreachable" and len(between.keys) == 5


def test_of_two_requests_at_once_with_one_key_one_is_made(daemon: Daemon) -> None:
    daemon.flag("slow")
    answers: list[Any] = []

    def promote() -> None:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://lorad"
        ) as http:
            headers = {"idempotency-key": "k"}
            answers.append(http.post(PROMOTE, json={"version": "v2"}, headers=headers).json())

    threads = [threading.Thread(target=promote) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1] == answers[2]
    assert daemon.get("/v1/adapters/cats")["generation"] == 2


def test_detach_wait_and_timeout_on_the_command_line(daemon: Daemon) -> None:
    daemon.flag("slow")
    left = daemon.loractl("promote", "cats", "v2", "--detach")
    name = left.stdout.strip()
    assert name.startswith("op-")
    shown = json.loads(daemon.loractl("operation", name, "--wait", "--json").stdout)
    assert (shown["schema"], shown["result"]["to_version"]) == ("lorad/operation/v1", "v2")
    late = daemon.loractl("promote", "cats", "v3", "--timeout", "0.1", "--json", check=False)
    assert late.returncode == 9
    error = json.loads(late.stderr)["error"]
    assert error["code"] == "operation.timeout"
    done = daemon.loractl("operation", error["details"]["operation"], "--wait")
    assert "succeeded" in done.stdout
    assert daemon.get("/v1/adapters/cats")["live"] == "v3"
    assert name in daemon.loractl("operation").stdout
    conflict = daemon.loractl("promote", "cats", "v1", "--if-generation", "0", check=False)
    assert conflict.returncode == 7
    both = daemon.loractl("push", "x", "a", "--promote", "--detach", check=False)
    assert both.returncode == 2


# --- events --------------------------------------------------------------------------------------


def test_events_from_a_cursor(daemon: Daemon) -> None:
    lines = daemon.http.get("/v1/events").text.splitlines()
    found = [json.loads(line) for line in lines]
    assert [e["action"] for e in found] == ["push", "push", "push", "promote"]
    assert {e["name"] for e in found} == {"cats"}
    after = found[1]["id"]
    rest = daemon.http.get(f"/v1/events?after={after}&limit=1").text.splitlines()
    assert [json.loads(line)["id"] for line in rest] == [found[2]["id"]]
    assert daemon.http.get("/v1/events?after=99999").text == ""
    assert daemon.http.get("/v1/events?after=-1").status_code == 400


def test_follow_gives_what_happens_and_ends_with_the_daemon(daemon: Daemon) -> None:
    cursor = daemon.get("/v1/adapters")["cursor"]
    command = [*LORACTL, "events", "--after", str(cursor), "--follow", "--json"]
    following = subprocess.Popen(command, env=daemon.env, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    daemon.loractl("promote", "cats", "v2", "--reason", "x")
    event = json.loads(following.stdout.readline())
    assert (event["schema"], event["action"]) == ("lorad/event/v1", "promote")
    assert (event["to_version"], event["reason"]) == ("v2", "x")
    daemon.loractl("canary", "cats", "v3", "--percent", "2.5")
    event = json.loads(following.stdout.readline())
    assert (event["action"], event["percent"]) == ("canary", 2.5)
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    following.communicate(timeout=20)
    assert following.returncode == 0
    assert time.monotonic() - began < 5


def test_watch_as_json_is_the_list_and_then_its_changes(daemon: Daemon) -> None:
    command = [*LORACTL, "list", "--watch", "--json"]
    watching = subprocess.Popen(command, env=daemon.env, stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    first = json.loads(watching.stdout.readline())
    assert first["schema"] == "lorad/adapters/v1"
    assert first["adapters"][0]["live"] == "v1"
    daemon.loractl("promote", "cats", "v2")
    event = json.loads(watching.stdout.readline())
    assert (event["id"], event["action"]) == (first["cursor"] + 1, "promote")
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=60)
    assert watching.returncode == 130


def test_followers_are_bounded(daemon: Daemon) -> None:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://lorad"
    ) as http:
        streams = [http.stream("GET", "/v1/events?follow=1") for _ in range(9)]
        statuses = [stream.__enter__().status_code for stream in streams]
        for stream in streams:
            stream.__exit__(None, None, None)
    assert statuses == [*[200] * 8, 503]


# --- gc ------------------------------------------------------------------------------------------


def test_gc_keeps_what_something_refers_to(daemon: Daemon, tmp_path: Path) -> None:
    for seed in range(3, 8):
        daemon.loractl("push", "cats", str(write_adapter(tmp_path / f"b{seed}", seed)))
    daemon.loractl("promote", "cats", "v2")  # a rollback would go to v1
    daemon.loractl("pin", "cats@v3")
    daemon.loractl("canary", "cats", "v4", "--percent", "1")
    would = daemon.loractl("gc", "--keep", "2", "--dry-run", check=False)
    assert (would.returncode, would.stdout.split()) == (1, ["cats@v5", "cats@v6"])
    collected = json.loads(daemon.loractl("gc", "--keep", "2", "--json").stdout)
    assert collected["deleted"] == ["cats@v5", "cats@v6"]
    assert collected["freed_bytes"] > 0
    left = [v["version"] for v in daemon.get("/v1/adapters/cats")["versions"]]
    assert left == ["v1", "v2", "v3", "v4", "v7", "v8"]
    assert json.loads(daemon.loractl("gc", "--keep", "2", "--json").stdout)["changed"] is False
    assert daemon.loractl("gc", check=False).returncode == 2  # this daemon has no policy


def test_gc_passes_over_what_is_in_use(daemon: Daemon) -> None:
    daemon.flag("busy")
    collected = json.loads(daemon.loractl("gc", "cats", "--keep", "0", "--json").stdout)
    assert collected["deleted"] == []
    assert [skipped["ref"] for skipped in collected["skipped"]] == ["cats@v2", "cats@v3"]
    assert len(daemon.get("/v1/adapters/cats")["versions"]) == 3


# --- drain ---------------------------------------------------------------------------------------


def test_drain_waits_for_what_runs_and_resume_takes_it_back(daemon: Daemon) -> None:
    late = daemon.loractl("drain", "--drain-timeout", "0.2", check=False)
    assert late.returncode == 9  # the engine of this daemon always says that one request runs
    assert daemon.get("/v1/status")["draining"] is True
    assert "draining" in daemon.loractl("status").stdout
    assert daemon.loractl("drain", "--dry-run").stdout
    assert json.loads(daemon.loractl("resume", "--json").stdout)["draining"] is False
    assert daemon.get("/v1/status")["draining"] is False


def test_drained_daemon_refuses_with_503_and_says_so_in_health(start_daemon, tiny_chat_model):
    daemon = start_daemon(tiny_chat_model, "--slab-bytes", "64MiB", "--threads", "1")
    daemon.loractl("drain")
    assert httpx.get(f"{daemon.url}/health").status_code == 503
    body = {"model": tiny_chat_model.name, "prompt": "x", "max_tokens": 2}
    refused = httpx.post(f"{daemon.url}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "daemon.draining")
    assert refused.headers["retry-after"]
    daemon.loractl("resume")
    assert httpx.post(f"{daemon.url}/v1/completions", json=body).status_code == 200


def test_keep_policy_collects_after_a_promote(
    start_daemon, tiny_chat_model, random_adapter, tmp_path
):
    daemon = start_daemon(
        tiny_chat_model, "--slab-bytes", "64MiB", "--threads", "1", "--registry-keep", "1"
    )
    for seed in range(4):
        folder = random_adapter(tiny_chat_model, tmp_path / f"{seed}", 2, ("q_proj",), seed=seed)
        daemon.loractl("push", "cats", str(folder), "--promote")
    for _ in range(100):
        left = [v["version"] for v in daemon.admin.adapter("cats")["versions"]]
        if left == ["v3", "v4"]:
            return
        time.sleep(0.05)
    pytest.fail(f"left: {left}")
