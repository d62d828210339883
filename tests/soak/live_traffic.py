"""Promote and roll back under load, and look at every answer.

Each client asks again and again for the bare name while its live version is switched. Every
answer must be, to the letter, the cold answer of the one version that its header names.

    python tests/soak/live_traffic.py --model DIRECTORY --seconds 30 V1 V2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from lorad.admin_client import AdminClient

NAME = "soak"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("What is the sun?", "Where do cats sleep?", "Tell me of the sea.", "Who are you?")
PROMPTS = ("Once upon a time", "The answer is", *map(CHAT.format, QUESTIONS))


@dataclass
class Report:
    """What happened; `wrong` and `failed` must stay empty."""

    answers: Counter[str] = field(default_factory=Counter)  # by version
    moves: int = 0
    move_seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def ask(http: httpx.Client, model: str, prompt: str, tokens: int) -> tuple[str, str]:
    """(text, version that answered); raises for any status but 200."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = http.post("/v1/completions", json={**body, "ignore_eos": True})
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")
    return answer.json()["choices"][0]["text"], answer.headers["x-lorad-adapter"]


def run(url: str, admin: AdminClient, *, seconds: float, clients: int, tokens: int) -> Report:
    """Traffic and moves between v1 and v2 of NAME, both pushed already, v1 live."""
    report = Report()
    with httpx.Client(base_url=url, timeout=120) as http:
        cold = {
            (f"default/{NAME}@{label}", prompt): ask(http, f"{NAME}@{label}", prompt, tokens)[0]
            for label in ("v1", "v2")
            for prompt in PROMPTS
        }
    first, second = (f"default/{NAME}@{label}" for label in ("v1", "v2"))
    # Only where the versions differ can an answer tell which of them it came from.
    telling = [p for p in PROMPTS if cold[first, p][:8] != cold[second, p][:8]]
    assert len(telling) >= 2, "the versions must answer differently"
    end = time.monotonic() + seconds
    lock = threading.Lock()

    def client(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            turn = number
            while time.monotonic() < end:
                prompt = telling[turn % len(telling)]
                turn += 1
                try:
                    text, served_by = ask(http, NAME, prompt, tokens)
                except Exception as error:
                    with lock:
                        report.failed.append(f"{type(error).__name__}: {error}")
                    continue
                with lock:
                    report.answers[served_by] += 1
                    if cold.get((served_by, prompt)) != text:
                        report.wrong.append(f"{served_by} {prompt!r}: {text!r}")

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        began = time.monotonic()
        if report.moves % 2:
            admin.rollback(NAME, None)
        else:
            admin.promote(NAME, "v2")
        report.moves += 1
        report.move_seconds.append(time.monotonic() - began)
        time.sleep(max(0.0, 0.5 - (time.monotonic() - began)))
    for thread in threads:
        thread.join()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("adapters", type=Path, nargs=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "run" / "lorad.sock"
        command = [sys.executable, "-m", "lorad.main", "start", "--model", str(given.model)]
        command += ["--port", "0", "--socket", str(socket), "--registry", f"{folder}/registry"]
        command += ["--dtype", "float32"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                line = daemon.stdout.readline() if daemon.stdout else ""
                url = next(word for word in line.split() if word.startswith("http"))
                admin = AdminClient(socket)
                for adapter in given.adapters:
                    admin.push(adapter, NAME)
                admin.promote(NAME, "v1")
                report = run(
                    url.removesuffix("/v1"),
                    admin,
                    seconds=given.seconds,
                    clients=given.clients,
                    tokens=given.tokens,
                )
            finally:
                daemon.terminate()
    slowest = max(report.move_seconds)
    print(f"{report.moves} moves (slowest {slowest:.2f} s), answers {dict(report.answers)}")
    print(f"{len(report.failed)} failed, {len(report.wrong)} wrong", *report.failed[:3])
    sys.exit(bool(report.failed or report.wrong))


if __name__ == "__main__":
    main()
