"""How much host memory can still be taken: what the system has, and what the cgroup allows.

The system's "free" memory is not it: the page cache, which the checkpoint has just filled, is
given up to whoever needs memory. And a container or a unit with a limit is ended long before the
machine is full.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Controller:
    """Where one version of cgroups says what a group may take and has taken."""

    mount: str
    limits: tuple[str, ...]
    usage: str
    file_cache: tuple[str, ...]  # keys of memory.stat


_V2 = _Controller(
    "sys/fs/cgroup",
    ("memory.max", "memory.high"),
    "memory.current",
    ("active_file", "inactive_file"),
)
# Beside groups of version 1, which have the controllers, there may be those of 2.
_V2_BESIDE = _Controller("sys/fs/cgroup/unified", _V2.limits, _V2.usage, _V2.file_cache)
_V1 = _Controller(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may take without swapping or being ended; `root` is for tests."""
    system = _available_of_the_system(root)
    return max(0, min((system, *_left_in_cgroups(root))))


def _available_of_the_system(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    page = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * page
    return os.sysconf("SC_PHYS_PAGES") * page // 2  # macOS tells no more


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What is left of each limit: of the process's own group and of all those around it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found: tuple[_Controller, ...] = (_V2, _V2_BESIDE)
        elif "memory" in controllers.split(","):
            found = (_V1,)
        else:
            continue
        for controller in found:
            for group in _groups(root / controller.mount, path):
                yield from _left(group, controller)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """A group's directory and those above it, up to the mount.

    Where a container has a mount of its own, the directories that the host would have are missing
    and the mount is the container's group. One outside the namespace begins with "..".
    """
    own = PurePosixPath(path.lstrip("/"))
    if ".." in own.parts:
        own = PurePosixPath()
    for part in (own, *own.parents):
        yield mount / part


def _left(group: Path, controller: _Controller) -> Iterator[int]:
    limits = [_number(group / name) for name in controller.limits]
    usage = _number(group / controller.usage)
    known = [limit for limit in limits if limit is not None]
    if known and usage is not None:
        yield min(known) - usage + _file_cache(group, controller)


def _file_cache(group: Path, controller: _Controller) -> int:
    """Pages of files count as used and are given up before the limit is enforced."""
    entries = dict(
        line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line
    )
    return sum(int(entries.get(key, "0")) for key in controller.file_cache)


def _number(path: Path) -> int | None:
    """None also for "max", which is no limit."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """What is in a file of the kernel; empty on systems that have none."""
    try:
        return path.read_text()
    except OSError:
        return ""
