"""SIGHUP: what a running daemon takes over, what it leaves for a restart, and what it says."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from lorad.config import SETTINGS, Config, load_config, reloaded
from lorad.errors import LoradError
from lorad.live_settings import LiveSettings


class Sources:
    """A lorad.toml and a file of keys, as a test writes them."""

    def __init__(self, root: Path) -> None:
        self.toml, self.keys = root / "lorad.toml", root / "keys"
        self.write("info", 32)
        self.keys.write_text("k-acme acme\nk-old default\n")

    def write(self, level: str, max_loras: int, *, keys: bool = True, more: str = "") -> None:
        named = f'api_keys = "{self.keys}"' if keys else ""
        self.toml.write_text(
            f"[server]\n{named}\n{more}\n[engine]\nmax_loras = {max_loras}\n"
            f'[log]\nlevel = "{level}"\n'
        )

    def read(self) -> Config:
        return load_config(self.toml, {}, {}).config


def tenant(live: LiveSettings, key: str) -> str | None:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    try:
        return live.api_keys.tenant(Request({"type": "http", "headers": headers}))
    except LoradError as error:
        return error.code


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path)


@pytest.fixture
def live(sources: Sources) -> Iterator[LiveSettings]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield LiveSettings(sources.read(), sources.read)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_what_can_change_changes_and_the_rest_waits(
    live: LiveSettings, sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Config] = []
    live.follow(told.append)
    sources.write("debug", 64, more="drain_timeout = 5")
    sources.keys.write_text("k-acme globex\nk-new default\n")
    live.reload()
    assert told == [live.config]
    assert (live.config.log.level, live.config.server.drain_timeout) == ("debug", 5.0)
    assert logging.getLogger().level == logging.DEBUG
    assert live.config.engine.max_loras == 32
    assert [tenant(live, key) for key in ("k-acme", "k-new", "k-old")] == [
        *("globex", "default", "auth.invalid_key"),
    ]
    log = capsys.readouterr().err
    assert "reloaded: server.drain_timeout 30.0 -> 5.0; log.level 'info' -> 'debug'; " in log
    assert "API keys: 2 added or changed, 1 removed" in log
    assert "engine.max_loras stays 32 until a restart; the settings say 64 now" in log
    assert "k-new" not in log
    live.reload()
    assert "reloaded: nothing has changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: s.write("loud", 32), r"lorad.toml:.*log.level is 'loud'.*\[config.invalid\]"),
        (lambda s: s.write("debug", 32, more="prot = 1"), r"server.prot is not a setting"),
        (lambda s: s.toml.unlink(), r"no configuration file .*\[path.not_found\]"),
        (lambda s: s.toml.write_bytes(b"[log]\nlevel = \xff"), r"\[config.invalid\]"),
        (lambda s: s.keys.unlink(), r"server.api_keys: .*No such file"),
        (lambda s: s.keys.write_text("# none\n"), r"holds no key"),
        (lambda s: s.keys.write_text("one two three\n"), r"keys:1: not `key tenant`"),
        (lambda s: s.keys.write_bytes(b"\xff\xfe key"), r"keys.*\[config.invalid\]"),
    ],
)
def test_a_source_that_is_wrong_changes_nothing(
    live: LiveSettings,
    sources: Sources,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Sources], None],
    said: str,
) -> None:
    before = live.config
    sources.write("debug", 64)
    damage(sources)
    live.reload()
    assert live.config is before
    assert tenant(live, "k-old") == "default"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "all settings stay as they are" in caplog.text
    assert re.search(said, caplog.text), caplog.text


def test_opening_the_port_to_everybody_is_said(
    live: LiveSettings, sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    sources.write("info", 32, keys=False)
    live.reload()
    assert tenant(live, "whatever") is None
    assert "no key is asked for any more" in capsys.readouterr().err


def test_only_marked_settings_are_taken_over() -> None:
    other = Config()
    wanted = load_config(None, {"LORAD_ENGINE_THREADS": "7", "LORAD_REGISTRY_KEEP": "7"}, {}).config
    now = reloaded(other, wanted)
    assert (now.engine.threads, now.registry.keep) == (0, 7)
    marked = {key for key, field in SETTINGS.items() if field.metadata.get("reloads")}
    assert marked == {
        *("server.api_keys", "server.drain_timeout", "engine.max_queued"),
        *("registry.keep", "log.level"),
    }


def test_a_terminal_that_was_closed_is_noticed() -> None:
    code = (
        "import sys; from lorad.live_settings import terminal_watch; gone = terminal_watch()\n"
        "print(gone(), flush=True); sys.stdin.readline(); print(gone(), flush=True)"
    )
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as child:
        assert child.stdin and child.stdout
        os.close(theirs)
        assert child.stdout.readline() == "False\n"
        os.close(ours)
        child.stdin.write("\n")
        child.stdin.close()
        assert child.stdout.readline() == "True\n"


def test_a_running_daemon_reloads(start_daemon, tiny_chat_model: Path, sources: Sources) -> None:
    daemon = start_daemon(tiny_chat_model, "--config", str(sources.toml), "--slab-bytes", "64MiB")

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{daemon.url}/v1/models", headers=headers).status_code

    def said(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in daemon.log:
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.01)

    assert (status("k-old"), status("k-new")) == (200, 401)
    sources.keys.write_text("k-new default\n")
    sources.write("warning", 64, more="drain_timeout = 5")
    daemon.process.send_signal(signal.SIGHUP)
    said("engine.max_loras stays 32 until a restart")
    assert (status("k-old"), status("k-new")) == (401, 200)
    shown = daemon.admin.config()["config"]
    assert (shown["server.drain_timeout"], shown["engine.max_loras"]) == (5.0, 32)
    sources.toml.write_text("[server\n")
    daemon.process.send_signal(signal.SIGHUP)
    said("reload: all settings stay as they are")
    assert status("k-new") == 200
    assert daemon.stop() == 0
