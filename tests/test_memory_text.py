"""What `loractl status` and `top` say of the memory, from a snapshot of the engine."""

from __future__ import annotations

import io

from rich.console import Console

from loractl.commands import top
from loractl.memory_text import memory_fields
from lorad.engine.messages import AdapterState, EngineStats, Histogram, MemoryStats
from lorad.server.admin_views import engine_info, tier_counts
from lorad.wire import StatusInfo


def stats(memory: MemoryStats) -> EngineStats:
    rows = (AdapterState("sha256:a", "device"), AdapterState("sha256:b", "host"))
    return EngineStats(9, 2, 1, 30, 20, 64, 10, 30, 20, 2**20, 2**21, rows, 4, 2**30, memory)


def busy() -> MemoryStats:
    seconds = Histogram()
    for _ in range(4):
        seconds.add(0.025)
    return MemoryStats(
        lookups={"device": 60, "host": 30, "store": 10},
        loads={"request": 8, "prefetch": 2, "command": 1},
        cancelled_loads=3,
        load_seconds=seconds,
        evictions={("adapter", "kv"): 5, ("prefix", "adapter"): 7},
        host_evictions=12,
        moved_pages=89,
        moved_adapters=2,
        move_seconds=0.0123,
        prefix_lookup_tokens=200,
        prefix_hit_tokens=50,
        preemptions=6,
    )


def test_every_count_of_the_memory_is_told() -> None:
    assert memory_fields(engine_info(stats(busy()))) == {
        "host cache": "2.0 MiB, 12 left it",
        "tier hits": "60% device, 30% host, 10% store",
        "loads": "1 command, 2 prefetch, 8 request; 25.0 ms each; 3 cancelled",
        "evicted": "5 adapter for kv, 7 prefix for adapter",
        "moved": "89 pages, 2 adapters in 12.3 ms",
        "prefixes": "50 of 200 prompt tokens found (25%)",
        "preempted": "6 requests",
    }


def test_of_a_daemon_that_has_done_nothing() -> None:
    fields = memory_fields(engine_info(stats(MemoryStats())))
    assert fields["loads"] == fields["evicted"] == "none"
    assert fields["moved"] == "nothing"
    assert fields["tier hits"] == "no request for one yet"


def test_an_older_daemon_does_not_tell_how_many_loads_its_seconds_are_of() -> None:
    info = engine_info(stats(busy()))
    del info["memory"]["loads_done"]
    assert memory_fields(info)["loads"] == "1 command, 2 prefetch, 8 request; 3 cancelled"


def test_the_screen_of_top_shows_pages_by_owner_and_what_the_memory_did() -> None:
    found = stats(busy())
    status: StatusInfo = {
        "daemon_version": "1",
        "api_version": 1,
        "pid": 1,
        "uid": 1,
        "started_at": 0.0,
        "base_model": "base",
        "adapters": 2,
        "live_adapters": 2,
        "canaries": 0,
        "draining": False,
        "role": "read",
        "store": {"path": "/", "free_bytes": 0, "total_bytes": 0},
        "ttft": {"requests": 0, "p50": None, "p99": None, "p50_by_version": {}},
        "failed_versions": 0,
        "tiers": tier_counts(found.adapters),
        "engine": engine_info(found),
    }
    look = top.Look(1.0, status, {"cursor": 0, "adapters": []}, {"steps": []})
    out = io.StringIO()
    Console(file=out, width=120).print(top.screen(look, None))
    lines = [line.strip() for line in out.getvalue().splitlines()]

    def line(start: str) -> str:
        return next(line for line in lines if line.startswith(start))

    assert line("KV").endswith("30 pages, 30.0 MiB")
    assert line("cached KV").endswith("4 pages, 4.0 MiB")
    assert line("adapters").endswith("20 pages, 20.0 MiB")
    assert line("free").endswith("10 pages, 10.0 MiB")
    assert line("tiers") == "tiers      1 device, 1 host"
    assert "60% device" in line("tier hits")
    assert "25.0 ms each" in line("loads")
    assert "89 pages" in line("moved")
