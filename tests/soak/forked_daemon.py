"""Starts `lorad start` over and over without importing torch again: imports once, then forks.

Each line of stdin is a JSON list, [log file, arguments...]; the answer is the process id of a
daemon that runs `lorad start` with those arguments in a session of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def run(log: Path, arguments: list[str]) -> None:
    """In the child: never returns."""
    from lorad.main import app

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    app(["start", *arguments])


def main() -> None:
    import lorad.daemon  # what takes the time
    import lorad.main  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the killed
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(Path(log), arguments)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
