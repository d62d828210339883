"""loractl against a daemon's real socket, as a process of its own where that can matter."""

from __future__ import annotations

import json
import os
import pty
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loractl.main import app

DAEMON = Path(__file__).with_name("admin_daemon.py")
_SHARED = runpy.run_path(str(DAEMON))
write_adapter, BASE = _SHARED["write_adapter"], _SHARED["BASE"]
LORACTL = [sys.executable, "-m", "loractl.main"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


class Setup:
    """A daemon, and loractl pointed at it by LORAD_SOCKET."""

    def __init__(self, root: Path) -> None:
        self.state, self.socket = root / "state", root / "run" / "lorad.sock"
        self.env = {**os.environ, "LORAD_SOCKET": str(self.socket), "COLUMNS": "200"}
        command = [sys.executable, str(DAEMON), str(self.state), str(self.socket)]
        self.daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.daemon.stdout is not None
        assert self.daemon.stdout.readline() == b"ready\n"

    def process(self, *arguments: object) -> Done:
        command = [*LORACTL, *map(str, arguments)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def run(self, *arguments: object) -> Done:
        """The same in this process, which spares the start of an interpreter."""
        result = CliRunner().invoke(app, list(map(str, arguments)), env=self.env)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    def out(self, *arguments: object) -> str:
        """Of a command that must succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def data(self, *arguments: object) -> Any:
        return json.loads(self.out(*arguments, "--json"))

    def fails(self, exit_code: int, *arguments: object) -> str:
        """The error code of a command that must fail so; nothing may be on stdout."""
        done = self.run(*arguments, "--json")
        assert done.returncode == exit_code, (done.stdout, done.stderr)
        assert done.stdout == ""
        found = json.loads(done.stderr)
        assert found["schema"] == "lorad/error/v1"
        code: str = found["error"]["code"]
        return code


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    running = Setup(tmp_path)
    yield running
    running.daemon.terminate()
    running.daemon.communicate(timeout=20)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    return [write_adapter(tmp_path / f"adapter{seed}", seed) for seed in range(2)]


@pytest.fixture
def tinker(setup: Setup, adapters: list[Path]) -> Setup:
    """`tinker` with v1 live, and v2."""
    setup.out("push", "tinker", adapters[0], "--promote")
    setup.out("push", "tinker", adapters[1], "-m", "more data")
    return setup


def test_a_day_with_one_adapter(setup: Setup, adapters: list[Path]) -> None:
    pushed = setup.process("push", "acme/tinker", adapters[0], "-m", "first")
    assert "acme/tinker@v1 created: rank 2, q_proj" in pushed.stdout
    assert "not live: loractl promote acme/tinker v1" in pushed.stderr
    promoted = setup.process("promote", "acme/tinker")
    assert "live none -> v1 (generation 1)" in promoted.stdout
    assert "acme/tinker: live is v2" in setup.out("push", "acme/tinker", adapters[1], "--promote")
    assert "unchanged" in setup.out("push", "acme/tinker", adapters[1])
    rolled = setup.out("rollback", "acme/tinker", "--reason", "answers in French")
    assert "live v2 -> v1 (generation 3)" in rolled

    header, row = setup.out("list").splitlines()
    assert header.split()[:3] == ["NAME", "LIVE", "CANARY"]
    assert row.split()[:5] == ["acme/tinker", "v1", "-", "2", "2"]
    shown = setup.out("show", "acme/tinker")
    assert "generation  3" in shown
    assert "first" in shown
    assert "sha256:" in setup.out("show", "acme/tinker@v2")
    events = setup.out("history", "acme/tinker").splitlines()
    actions = [line.split()[4] for line in events[1:]]  # the time is two words
    assert actions == ["rollback", "promote", "push", "promote", "push"]
    assert "answers in French" in events[1]
    status = setup.out("status")
    assert ["base", "model", BASE] in [line.split() for line in status.splitlines()]
    assert "1 running, 0 waiting" in status


def test_json_of_every_command_is_one_document_with_its_schema(tinker: Setup) -> None:
    expected = {
        ("list",): "lorad/adapters/v1",
        ("show", "tinker"): "lorad/adapter/v1",
        ("show", "tinker@v2"): "lorad/version/v1",
        ("history", "tinker"): "lorad/history/v1",
        ("status",): "lorad/status/v1",
        ("load", "tinker@v2"): "lorad/load/v1",
        ("unload", "tinker@v2"): "lorad/unload/v1",
        ("pin", "tinker@v2"): "lorad/pin/v1",
        ("unpin", "tinker@v2"): "lorad/unpin/v1",
        ("promote", "tinker", "v2"): "lorad/promote/v1",
        ("rollback", "tinker"): "lorad/rollback/v1",
        ("canary", "tinker", "v2", "--percent", "5"): "lorad/canary/v1",
        ("canary", "tinker", "--off"): "lorad/canary/v1",
        ("delete", "tinker@v2", "--yes"): "lorad/delete/v1",
        ("version",): "lorad/version_info/v1",
    }
    for command, schema in expected.items():
        assert tinker.data(*command)["schema"] == schema


def test_push_json_tells_both_halves(setup: Setup, adapters: list[Path]) -> None:
    data = setup.data("push", "tinker", adapters[0], "--promote")
    assert (data["schema"], data["outcome"], data["name"]) == ("lorad/push/v1", "created", "tinker")
    assert (data["promoted"]["to_version"], data["promoted"]["generation"]) == ("v1", 1)
    assert setup.data("push", "tinker", adapters[0])["promoted"] is None


@pytest.mark.parametrize("targets", ["(q|v_proj", ".*(?=x)q_proj", ["q_proj", "(?P<"], [7]])
def test_push_and_inspect_say_the_same_of_odd_targets(
    setup: Setup, tmp_path: Path, targets: object
) -> None:
    """The tensors say what is served, so neither refuses; both warn of a name without a tensor."""
    adapter = write_adapter(tmp_path / "odd", 1, target_modules=targets)
    inspected = setup.data("inspect", adapter)
    pushed = setup.data("push", "odd", adapter)["version"]
    wanted = ["target_without_tensors"] if isinstance(targets, list) else []
    for warnings in (inspected["warnings"], pushed["warnings"]):
        assert [warning["code"] for warning in warnings] == wanted


def test_exit_codes(tinker: Setup, adapters: list[Path], tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", 0, rank=64)
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        ("push", "../x", adapters[0]): (2, "name.invalid"),
        ("push", "acme/history", adapters[0]): (2, "name.reserved"),
        ("promote", "tinker@v1", "v2"): (2, "usage.invalid"),
        ("delete", "tinker"): (2, "usage.invalid"),
        ("show", "nobody"): (5, "adapter.not_found"),
        ("promote", "tinker", "v9"): (5, "version.not_found"),
        ("push", "tinker", tmp_path / "absent"): (5, "path.not_found"),
        ("push", "tinker", wide): (6, "adapter.rank_exceeds_max"),
        ("push", "tinker", empty): (6, "adapter.config_missing"),
        ("push", "tinker", adapters[0], "--version", "v2"): (7, "version.exists"),
        ("promote", "tinker", "v2", "--if-generation", "0"): (7, "generation.changed"),
        ("unload", "tinker"): (7, "version.live"),
        ("delete", "tinker@v1", "--yes"): (7, "version.live"),
        ("rollback", "tinker"): (7, "rollback.no_previous"),
        ("canary", "tinker"): (2, "usage.invalid"),
        ("push", "base", adapters[0]): (2, "name.reserved"),
        ("push", "tinker", adapters[0], "--message", "x" * 99_000): (2, "request.invalid"),
        ("promote", "tinker", "v2", "--reason", "x" * 2001): (2, "request.invalid"),
        ("canary", "tinker", "v1", "--percent", "5"): (7, "version.live"),
    }
    for command, (exit_code, code) in cases.items():
        assert tinker.fails(exit_code, *command) == code, command
    (tinker.state / "engine-full").touch()
    assert tinker.fails(8, "promote", "tinker", "v2") == "memory.no_capacity"
    (tinker.state / "engine-busy").touch()
    assert tinker.fails(9, "unload", "tinker@v2") == "drain.timeout"
    assert tinker.run("promote", "--nonsense").returncode == 2
    assert tinker.data("show", "tinker")["live"] == "v1"  # and none of it changed anything


def test_errors_for_people_have_code_and_hint(tinker: Setup) -> None:
    done = tinker.process("show", "tinker@v9")
    assert done.returncode == 5
    message, hint = done.stderr.splitlines()
    assert message == "error: adapter 'tinker' has no version 'v9' [version.not_found]"
    assert hint == "hint:  its newest versions are v1, v2"


def test_json_errors_carry_the_daemons_request_id(tinker: Setup) -> None:
    done = tinker.run("show", "nobody", "--json")
    assert len(json.loads(done.stderr)["error"]["request_id"]) == 16


def test_dry_runs_exit_1_when_something_would_change(tinker: Setup, adapters: list[Path]) -> None:
    before = tinker.data("show", "tinker"), tinker.data("history", "tinker")
    for would_change in (
        ("push", "other", adapters[0], "--promote"),
        ("push", "tinker", adapters[1], "--promote"),
        ("promote", "tinker", "v2"),
        ("load", "tinker@v2"),
        ("pin", "tinker"),
        ("delete", "tinker@v2"),
    ):
        assert tinker.run(*would_change, "--dry-run").returncode == 1, would_change
    for would_not in (
        ("push", "tinker", adapters[0]),
        ("promote", "tinker", "v1"),
        ("load", "tinker"),
        ("unload", "tinker@v2"),
        ("unpin", "tinker"),
    ):
        assert tinker.run(*would_not, "--dry-run").returncode == 0, would_not
    assert (tinker.data("show", "tinker"), tinker.data("history", "tinker")) == before


def test_bare_names_mean_the_live_version(tinker: Setup) -> None:
    assert tinker.data("load", "tinker")["version"] == "v1"
    assert tinker.data("unload", "tinker", "--force")["version"] == "v1"
    assert tinker.data("promote", "tinker")["to_version"] == "v2"  # but promote: the newest


def test_foreign_text_cannot_drive_the_terminal(setup: Setup, adapters: list[Path]) -> None:
    foul = "\x1b[2J[bold red]x[/] \r\nsecond"
    setup.out("push", "tinker", adapters[0], "-m", foul, "--promote", "--reason", foul)
    for command in (("show", "tinker"), ("show", "tinker@v1"), ("history", "tinker")):
        printed = setup.out(*command)
        assert "\x1b" not in printed
        assert "\r" not in printed
        assert "\\x1b[2J[bold red]x[/] \\r\\nsecond" in printed
    refused = setup.run("show", "\x1b[2J")
    assert (refused.returncode, "\x1b" in refused.stderr) == (2, False)


def test_unreachable_and_forbidden_daemons(tmp_path: Path, setup: Setup) -> None:
    assert setup.fails(3, "list", "--socket", tmp_path / "none.sock") == "daemon.unreachable"
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(dead))
    assert setup.fails(3, "list", "--socket", dead) == "daemon.unreachable"
    assert "lorad is not running here" in setup.out("version", "--socket", dead)
    if os.geteuid() == 0:
        # All modules are loaded before the process gives up the right to read them.
        script = "import os, sys; from loractl.main import main\n"
        script += "sys.argv = ['loractl', 'list', '--socket', '/nowhere']\n"
        script += "try: main()\nexcept SystemExit: os.setuid(65534)\n"
        script += "sys.argv = ['loractl', 'list']; main()"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=setup.env, capture_output=True, text=True, check=False)
        assert done.returncode == 4, done.stderr
        assert "[socket.permission]" in done.stderr


def answer_with(path: Path, answer: bytes | None) -> None:
    """A server that gives each connection one answer, or with None never any."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            if answer is not None:
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

    threading.Thread(target=serve, daemon=True).start()


def test_strange_daemons(tmp_path: Path, setup: Setup) -> None:
    def ask(answer: bytes | None, exit_code: int, *more: str) -> str:
        path = tmp_path / f"{time.monotonic_ns()}.sock"
        answer_with(path, answer)
        return setup.fails(exit_code, "list", "--socket", path, *more)

    newer = b"HTTP/1.1 200 OK\r\nlorad-api: 2\r\ncontent-length: 2\r\n\r\n{}"
    assert ask(newer, 10) == "daemon.version_mismatch"
    other = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    assert ask(other, 10) == "daemon.error"
    unknown = b'{"error": {"code": "future.code", "message": "odd"}}'
    head = b"HTTP/1.1 418 X\r\nlorad-api: 1\r\ncontent-length: %d\r\n\r\n" % len(unknown)
    assert ask(head + unknown, 10) == "daemon.error"
    assert ask(b"", 3) == "daemon.unreachable"
    assert ask(b"garbage\r\n\r\n", 3) == "daemon.unreachable"
    assert ask(None, 9, "--timeout", "0.3") == "operation.timeout"


def test_refusal_in_mid_upload_is_understood(setup: Setup, tmp_path: Path) -> None:
    """The daemon answers and closes while the client still sends: 40 MB where 1 MB may come."""
    big = write_adapter(tmp_path / "big", 0)
    with (big / "adapter_model.safetensors").open("ab") as weights:
        weights.truncate(40 << 20)
    assert setup.fails(2, "push", "tinker", big) == "request.too_large"
    assert list((setup.state / "store" / ".staging").iterdir()) == []


def test_interrupted_push_leaves_nothing(setup: Setup, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    write_adapter(slow, 0)
    weights = slow / "adapter_model.safetensors"
    os.truncate(weights, 1 << 20)
    stub = "import lorad.admin_client, time; lorad.admin_client._UPLOAD_CHUNK = 1000\n"
    stub += "from lorad.admin_client import AdminClient; from pathlib import Path\n"
    stub += "AdminClient().push(Path(__import__('sys').argv[1]), 'x', "
    stub += "progress=lambda n: (print('sent', flush=True), time.sleep(0.05)))"
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, "-c", stub, str(slow)]
        client = subprocess.Popen(
            command, env=setup.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert client.stdout is not None
        for _ in range(3):
            assert client.stdout.readline() == b"sent\n"
        client.send_signal(number)
        client.communicate(timeout=60)
        deadline = time.monotonic() + 5
        while list((setup.state / "store" / ".staging").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert setup.data("list")["adapters"] == []


def test_watch_prints_one_json_line_each_time(tinker: Setup) -> None:
    arguments = [*LORACTL, "status", "--watch", "--interval", "0.1", "--json"]
    watching = subprocess.Popen(
        arguments, env=tinker.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert watching.stdout is not None
    documents = [json.loads(watching.stdout.readline()) for _ in range(3)]
    assert [document["schema"] for document in documents] == ["lorad/status/v1"] * 3
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=60)
    assert watching.returncode == 130


def test_progress_bar_is_for_a_terminal_only(setup: Setup, adapters: list[Path]) -> None:
    assert setup.run("push", "quiet", adapters[0]).stderr.startswith("not live")
    leader, follower = pty.openpty()
    done = subprocess.run(
        [*LORACTL, "push", "shown", str(adapters[0])],
        env={**setup.env, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=follower,
        check=False,
    )
    os.close(follower)
    assert done.returncode == 0
    assert b"100%" in os.read(leader, 65536)
    os.close(leader)


def test_help_and_list_load_nothing_heavy(setup: Setup) -> None:
    heavy = ("torch", "numpy", "rich", "asyncio", "starlette", "uvicorn", "sqlite3", "safetensors")
    script = (
        "import sys; from loractl.main import main\n"
        "sys.argv[0] = 'loractl'\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    for argument in ("--help", "list"):
        done = subprocess.run(
            [sys.executable, "-c", script, argument],
            env=setup.env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr.splitlines()[-1] == "[]"
