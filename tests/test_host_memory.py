"""How much host memory there is to take, from files as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lorad.sizing.host_memory import available_host_bytes

GIB = 2**30
MEMINFO = """MemTotal:       65536000 kB
MemFree:         1048576 kB
MemAvailable:   33554432 kB
Buffers:           20480 kB
"""
UNLIMITED = "9223372036854771712\n"


def machine(root: Path, files: dict[str, object]) -> int:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return available_host_bytes(root)


def v2(path: str, limit: object, usage: int, cache: int = 0, high: object = "max") -> dict:
    """The files of one group; active and inactive pages of files are both in its cache."""
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    stat = f"anon {usage - cache}\nactive_file {cache // 4}\ninactive_file {cache - cache // 4}\n"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"{stat}slab 4096\n",
    }


def v1(path: str, limit: object, usage: int, cache: int = 0) -> dict:
    folder = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"cache {cache}\ntotal_inactive_file {cache}\n",
    }


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == 32 * GIB


def test_the_limit_of_the_own_group_less_what_it_uses(tmp_path: Path) -> None:
    own = v2("system.slice/lorad.service", 8 * GIB, 3 * GIB)
    files = {"proc/self/cgroup": "0::/system.slice/lorad.service\n", **own}
    assert machine(tmp_path, files) == 5 * GIB


def test_file_cache_of_the_group_can_be_taken(tmp_path: Path) -> None:
    own = v2("lorad.service", 8 * GIB, 7 * GIB, cache=6 * GIB)
    assert machine(tmp_path, {"proc/self/cgroup": "0::/lorad.service\n", **own}) == 7 * GIB


def test_a_limit_of_a_group_around_it_counts_and_the_least_one_wins(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a.slice/b.slice/lorad.service\n",
        **v2("a.slice", 6 * GIB, 4 * GIB),
        **v2("a.slice/b.slice", 20 * GIB, 4 * GIB),
        **v2("a.slice/b.slice/lorad.service", "max", 4 * GIB),
    }
    assert machine(tmp_path, files) == 2 * GIB


def test_a_group_is_slowed_down_above_high(tmp_path: Path) -> None:
    own = v2("lorad.service", 8 * GIB, 1 * GIB, high=3 * GIB)
    assert machine(tmp_path, {"proc/self/cgroup": "0::/lorad.service\n", **own}) == 2 * GIB


def test_the_limit_is_the_systems_where_that_is_less(tmp_path: Path) -> None:
    own = v2("lorad.service", 500 * GIB, 3 * GIB)
    assert machine(tmp_path, {"proc/self/cgroup": "0::/lorad.service\n", **own}) == 32 * GIB


@pytest.mark.parametrize("path", ["/", "/../..", "/docker/0123"])
def test_in_a_container_the_mount_is_the_own_group(tmp_path: Path, path: str) -> None:
    own = v2("", 4 * GIB, 1 * GIB)
    assert machine(tmp_path, {"proc/self/cgroup": f"0::{path}\n", **own}) == 3 * GIB


def test_a_group_that_is_full_has_nothing_left(tmp_path: Path) -> None:
    own = v2("lorad.service", 2 * GIB, 3 * GIB)
    assert machine(tmp_path, {"proc/self/cgroup": "0::/lorad.service\n", **own}) == 0


@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_version_1(tmp_path: Path, path: str) -> None:
    files = {
        "proc/self/cgroup": f"9:name=systemd:{path}\n4:cpu,memory:{path}\n0::/\n",
        **v1("", UNLIMITED, 30 * GIB),
        **v1(path.lstrip("/"), 8 * GIB, 6 * GIB, cache=3 * GIB),
    }
    assert machine(tmp_path, files) == 5 * GIB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/a\n0::/\n", **v1("a", UNLIMITED, 30 * GIB)}
    assert machine(tmp_path, files) == 32 * GIB


def test_a_limit_in_the_second_version_beside_the_first(tmp_path: Path) -> None:
    own = {f"sys/fs/cgroup/unified/a/{n.rpartition('/')[2]}": t for n, t in v2("a", GIB, 0).items()}
    files = {"proc/self/cgroup": "4:memory:/\n0::/a\n", **v1("", UNLIMITED, GIB), **own}
    assert machine(tmp_path, files) == GIB


def test_systems_without_these_files(tmp_path: Path, monkeypatch) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 1000, "SC_PHYS_PAGES": 8000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert available_host_bytes(tmp_path) == 4096 * 1000
    monkeypatch.setattr(os, "sysconf_names", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2})
    assert available_host_bytes(tmp_path) == 4096 * 4000


def test_this_machine() -> None:
    assert 2**20 < available_host_bytes() <= os.sysconf("SC_PHYS_PAGES") * 4096
