"""What the books of the memory cost and what they save; no model is loaded.

python examples/bench_memory.py fragmentation   # 100,000 random loads, unloads, sequences
python examples/bench_memory.py host-cache      # LRU against what the host cache does
python examples/bench_memory.py registry        # 10,000 adapters, a million unknown names
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import typer

from lorad.adapter_ref import AdapterName
from lorad.adapters.host_cache import HostCache
from lorad.adapters.peft_format import read_adapter
from lorad.adapters.weights import AdapterWeights
from lorad.errors import LoradError
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.registry.records import Who
from lorad.registry.registry import Registry
from lorad.sizing.adapter_size import AdapterLayout
from lorad.sizing.model_shape import ModelShape

app = typer.Typer(add_completion=False, no_args_is_help=True)

# Llama-3.1-8B in 16 bit: a page of 16 tokens is 2 MiB, a rank on all linears 5 MiB.
PAGE_BYTES = 2 * 2**20
RANK_BYTES = 5 * 2**20
RANKS = (8, 16, 32, 64)


def tell(row: dict[str, object]) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))


@app.command()
def fragmentation(operations: int = 100_000, pages: int = 4096, seed: int = 0) -> None:
    """Whether an adapter that fits in the free pages always loads, and what that took.

    A page here has 4 bytes, so that only the books are timed; the bytes told are those of
    Llama-3.1-8B.
    """
    choose = random.Random(seed)
    slab = Slab(torch.zeros(pages), pages, 1, 16)
    pool = PagePool(pages)
    eviction = Eviction(pool)
    kv = KVCache(pool, slab, eviction)
    adapters = AdapterPool(pool, slab, eviction, kv, moved_bytes_per_step=16 * slab.page_bytes)
    tables: list[list[int]] = []
    used: list[str] = []
    refused = loads = holes_missing = steps = 0
    seconds: list[float] = []
    ratios: list[float] = []
    for i in range(operations):
        action = choose.random()
        if action < 0.45:
            table: list[int] = []
            if kv.grow(table, choose.randint(16, 1024)):
                tables.append(table)
        elif action < 0.75 and tables:
            kv.release(tables.pop(choose.randrange(len(tables))))
        elif action < 0.9:
            rank = choose.choice(RANKS)
            count = -(-rank * RANK_BYTES // PAGE_BYTES)
            fits = count <= pool.adapter_room
            holes_missing += fits and pool.longest_run() < count
            layout = AdapterLayout((), count * 4, count * 4, rank)
            weights = AdapterWeights(f"a{i}", layout, torch.zeros(count))
            started = time.perf_counter()
            while (state := _step(adapters, weights)) == "moving":
                steps += 1
            seconds.append(time.perf_counter() - started)
            refused += fits and state != "ready"
            if state == "ready":
                loads += 1
                adapters.acquire(f"a{i}")
                used.append(f"a{i}")
        elif used:
            adapters.release(used.pop(choose.randrange(len(used))))
        if i % 1000 == 999:
            ratios.append(_against_slots(adapters))
    moves = adapters.relocator
    tell(
        {
            "operations": operations,
            "loads": loads,
            "refused_though_free": refused,
            "without_a_hole": holes_missing,
            "moved_pages": moves.moved_pages,
            "moved_pages_per_load": moves.moved_pages / max(1, loads),
            "moved_adapters": moves.moved_runs,
            "steps_waited": steps,
            "load_us_p50": 1e6 * statistics.median(seconds),
            "load_us_p99": 1e6 * sorted(seconds)[int(len(seconds) * 0.99)],
            "evicted": sum(eviction.counts.values()),
            "bytes_against_slots_of_rank_64": statistics.mean(ratios),
        }
    )


def _step(adapters: AdapterPool, weights: AdapterWeights) -> str:
    adapters.relocator.begin_step()
    return adapters.upload(weights)


def _against_slots(adapters: AdapterPool) -> float:
    """Pages of the resident adapters over those that slots of the largest rank would take."""
    resident = adapters.resident()
    slot = -(-max(RANKS) * RANK_BYTES // PAGE_BYTES)
    return sum(a.num_pages for a in resident) / max(1, len(resident) * slot)


# --- host cache -------------------------------------------------------------------------------


class Lru:
    def __init__(self, places: int) -> None:
        self._places = places
        self._order: dict[int, None] = {}

    def request(self, number: int) -> bool:
        found = number in self._order
        self._order.pop(number, None)
        self._order[number] = None
        if len(self._order) > self._places:
            del self._order[next(iter(self._order))]
        return found


class Ours:
    def __init__(self, places: int) -> None:
        self._cache = HostCache(places, 2**60)
        self._data = torch.zeros(1)

    def request(self, number: int) -> bool:
        digest = str(number)
        self._cache.count_request(digest)
        if self._cache.get(digest) is not None:
            return True
        self._cache.put(AdapterWeights(digest, AdapterLayout((), 4, 4, 1), self._data))
        return False


def _zipf(adapters: int, exponent: float, count: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    order = choose.sample(range(adapters), adapters)
    weights = [1 / (i + 1) ** exponent for i in range(adapters)]
    return choose.choices(order, weights, k=count)


def _traces(adapters: int, count: int) -> Iterator[tuple[str, list[int]]]:
    for exponent in (0.0, 0.8, 1.0, 1.2):
        yield f"zipf {exponent}", _zipf(adapters, exponent, count, 1)
    popular = _zipf(adapters, 1.0, count, 2)
    yield (
        "zipf 1.0 and a scan each 4,000",
        [
            number
            for i in range(0, count, 4000)
            for number in (*popular[i : i + 4000], *range(adapters))
        ],
    )
    yield (
        "zipf 1.0, others popular each 5,000",
        [number for i in range(count // 5000) for number in _zipf(adapters, 1.0, 5000, 10 + i)],
    )


@app.command("host-cache")
def host_cache(adapters: int = 2000, places: int = 200, requests: int = 40_000) -> None:
    """The share of requests that find their adapter in host memory."""
    policies: dict[str, Callable[[int], Lru | Ours]] = {"lru": Lru, "lorad": Ours}
    for name, trace in _traces(adapters, requests):
        row: dict[str, object] = {"trace": name}
        for policy, make in policies.items():
            cache = make(places)
            row[policy] = sum(map(cache.request, trace)) / len(trace)
        tell(row)


# --- registry ---------------------------------------------------------------------------------

_SHAPE = ModelShape("llama", 16, 1, 2, 1, 8, 16, 64)


@app.command()
def registry(adapters: int = 10_000, unknown: int = 1_000_000) -> None:
    """Memory and time per registered adapter, and what names that do not exist leave behind."""
    from adapter_fleet import write_adapter

    ram = Path("/dev/shm")  # memory is measured here, not the disk
    with tempfile.TemporaryDirectory(dir=ram if ram.is_dir() else None) as name:
        root = Path(name)
        held = Registry.open(root / "state", "base", lambda d: read_adapter(d, _SHAPE))
        before, started = rss_bytes(), time.perf_counter()
        for i in range(adapters):
            directory = write_adapter(root / "one", _SHAPE, 1, i)
            pushed = held.push(directory, AdapterName.parse(f"a{i}"), who=Who.daemon())
            held.promote(pushed.version.ref.name, pushed.version.label, who=Who.daemon())
        push_seconds = time.perf_counter() - started
        held.close()
        held = Registry.open(root / "state", "base", lambda d: read_adapter(d, _SHAPE))
        per_adapter = (rss_bytes() - before) / adapters
        tell(
            {
                "adapters": adapters,
                "push_ms": 1000 * push_seconds / adapters,
                "bytes_per_adapter": per_adapter,
                "list_ms": 1000 * _time(lambda: held.adapters(), 5),
                "resolve_us": 1e6 * _time(lambda: held.resolve(f"a{adapters // 2}"), 2000),
            }
        )
        before, started = rss_bytes(), time.perf_counter()
        for i in range(unknown):
            try:
                held.resolve(f"nobody-{i}")
            except LoradError as error:
                if error.code != "adapter.not_found":
                    raise
        tell(
            {
                "unknown_names": unknown,
                "us_each": 1e6 * (time.perf_counter() - started) / unknown,
                "bytes_left_behind": rss_bytes() - before,
            }
        )
        held.close()


def _time(call: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    app()
