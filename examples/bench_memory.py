"""What the books of the memory cost and what they save; no model is loaded.

python examples/bench_memory.py fragmentation   # 100,000 random loads, unloads, sequences
python examples/bench_memory.py host-cache      # LRU against what the host cache does
python examples/bench_memory.py slots           # true rank against slots of the largest rank
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_report import progress, tell, write_table

from lorad.adapters.host_cache import HostCache
from lorad.adapters.weights import AdapterWeights
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import AdapterLayout, pack_adapter, uniform_modules
from lorad.sizing.catalogue import find_model
from lorad.sizing.families import architecture
from lorad.sizing.memory_plan import page_bytes, pages_for
from lorad.sizing.model_shape import ModelShape
from lorad.sizing.other_engines import sglang_reservation, vllm_reservation

app = typer.Typer(add_completion=False, no_args_is_help=True)

# Llama-3.1-8B in 16 bit: a page of 16 tokens is 2 MiB, a rank on all linears 5 MiB.
PAGE_BYTES = 2 * 2**20
RANK_BYTES = 5 * 2**20
RANKS = (8, 16, 32, 64)


@app.command()
def fragmentation(
    operations: int = 100_000,
    pages: int = 4096,
    seed: int = 0,
    page_kib: Annotated[int, typer.Option(help="Real pages, to time their copies too.")] = 0,
    markdown: Path | None = None,
) -> None:
    """Whether an adapter that fits in the free pages always loads, and what that took.

    A page here has 4 bytes unless told otherwise, so that only the books are timed; how many pages
    an adapter takes is as with Llama-3.1-8B.
    """
    choose = random.Random(seed)
    elements = max(1, page_kib * 256)
    slab = Slab(torch.zeros(pages * elements), pages, elements, 16)
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
            nbytes = count * slab.page_bytes
            weights = AdapterWeights(
                f"a{i}", AdapterLayout((), nbytes, nbytes, rank), torch.zeros(count * elements)
            )
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
            progress(f"{i + 1} of {operations} operations, {loads} loads")
    moves = adapters.relocator
    row: dict[str, object] = {
        "operations": operations,
        "page_bytes": slab.page_bytes,
        "loads": loads,
        "refused_though_free": refused,
        "without_a_hole": holes_missing,
        "moved_pages_per_load": moves.moved_pages / max(1, loads),
        "moved_adapters": moves.moved_runs,
        "move_ms_per_load": 1000 * moves.seconds / max(1, loads),
        "steps_waited": steps,
        "load_us_p50": 1e6 * statistics.median(seconds),
        "load_us_p99": 1e6 * sorted(seconds)[int(len(seconds) * 0.99)],
        "evicted": sum(eviction.counts.values()),
        "pages_of_slots_of_rank_64": statistics.mean(ratios),
    }
    tell(row)
    if markdown:
        cells = [f"| {what.replace('_', ' ')} | {_told(value)} |" for what, value in row.items()]
        write_table(markdown, "fragmentation", "\n".join(["| | |", "|---|---|", *cells]))


def _told(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


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


# --- slots ------------------------------------------------------------------------------------

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@app.command()
def slots(resident: int = 32, markdown: Path | None = None) -> None:
    """Bytes of resident adapters of even ranks 8, 16, 32, 64 against slots for the largest rank.

    The layouts are the daemon's, and they are put into a pool of the daemon's; the slots are what
    vLLM and SGLang allocate for as many adapters, by the shapes of their own buffers.
    """
    rows = []
    for name in ("smollm2-135m", "llama-3.1-8b"):
        for leaves in (("q_proj", "v_proj"), ALL):
            rows.append(_against_reservations(name, leaves, resident))
            tell(rows[-1])
    if markdown:
        write_table(markdown, "slots", _slots_table(rows))


def _against_reservations(name: str, leaves: tuple[str, ...], resident: int) -> dict[str, object]:
    model = find_model(name)
    if model is None:
        raise typer.BadParameter(f"no model {name}")
    shape = ModelShape.from_config(model.config)
    page = page_bytes(shape, 16, 2)
    layouts = [
        pack_adapter(shape, uniform_modules(shape, leaves, RANKS[i % len(RANKS)]), 2)
        for i in range(resident)
    ]
    held = _put_into_a_pool(layouts, page) * page
    arch = architecture(model.config)
    vllm = vllm_reservation(arch, resident, max(RANKS), 2)
    sglang = sglang_reservation(arch, resident, max(RANKS), leaves, 2)
    return {
        "model": name,
        "targets": "all linears" if leaves == ALL else "q, v",
        "resident": resident,
        "weight_mib": sum(layout.weight_nbytes for layout in layouts) / 2**20,
        "pool_mib": held / 2**20,
        "vllm_mib": vllm.low / 2**20 if vllm else None,
        "sglang_mib": sglang.low / 2**20 if sglang else None,
        "of_vllm": held / vllm.low if vllm else None,
        "of_sglang": held / sglang.low if sglang else None,
    }


def _put_into_a_pool(layouts: list[AdapterLayout], page: int) -> int:
    """Pages that the adapters take in a pool of the engine's; a page has 4 bytes here."""
    pages = sum(pages_for(layout.nbytes, page) for layout in layouts)
    slab = Slab(torch.zeros(pages), pages, 1, 16)
    pool = PagePool(pages)
    eviction = Eviction(pool)
    adapters = AdapterPool(pool, slab, eviction, KVCache(pool, slab, eviction))
    for i, layout in enumerate(layouts):
        count = pages_for(layout.nbytes, page)
        small = AdapterLayout((), 4 * count, 4 * count, layout.max_rank)
        if adapters.upload(AdapterWeights(f"a{i}", small, torch.zeros(count))) != "ready":
            raise RuntimeError(f"adapter {i} did not fit")
    return pool.adapter_pages


def _slots_table(rows: list[dict[str, object]]) -> str:
    lines = [
        f"{rows[0]['resident']} adapters, ranks 8, 16, 32 and 64 in equal parts, 16 bit; MiB.",
        "",
        "| model | targets | weights alone | lorad, pages | vLLM, slots of rank 64 "
        "| SGLang, slots of rank 64 | lorad / vLLM | lorad / SGLang |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = (row[key] for key in ("weight_mib", "pool_mib", "vllm_mib", "sglang_mib"))
        shares = (row[key] for key in ("of_vllm", "of_sglang"))
        lines.append(
            f"| {row['model']} | {row['targets']} | "
            + " | ".join([*(f"{size:,.0f}" for size in sizes), *(f"{part:.0%}" for part in shares)])
            + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    app()
