"""The two things a service says to systemd and takes from it, without its library."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import MutableMapping

_FIRST = 3  # the descriptor that systemd passes first


def notify(*lines: str) -> bool:
    """Send `READY=1`, `STATUS=...` and the like; False when no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
            sender.sendall("\n".join(lines).encode())
        except OSError:
            return False
    return True


def watchdog_seconds() -> float | None:
    """How often systemd wants to hear `WATCHDOG=1`: half of its limit; None when it does not."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 2e6 if microseconds.isdecimal() and mine else None


def passed_socket(environment: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The listening UNIX socket that systemd (or another activator) passed to this process.

    None when there is none; ValueError when what was passed is something else. The variables
    are removed, so that no child takes the socket for its own.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) == 0:
        return None
    if int(count) > 1 or not stat.S_ISSOCK(os.fstat(_FIRST).st_mode):
        raise ValueError(f"{count} descriptors were passed, not one socket")
    passed = socket.socket(fileno=_FIRST)
    listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if passed.family is not socket.AF_UNIX or passed.type is not socket.SOCK_STREAM or not listens:
        raise ValueError("the descriptor that was passed is no listening UNIX stream socket")
    passed.set_inheritable(False)
    return passed
