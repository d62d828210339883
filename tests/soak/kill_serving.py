"""Kill the whole daemon, engine included, amid changes and requests, and look at what is left.

The changes and what must hold after each restart are those of kill_daemon.py. Beside them two
clients generate all the time: each answer must be, to the letter, the cold answer of the version
that its header names, and after each restart the bare name must answer as its live version does.
Some kills come while the daemon starts. The base model is a tiny random one.

    nice -n 10 python tests/soak/kill_serving.py --kills 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lorad import wire
from lorad.admin_client import AdminClient
from lorad.sizing.model_shape import ModelShape, read_config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tiny_model import write_tiny_model  # noqa: E402

CHANGES = runpy.run_path(str(HERE / "kill_daemon.py"))
FLEET = runpy.run_path(str(HERE.parent.parent / "examples/adapter_fleet.py"))
NAME = CHANGES["NAME"]
LEAVES = ("q_proj", "v_proj", "up_proj", "down_proj")
PROMPTS = ("Once upon a time", "What is the sun?", "abcabc", "0 1 2 3")
TOKENS = 12
ADAPTERS = 8
READY = re.compile(r"lorad is ready in ([\d.]+) s: (http://\S+)/v1")


class Daemons:
    """One daemon at a time, over one registry directory."""

    def __init__(self, root: Path, model: Path) -> None:
        self.state, self.socket, self.log = root / "registry", root / "run/lorad.sock", root / "log"
        self.pid, self.url, self.starts = 0, "", list[float]()
        self._model = model
        self._forks = subprocess.Popen(
            [sys.executable, str(HERE / "forked_daemon.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def launch(self) -> None:
        """Begin a start."""
        options = ["--model", self._model, "--registry", self.state, "--socket", self.socket]
        options += ["--port", 0, "--slab-bytes", "64MiB", "--threads", 1]
        assert self._forks.stdin and self._forks.stdout
        self.log.unlink(missing_ok=True)
        self._forks.stdin.write(json.dumps([str(self.log), *map(str, options)]) + "\n")
        self._forks.stdin.flush()
        self.pid = int(self._forks.stdout.readline())

    def start(self) -> AdminClient:
        """Start, and wait until it is ready."""
        self.launch()
        deadline = time.monotonic() + 120
        while not (ready := self._ready()):
            assert self._lives() and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.01)
        self.starts.append(float(ready[1]))
        self.url = ready[2]
        return AdminClient(self.socket, 60)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while self._lives():
            time.sleep(0.002)

    def close(self) -> None:
        self.kill()
        self._forks.communicate(timeout=10)

    def _ready(self) -> re.Match[str] | None:
        return READY.search(self.log.read_text()) if self.log.exists() else None

    def _lives(self) -> bool:
        with suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False


class Recording(AdminClient):
    """Knows the content of each label; none is ever given to other content."""

    digests: dict[str, str]

    def push(self, *words: Any, **options: Any) -> wire.PushResult:
        pushed = super().push(*words, **options)
        self.digests[pushed["version"]["version"]] = pushed["version"]["digest"]
        return pushed


@dataclass
class Traffic:
    """Two clients that ask until the daemon is killed; `wrong` must stay empty."""

    cold: dict[tuple[str, str], str]  # (digest, prompt) -> text
    digests: dict[str, str]  # by label
    answers: Counter[str] = field(default_factory=Counter)  # by version, "refused", "cut off"
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def running(self, url: str) -> Iterator[threading.Event]:
        """Gives the event that is to be set just before the kill."""
        ending = threading.Event()
        clients = [threading.Thread(target=self._client, args=(url, n, ending)) for n in range(2)]
        for client in clients:
            client.start()
        yield ending
        for client in clients:
            client.join()

    def _client(self, url: str, number: int, ending: threading.Event) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while True:
                number += 1
                try:
                    self._ask(http, PROMPTS[number % len(PROMPTS)])
                except httpx.HTTPError as error:
                    self.answers["cut off"] += 1
                    if not ending.is_set():
                        self.wrong.append(f"failed before the kill: {error!r}")
                    return

    def _ask(self, http: httpx.Client, prompt: str) -> None:
        status, text, version = generate(http, NAME, prompt)
        if status == 404:  # nothing is live just now
            self.answers["refused"] += 1
            time.sleep(0.01)
            return
        label = version.removeprefix(f"default/{NAME}@")
        # A push whose answer was lost leaves a label that nobody here knows the content of.
        known = [self.digests[label]] if label in self.digests else [d for d, _ in self.cold]
        right = {self.cold[digest, prompt] for digest in known}
        if status != 200 or text not in right:
            self.wrong.append(f"{status} {version} {prompt!r}: {text!r}, not one of {right}")
        self.answers["right"] += 1


def generate(http: httpx.Client, model: str, prompt: str) -> tuple[int, str, str]:
    """(status, text, version that answered)"""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    answer = http.post("/v1/completions", json={**body, "ignore_eos": True})
    if answer.status_code != 200:
        return answer.status_code, answer.text[:300], ""
    return 200, answer.json()["choices"][0]["text"], answer.headers["x-lorad-adapter"]


def write_adapters(root: Path, model: Path) -> list[Path]:
    """Strong ones: on a random model a weak adapter changes no token."""
    shape = ModelShape.from_config(read_config(model))
    made = [FLEET["write_adapter"](root / f"a{n}", shape, 4, n, LEAVES) for n in range(ADAPTERS)]
    for adapter in made:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 64}))
    return made


def cold_answers(root: Path, model: Path, adapters: list[Path]) -> dict[tuple[str, str], str]:
    """What each adapter answers, alone in a daemon of its own registry, by its digest."""
    daemons = Daemons(root, model)
    admin, cold = daemons.start(), {}
    with httpx.Client(base_url=daemons.url, timeout=60) as http:
        for adapter in adapters:
            version = admin.push(adapter, "cold")["version"]
            for prompt in PROMPTS:
                status, text, _ = generate(http, f"cold@{version['version']}", prompt)
                assert status == 200, text
                cold[version["digest"], prompt] = text
    daemons.close()
    told = Counter(cold.values())
    assert max(told.values()) == 1, "the adapters must answer differently"
    return cold


def answers_as_live(admin: AdminClient, url: str, cold: dict[tuple[str, str], str]) -> None:
    """The bare name answers exactly as its live version, and every other as itself."""
    for adapter in admin.adapters()["adapters"]:
        digests = {v["version"]: v["digest"] for v in adapter["versions"]}
        asked = [(f"{NAME}@{label}", label) for label in digests]
        asked += [(NAME, adapter["live"])] if adapter["live"] and not adapter["canary"] else []
        with httpx.Client(base_url=url, timeout=60) as http:
            for model, label in asked:
                for prompt in PROMPTS[:2]:
                    status, text, version = generate(http, model, prompt)
                    assert (status, version) == (200, f"default/{NAME}@{label}"), (status, text)
                    assert text == cold[digests[label], prompt], f"{model} answers wrong"


def soak(
    kills: int, seed: int, root: Path, tell: Callable[[str], None]
) -> tuple[Daemons, Counter[str], int]:
    model = write_tiny_model(root / "tiny")
    adapters = write_adapters(root / "adapters", model)
    (root / "first").mkdir()
    cold = cold_answers(root / "first", model, adapters)
    daemons, chance = Daemons(root, model), random.Random(seed)
    admin = daemons.start()
    changing = Recording(daemons.socket, 60)
    changing.digests = {}
    churn = CHANGES["Churn"](changing, adapters, chance)
    traffic = Traffic(cold, changing.digests)
    for kill in range(1, kills + 1):
        worker = threading.Thread(target=churn.run)
        with traffic.running(daemons.url) as ending:
            worker.start()
            time.sleep(chance.uniform(0.02, 0.8))
            ending.set()
            daemons.kill()
            worker.join()
        assert not churn.odd, churn.odd
        assert not traffic.wrong, traffic.wrong
        if chance.random() < 0.15:
            daemons.launch()
            time.sleep(chance.uniform(0.0, 1.0))
            daemons.kill()
        admin = daemons.start()
        churn.live = CHANGES["examine"](admin, daemons.state, churn.possible)
        churn.possible = {churn.live}
        answers_as_live(admin, daemons.url, cold)
        if kill % 25 == 0:
            tell(f"{kill} kills, {churn.changes} changes, {dict(traffic.answers)}")
    daemons.close()
    return daemons, traffic.answers, churn.changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        daemons, answers, changes = soak(
            given.kills, given.seed, Path(folder), lambda text: print(text, flush=True)
        )
    starts = sorted(daemons.starts)
    print(
        f"{given.kills} kills in {changes} changes and {answers['right']} answers "
        f"({answers['cut off']} cut off), starts {starts[len(starts) // 2]:.2f} s in the middle, "
        f"{starts[-1]:.2f} s at most, {time.monotonic() - began:.0f} s in all: all well"
    )


if __name__ == "__main__":
    main()
