"""Kill the daemon at random moments of a stream of changes, and look at what is left.

After each restart: the live version is the one of the last change that was answered, or the one
that was on its way; every version's bytes have its digest; no file is without a row, and nothing
half done lies around.

    python tests/soak/kill_daemon.py --kills 200
"""

from __future__ import annotations

import argparse
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lorad.admin_client import AdminClient
from lorad.errors import LoradError

DAEMON = Path(__file__).parent.parent / "admin_daemon.py"
NAME = "cats"
FILES = {"adapter_config.json", "adapter_model.safetensors"}
# What a change may answer without being wrong: the daemon is gone, or it was refused by rule.
GONE = {"daemon.unreachable", "operation.timeout", "daemon.error", "operation.not_found"}
REFUSED = {
    *("rollback.no_previous", "version.live", "version.canary", "version.not_found"),
    *("adapter.not_found", "canary.no_live", "version.pinned"),
}


@dataclass
class Churn:
    """Changes one after the other; `live` is what is known of the live version."""

    admin: AdminClient
    adapters: list[Path]
    random: random.Random
    live: str | None = None
    possible: set[str | None] = field(default_factory=lambda: {None})
    changes: int = 0
    odd: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Until the daemon is gone."""
        while True:
            try:
                self._change()
                self.changes += 1
            except LoradError as error:
                if error.code in GONE:
                    return
                if error.code not in REFUSED:
                    self.odd.append(f"{error.code}: {error.message}")
                    return

    def _change(self) -> None:
        labels = self._labels()
        what = self.random.choice(
            ["push", "push", "promote", "promote", "rollback", "canary", "delete", "gc"]
        )
        if what == "push":
            self.admin.push(self.random.choice(self.adapters), NAME)
        elif what == "promote" and labels:
            target = self.random.choice(labels)
            self.possible = {self.live, target}
            self._moved(self.admin.promote(NAME, target)["to_version"])
        elif what == "rollback":
            self.possible = {self.live, *labels}
            self._moved(self.admin.rollback(NAME, None)["to_version"])
        elif what == "canary" and labels:
            self.admin.canary(NAME, self.random.choice(labels), 10)
        elif what == "delete" and labels:
            self.admin.delete(NAME, self.random.choice(labels), force=False, dry_run=False)
        elif what == "gc":
            self.admin.gc(None, 2, dry_run=False)

    def _moved(self, label: str | None) -> None:
        self.live, self.possible = label, {label}

    def _labels(self) -> list[str]:
        try:
            return [v["version"] for v in self.admin.adapter(NAME)["versions"]]
        except LoradError as error:
            if error.code != "adapter.not_found":
                raise
            return []


def start(state: Path, socket: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(DAEMON), str(state), str(socket)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the daemon does not start again"
    for _ in range(200):  # "ready" comes just before the server listens
        with suppress(LoradError):
            AdminClient(socket, 10).status()
            return process
        time.sleep(0.02)
    raise AssertionError("the daemon does not answer")


def examine(admin: AdminClient, state: Path, possible: set[str | None]) -> str | None:
    """The live version; AssertionError for whatever is not as it must be."""
    adapters = admin.adapters()["adapters"]
    known = set()
    live = None
    for adapter in adapters:
        live = adapter["live"]
        labels = [version["version"] for version in adapter["versions"]]
        assert live is None or live in labels
        assert adapter["canary"] is None or adapter["canary"]["version"] in labels
        for version in adapter["versions"]:
            assert version["state"] == "available", version
            admin.load(NAME, version["version"], pin=False, dry_run=False)  # reads every byte
            known.add(f"default/{NAME}/{version['version']}")
    assert live in possible, f"live is {live}, not one of {possible}"
    store = state / "store"
    lying = {p.relative_to(store) for p in store.rglob("*") if p.is_file()}
    assert {str(Path(*p.parts[1:-1])) for p in lying} == known, lying
    assert len(lying) == len(FILES) * len(known)
    assert not list((store / ".staging").iterdir())
    return live


def soak(kills: int, seed: int, root: Path) -> tuple[int, list[float]]:
    """Changes that were made, and how long each start took, in seconds."""
    write_adapter = runpy.run_path(str(DAEMON))["write_adapter"]
    adapters = [write_adapter(root / f"a{n}", n) for n in range(12)]
    state, socket = root / "state", root / "run" / "lorad.sock"
    chance = random.Random(seed)
    process = start(state, socket)
    churn = Churn(AdminClient(socket, 10), adapters, chance)
    starts = []
    for _ in range(kills):
        worker = threading.Thread(target=churn.run)
        worker.start()
        time.sleep(chance.uniform(0.01, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        worker.join()
        assert not churn.odd, churn.odd
        began = time.monotonic()
        process = start(state, socket)
        starts.append(time.monotonic() - began)
        churn.live = examine(churn.admin, state, churn.possible)
        churn.possible = {churn.live}
    process.terminate()
    process.communicate()
    return churn.changes, starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        changes, starts = soak(given.kills, given.seed, Path(folder))
    print(f"{given.kills} kills in {changes} changes, slowest start {max(starts):.2f} s: all well")


if __name__ == "__main__":
    main()
