"""Both programs when what they print cannot be read or written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LORACTL = [sys.executable, "-m", "loractl.main"]
PLAN = [*LORACTL, "plan", "--model", "llama-3.1-8b", "--rank", "16", "--gpu", "h100-80g"]
PROGRAMS = {
    "version": [*LORACTL, "version", "--json"],
    "help": [*LORACTL, "--help"],
    "plan": PLAN,
    "lorad": [sys.executable, "-m", "lorad.main", "check-config"],
}


@pytest.mark.parametrize("command", PROGRAMS.values(), ids=PROGRAMS)
def test_a_full_disk_is_a_short_error(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 8
    assert done.stderr.startswith("error: the output cannot be written: No space left on device")
    assert len(done.stderr.splitlines()) == 2


def test_errors_that_cannot_be_printed_end_it_all_the_same() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*LORACTL, "list", "--socket", "/nowhere"], stdout=full, stderr=full)
    assert done.returncode == 8


def test_a_reader_that_goes_away_ends_it_silently() -> None:
    process = subprocess.Popen(PLAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert (process.stderr.read(), process.wait(20)) == (b"", 141)
