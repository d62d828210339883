"""Ten thousand connections, clients that send a byte now and then, and bodies without end.

The daemon must answer others meanwhile, and its memory must stay flat.

    python tests/soak/attack_socket.py --connections 10000
"""

from __future__ import annotations

import argparse
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lorad.admin_client import AdminClient

KILL = runpy.run_path(str(Path(__file__).with_name("kill_daemon.py")))
EACH = 500  # connections of one process: most systems give it 1024 descriptors

HOLD = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[2])):
    s = socket.socket(socket.AF_UNIX); s.settimeout(20)
    while True:
        try:
            s.connect(sys.argv[1]); s.sendall(b"GET /v1/sta"); break
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            break
    held.append(s)
print(len(held), flush=True)
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    for s in held:
        try: s.sendall(b"t")
        except OSError: pass
    time.sleep(1)
"""


def memory(pid: int) -> float:
    """Resident MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def endless_body(path: Path) -> None:
    """Announce ten gigabytes and send what is taken of them."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        head = f"POST /v1/uploads HTTP/1.1\r\nHost: x\r\nContent-Length: {10 << 30}\r\n\r\n"
        with suppress(OSError):
            client.sendall(head.encode())
            for _ in range(2000):
                client.sendall(bytes(1 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "lorad.sock"
        daemon = KILL["start"](Path(folder) / "state", path)
        before = memory(daemon.pid)
        command = [sys.executable, "-c", HOLD, str(path), str(EACH), str(given.seconds)]
        began = time.monotonic()
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for _ in range(given.connections // EACH)
        ]
        slowest, asked = 0.0, 0
        while any(process.poll() is None for process in processes):
            endless_body(path)
            started = time.monotonic()
            AdminClient(path, 60).status()
            slowest = max(slowest, time.monotonic() - started)
            asked += 1
            time.sleep(0.5)
        made = sum(int(p.stdout.readline() or 0) for p in processes if p.stdout)
        print(f"{made} connections made in {time.monotonic() - began:.0f} s")
        print(f"{asked} others answered, the slowest after {slowest:.2f} s")
        print(f"memory {before:.0f} MB before, {memory(daemon.pid):.0f} MB after")
        daemon.terminate()
        daemon.communicate()


if __name__ == "__main__":
    main()
