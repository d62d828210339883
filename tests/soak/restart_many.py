"""Start the daemon with many registered adapters: when it is ready, and what it loads again.

After each start the base model is asked at once and all the time; the versions that were used
last must come back onto the device in the order of their last use, the latest first.

    python tests/soak/restart_many.py --adapters 1000 [--model DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.admin_client import AdminClient
from lorad.registry.records import Who
from lorad.registry.registry import Registry
from lorad.sizing.model_shape import ModelShape, read_config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tiny_model import write_tiny_model  # noqa: E402

FLEET = runpy.run_path(str(HERE.parent.parent / "examples/adapter_fleet.py"))
READY = re.compile(r"lorad is ready in ([\d.]+) s: (http://\S+)/v1")
WARM = 64  # registry.warm
ROUNDS = 3
_LOOK = 0.15  # seconds: listing a thousand adapters takes the event loop tens of milliseconds


class Daemon:
    """A `lorad start` in a process of its own."""

    def __init__(self, model: Path, state: Path) -> None:
        self.socket = state / "lorad.sock"
        command = [sys.executable, "-m", "lorad.main", "start", "--model", str(model)]
        command += ["--registry", str(state), "--socket", str(self.socket), "--port", "0"]
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--slab-bytes", "512MiB"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        ready = READY.match(self.process.stdout.readline())
        assert ready, "the daemon does not start"
        self.wall = time.monotonic() - began
        self.seconds, self.url = float(ready[1]), ready[2]
        self.admin = AdminClient(self.socket)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=120)

    def on_device(self) -> set[str]:
        return {
            adapter["name"]
            for adapter in self.admin.adapters()["adapters"]
            if adapter["versions"][0]["residency"]["tier"] == "device"
        }


def fill(state: Path, model: Path, count: int, work: Path) -> None:
    """Push and promote `count` adapters of one version each, straight into the registry."""
    shape, me = ModelShape.from_config(read_config(model)), Who(0, 0)
    registry = Registry.open(state, model.name, partial(read_adapter, shape=shape))
    for number, folder in enumerate(FLEET["write_fleet"](work, model, count, [4])):
        name = AdapterName("default", f"a{number}")
        registry.push(folder, name, who=me)
        registry.promote(name, "v1", who=me)
        for file in folder.iterdir():
            file.unlink()
    registry.close()


def starts(model: Path, state: Path) -> tuple[float, float]:
    """(seconds from the command, seconds that the daemon says), the middle of some starts."""
    found = []
    for _ in range(ROUNDS):
        daemon = Daemon(model, state)
        found.append((daemon.wall, daemon.seconds))
        daemon.stop()
    walls, seconds = zip(*found, strict=True)
    return statistics.median(walls), statistics.median(seconds)


def ask(http: httpx.Client, model: str, tokens: int = 1) -> float:
    """The seconds of one answer."""
    began = time.monotonic()
    body = {"model": model, "prompt": "Hello there", "max_tokens": tokens, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def use(daemon: Daemon, count: int) -> list[str]:
    """Ask some adapters in a random order; their names, the last used first."""
    chance = random.Random(0)
    asked = [f"a{chance.randrange(count)}" for _ in range(2 * WARM)]
    with httpx.Client(base_url=daemon.url, timeout=60) as http:
        for name in asked:
            ask(http, name)
    return list(dict.fromkeys(reversed(asked)))


@contextmanager
def base_traffic(daemon: Daemon, model: str) -> Iterator[list[float]]:
    """One client that asks the base model all the time; the seconds of each answer."""
    end, times = threading.Event(), list[float]()

    def client() -> None:
        with httpx.Client(base_url=daemon.url, timeout=60) as http:
            while not end.is_set():
                times.append(ask(http, model))
                time.sleep(0.005)

    thread = threading.Thread(target=client)
    thread.start()
    yield times
    end.set()
    thread.join()


def watch_warming(daemon: Daemon, order: list[str]) -> float:
    """Seconds until the warm list is there; AssertionError if it comes in another order."""
    began = time.monotonic()
    while len(resident := daemon.on_device()) < min(WARM, len(order)):
        assert resident == set(order[: len(resident)]), "not in the order of use"
        assert time.monotonic() - began < 120, f"only {len(resident)} came back"
        time.sleep(_LOOK)
    assert resident == set(order[:WARM])
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = given.model or write_tiny_model(root / "tiny")
        empty, full = root / "empty", root / "full"
        fill(full, model, given.adapters, root / "work")
        for count, state in ((0, empty), (given.adapters, full)):
            wall, seconds = starts(model, state)
            print(f"{count:5} adapters: ready {wall:.2f} s after the command, {seconds:.2f} s own")
        daemon = Daemon(model, full)
        order = use(daemon, given.adapters)
        with base_traffic(daemon, model.name) as idle:
            time.sleep(2)
        daemon.stop()
        written = [name for name, _ in json.loads((full / "warm.json").read_text())]
        assert written == [f"default/{name}" for name in order]
        daemon = Daemon(model, full)
        with base_traffic(daemon, model.name) as warming:
            took = watch_warming(daemon, order)
        daemon.stop()
        print(f"the {WARM} last used came back in {took:.2f} s, in order; base answers meanwhile:")
        for what, times in (("warming", warming), ("after", idle)):
            slow = sorted(times)[int(len(times) * 0.99)]
            print(
                f"  {what}: {len(times)}, p50 {statistics.median(times) * 1000:.1f} ms, "
                f"p99 {slow * 1000:.1f} ms"
            )


if __name__ == "__main__":
    main()
