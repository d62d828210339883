"""A device that has failed, and a step that does not end: what clients, health and systemd see."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from lorad.engine.device_fault import device_fault

LOST = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"
CUDA = torch.device("cuda")

# --- which errors end the engine --------------------------------------------------------------


def test_an_error_of_the_accelerator_is_a_fault_and_says_what_it_was():
    fault = device_fault(torch.AcceleratorError(LOST), torch.device("cpu"))
    assert (fault.code, fault.kind.exit_code) == ("engine.device_fault", 10)
    assert fault.message == f"the device has failed: {LOST.splitlines()[0]}"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), torch.OutOfMemoryError("256 MiB")])
def test_an_error_after_which_the_device_answers_is_none(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert device_fault(error, torch.device("cpu")) is None
    assert device_fault(error, CUDA) is None


def test_out_of_memory_leaves_the_device_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = 2
    assert device_fault(error, CUDA) is None


def test_a_device_that_does_not_answer_any_more_is_a_fault_whatever_was_raised(monkeypatch):
    def lost(device: torch.device) -> None:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    fault = device_fault(RuntimeError("Triton Error [CUDA]: unspecified launch failure"), CUDA)
    assert fault.code == "engine.device_fault"
    assert "Triton Error" in fault.message


def test_a_fault_ends_the_step_loop_and_a_failed_step_does_not(
    tiny_model, sync_engine, monkeypatch
):
    engine = sync_engine(tiny_model("llama")).built.engine
    errors: Iterator[Exception] = iter([RuntimeError("a bug"), torch.AcceleratorError(LOST)])

    def fails(*_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(engine, "_runner", SimpleNamespace(run=fails))
    engine._scheduler.schedule = lambda: SimpleNamespace(items=[None])
    assert engine.step()
    with pytest.raises(Exception, match="the device has failed") as ended:
        engine.step()
    assert ended.value.code == "engine.device_fault"


# --- in a real daemon -------------------------------------------------------------------------

# While the file is there, each step does what its first word says.
DAEMON = """
import sys, time, torch
from pathlib import Path
from lorad.engine.model_runner import ModelRunner
from lorad.main import main
run, wish = ModelRunner.run, Path(sys.argv[1])
def faulty(self, batch):
    if wish.exists() and wish.read_text() == "raise":
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    while wish.exists() and wish.read_text() == "hang":
        time.sleep(0.05)
    return run(self, batch)
ModelRunner.run = faulty
sys.argv = ["lorad", *sys.argv[2:]]
main()
"""


@dataclass
class Faulty:
    """A daemon whose steps fail at a word, and the service manager that it talks to."""

    wish: Path
    url: str
    process: subprocess.Popen[str]
    watchdog: list[bytes]  # what it was told
    log: Path

    def complete(self) -> httpx.Response:
        body = {"model": "base", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=10)


def listen(manager: socket.socket, heard: list[bytes]) -> None:
    """Until an empty message: the queue is short, and the daemon waits when it is full."""
    while message := manager.recv(200):
        heard += [message] * (message == b"WATCHDOG=1")


@pytest.fixture
def faulty(tiny_chat_model: Path, tmp_path: Path) -> Callable[..., object]:
    @contextmanager
    def start(*options: str) -> Iterator[Faulty]:
        wish, log = tmp_path / "wish", tmp_path / "log"
        command = [sys.executable, "-c", DAEMON, str(wish), "start"]
        command += ["--model", str(tiny_chat_model), "--name", "base", "--port", "0"]
        command += ["--slab-bytes", "64MiB", "--threads", "1", "--socket", str(tmp_path / "s")]
        command += ["--registry", str(tmp_path / "registry"), *options]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log.open("w") as errors:
            manager.bind(str(tmp_path / "notify"))
            heard: list[bytes] = []
            listener = threading.Thread(target=listen, args=(manager, heard))
            listener.start()
            env = {
                **os.environ,
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
                "WATCHDOG_USEC": "200000",
                "LORAD_ENGINE_STEP_TIMEOUT": "1.0",
            }
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process:
                try:
                    line = process.stdout.readline()
                    assert line.startswith("lorad is ready"), log.read_text()
                    url = re.search(r"http://\S+(?=/v1)", line)[0]
                    yield Faulty(wish, url, process, heard, log)
                finally:
                    process.kill()
                    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                        last.sendto(b"", str(tmp_path / "notify"))
                    listener.join()

    return start


def eventually(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_device_fault_answers_everybody_and_ends_the_daemon_for_a_restart(faulty):
    with faulty("--max-num-seqs", "1") as daemon, ThreadPoolExecutor() as threads:
        daemon.wish.write_text("hang")
        asked = [threads.submit(daemon.complete) for _ in range(3)]  # two of them wait
        time.sleep(0.5)
        daemon.wish.write_text("raise")
        answers = [each.result() for each in asked]
        assert {answer.status_code for answer in answers} == {500}
        errors = [answer.json()["error"] for answer in answers]
        assert {error["code"] for error in errors} == {"engine.device_fault"}
        assert all("an illegal memory access" in error["message"] for error in errors)
        assert daemon.process.wait(timeout=30) == 10
        log = daemon.log.read_text()
    assert "ending: the device has failed: CUDA error: an illegal memory access" in log
    assert "[engine.device_fault]" in log


def test_a_step_that_hangs_is_told_and_one_that_ends_after_all_too(faulty):
    with faulty() as daemon, ThreadPoolExecutor() as threads:
        time.sleep(1.5)  # with nothing to do for longer than a step may take
        assert daemon.health().status_code == 200
        daemon.wish.write_text("hang")
        asked = threads.submit(daemon.complete)
        eventually(lambda: daemon.health().status_code == 503)
        assert "has been in one step for" in daemon.health().json()["reason"]
        refused = daemon.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine.hung")
        before = len(daemon.watchdog)
        time.sleep(0.5)
        assert len(daemon.watchdog) == before
        daemon.wish.unlink()
        assert asked.result().status_code == 200
        assert daemon.health().status_code == 200
        eventually(lambda: len(daemon.watchdog) > before)
