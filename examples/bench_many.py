"""Throughput with 1 to 2,000 adapters served in one run, and where their bytes are.

    python examples/bench_many.py                       # four fleets, half an hour on 2 cores
    python examples/bench_many.py --ranks 8 --max-cpu-loras 2000 --rounds 3

Each fleet has one engine, of which all adapters are served. The points (base only, one adapter,
32 up to all, uniform and Zipf) take turns, and the base alone is timed just before each, so that
ratios hold on a machine that drifts. Before a point is measured its adapters have been asked for
once, and then in the proportions of the point: what is in which tier then is what the point itself
leads to. The cold points begin with no adapter in memory.

A real engine in this process, without HTTP; prompts of 32 random tokens, 32 tokens of answer, 32
requests at once.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from bench_report import progress, tell, write_table
from demo_model import ensure_demo_model
from stepped_engine import LongestPause, SteppedEngine, stepped, uniform, zipf

from lorad.adapter_ref import AdapterRef
from lorad.sizing.svg_chart import Chart, Series, svg_document

COUNTS = (1, 32, 100, 200, 500, 1000, 2000)
AT_ONCE, PROMPT, ANSWER = 32, 32, 32
TIERS = ("device", "host", "store")
_HOST_BYTES = 9 * 2**30  # so that the count alone bounds the host cache


@dataclass
class Point:
    """One mix of requests, and what was measured of it in each round."""

    name: str
    popularity: str  # "base", "uniform" or "zipf"
    adapters: int
    wall: list[float] = field(default_factory=list)  # tokens per second
    base: list[float] = field(default_factory=list)  # of the base alone, just before
    cpu: list[float] = field(default_factory=list)  # tokens per second of CPU time
    lookups: dict[str, int] = field(default_factory=dict)  # requests by tier
    resident: dict[str, int] = field(default_factory=dict)  # adapters and bytes per tier

    def plan(self, refs: Sequence[AdapterRef], count: int, seed: int) -> list[AdapterRef | None]:
        """Whom that many requests are for."""
        if self.popularity == "base":
            return [None] * count
        choose = zipf if self.popularity == "zipf" else uniform
        return list(choose(refs[: self.adapters], count, seed))


def points(adapters: int) -> Iterator[Point]:
    yield Point("base", "base", 0)
    for count in COUNTS:
        if count <= adapters:
            for popularity in ("uniform", "zipf") if count > 1 else ("uniform",):
                yield Point(f"{popularity} {count}", popularity, count)


@dataclass
class Fleet:
    """All that was measured with one engine."""

    ranks: str
    max_cpu_loras: int
    page_bytes: int
    slab_pages: int
    once: dict[str, float]
    points: list[Point]
    cold: list[Point]
    longest_gc_ms: float = 0.0


def main(
    adapters: int = 2000,
    ranks: Annotated[list[str] | None, typer.Option(help="In turn over a fleet; again.")] = None,
    max_cpu_loras: Annotated[list[int] | None, typer.Option(help="Again for more.")] = None,
    rounds: int = 2,
    requests: Annotated[int, typer.Option(help="That are timed, per point and round.")] = 64,
    warm: Annotated[int, typer.Option(help="That go before, with 2 tokens each.")] = 256,
    slab_mib: int = 512,
    threads: int = 2,
    output: Annotated[Path | None, typer.Option(help="For all figures, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="The page with the marks.")] = None,
    chart: Annotated[Path | None, typer.Option(help="An SVG file.")] = None,
) -> None:
    """Measure the curve, and write it where it is wanted."""
    fleets: list[Fleet] = []
    mixes, bounds = ranks or ["8", "8,16,32,64"], max_cpu_loras or [2000, 200]
    for mix, places in itertools.product(mixes, bounds):
        with stepped(
            ensure_demo_model(),
            adapters,
            tuple(map(int, mix.split(","))),
            threads=threads,
            max_loras=AT_ONCE,
            max_num_seqs=AT_ONCE,
            max_cpu_loras=places,
            slab_bytes=slab_mib * 2**20,
            host_cache_bytes=_HOST_BYTES,
        ) as b:
            fleets.append(_measure(b, mix, places, rounds, requests, warm))
        if output:
            output.write_text(json.dumps([asdict(fleet) for fleet in fleets], indent=1))
    tables = [_table(fleet) for fleet in fleets]
    if chart:
        chart.write_text(svg_document(_charts(fleets)))
        if markdown and chart.is_relative_to(markdown.parent):
            name = chart.relative_to(markdown.parent)
            tables.append(f"![Tokens per second over the number of adapters]({name})")
    if markdown:
        write_table(markdown, "many adapters", "\n\n".join(tables))


def _measure(
    b: SteppedEngine, mix: str, places: int, rounds: int, requests: int, warm: int
) -> Fleet:
    pause = LongestPause()
    stats = b.engine.stats()
    fleet = Fleet(mix, places, stats.page_bytes, stats.total_pages, {}, [], [])
    what = f"ranks {mix}, max_cpu_loras {places}"
    b.serve([None] * AT_ONCE, at_once=AT_ONCE, tokens=4, prompt=PROMPT)
    fleet.once = _everyone_once(b, what)
    fleet.points = list(points(len(b.refs)))
    for turn in range(rounds):
        for point in fleet.points:
            progress(f"{what}: round {turn + 1} of {rounds}, {point.name}")
            if not turn and point.adapters:
                b.serve(b.refs[: point.adapters], at_once=AT_ONCE, tokens=1, prompt=2)
            before = point.plan(b.refs, warm, 1000 + turn)
            b.serve(before, at_once=AT_ONCE, tokens=1, prompt=2)
            _time(b, point, requests, turn)
    for count in COUNTS[1:]:
        if count <= len(b.refs):
            fleet.cold.append(Point(f"cold {count}", "uniform", count))
            progress(f"{what}: {fleet.cold[-1].name}")
            b.forget_adapters()
            _time(b, fleet.cold[-1], requests, 0)
    fleet.longest_gc_ms = 1000 * pause.seconds
    for point in (*fleet.points, *fleet.cold):
        tell({"fleet": what, **_row(point, fleet)})
    tell({"fleet": what, "once": fleet.once, "longest_gc_ms": fleet.longest_gc_ms})
    return fleet


def _everyone_once(b: SteppedEngine, what: str) -> dict[str, float]:
    """Every adapter answers one request, none of them having been in memory."""
    progress(f"{what}: each of {len(b.refs)} adapters once")
    loads, began = sum(b.engine.stats().memory.loads.values()), time.monotonic()
    rate = b.serve(b.refs, at_once=AT_ONCE, tokens=2, prompt=PROMPT)
    memory = b.engine.stats().memory
    return {
        "requests": len(b.refs),
        "seconds": time.monotonic() - began,
        "tokens_per_s": rate.wall,
        "loads": sum(memory.loads.values()) - loads,
        "mean_load_ms": 1000 * memory.load_seconds.sum / max(1, sum(memory.load_seconds.counts)),
    }


def _time(b: SteppedEngine, point: Point, requests: int, turn: int) -> None:
    alone = b.serve([None] * AT_ONCE, at_once=AT_ONCE, tokens=ANSWER, prompt=PROMPT)
    point.base.append(alone.wall)
    before = b.engine.stats().memory.lookups
    plan = point.plan(b.refs, requests, turn)
    rate = b.serve(plan, at_once=AT_ONCE, tokens=ANSWER, prompt=PROMPT)
    stats = b.engine.stats()
    point.wall.append(rate.wall)
    point.cpu.append(rate.cpu)
    found = stats.memory.lookups
    for tier in TIERS:
        new = found.get(tier, 0) - before.get(tier, 0)
        point.lookups[tier] = point.lookups.get(tier, 0) + new
    device = [state.device_bytes for state in stats.adapters if state.residency == "device"]
    point.resident = {
        "device_adapters": len(device),
        "device_bytes": sum(device),
        "device_pages": stats.adapter_pages,
        "kv_pages": stats.kv_pages + stats.cached_pages,
        "free_pages": stats.free_pages,
        "host_adapters": sum(state.host_bytes > 0 for state in stats.adapters),
        "host_bytes": stats.host_cache_bytes,
        "store_bytes": b.store_bytes(point.adapters),
    }


# --- what is told -----------------------------------------------------------------------------


def _row(point: Point, fleet: Fleet) -> dict[str, object]:
    return {
        "point": point.name,
        "tokens_per_s": statistics.median(point.wall),
        "of_base": _ratio(point, fleet, "base"),
        "of_32": _ratio(point, fleet, _of_32(point)),
        "tokens_per_cpu_s": statistics.median(point.cpu),
        "hits": {tier: round(_hits(point, tier), 3) for tier in TIERS},
        **point.resident,
    }


def _of_32(point: Point) -> str:
    return f"{'zipf' if point.popularity == 'zipf' else 'uniform'} 32"


def _ratio(point: Point, fleet: Fleet, name: str) -> float:
    """Throughput against another point, or against the base alone, which each has beside it.

    Two points are compared by what they are of the base: the machine drifts meanwhile.
    """
    if name == "base":
        return _of_base(point)
    other = next((p for p in fleet.points if p.name == name), point)
    return _of_base(point) / _of_base(other)


def _of_base(point: Point) -> float:
    return statistics.median(mine / its for mine, its in zip(point.wall, point.base, strict=True))


def _hits(point: Point, tier: str) -> float:
    return point.lookups[tier] / max(1, sum(point.lookups.values()))


def _table(fleet: Fleet) -> str:
    gib, mib, once = 2**30, 2**20, fleet.once
    lines = [
        f"Ranks {fleet.ranks}, `max_cpu_loras` {fleet.max_cpu_loras}; a slab of "
        f"{fleet.slab_pages:,} pages of {fleet.page_bytes // 1024} KiB. Each adapter once, cold, 2 "
        f"tokens an answer: {once['requests']:,} requests in {once['seconds']:.0f} s, "
        f"{once['loads']:,} loads of {once['mean_load_ms']:.1f} ms in the mean.",
        "",
        "| requests over | tokens/s | of base | of 32 | found on the device / host / store "
        "| adapters on the device | in host memory | in the store |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in (*fleet.points, *fleet.cold):
        kept = point.resident
        found = " / ".join(f"{_hits(point, tier):.0%}" for tier in TIERS)
        lines.append(
            f"| {point.name.replace('base', 'base only')} | {statistics.median(point.wall):.0f} "
            f"| {_ratio(point, fleet, 'base'):.2f} | {_ratio(point, fleet, _of_32(point)):.2f} "
            f"| {found if point.adapters else '-'} "
            f"| {kept['device_adapters']} ({kept['device_bytes'] / mib:.0f} MiB, "
            f"{kept['device_pages']} pages) "
            f"| {kept['host_adapters']} ({kept['host_bytes'] / gib:.2f} GiB) "
            f"| {kept['store_bytes'] / gib:.2f} GiB |"
        )
    return "\n".join(lines)


def _charts(fleets: Sequence[Fleet]) -> list[Chart]:
    """Throughput over the number of adapters, uniform; one chart for each mix of ranks."""
    return [
        Chart(
            f"Ranks {ranks}, uniform",
            "adapters",
            "output tokens/s, 1 = with 32 adapters",
            [
                Series(
                    f"max_cpu_loras {fleet.max_cpu_loras:,}",
                    [(p.adapters, _ratio(p, fleet, "uniform 32")) for p in _curve(fleet)],
                    dashed=i > 0,
                )
                for i, fleet in enumerate(f for f in fleets if f.ranks == ranks)
            ],
        )
        for ranks in dict.fromkeys(fleet.ranks for fleet in fleets)
    ]


def _curve(fleet: Fleet) -> list[Point]:
    return [p for p in fleet.points if p.popularity == "uniform" and p.adapters >= 32]


if __name__ == "__main__":
    typer.run(main)
