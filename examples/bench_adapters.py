"""What adapters that come and go cost those that stay: stalls, leaks, and the prefix cache.

    python examples/bench_adapters.py stall    # 50 reads of 2 s each beside running streams
    python examples/bench_adapters.py soak     # load, serve, unload, over and over
    python examples/bench_adapters.py prefix   # a long system prompt that all requests share

Many adapters at once are in bench_many.py. All run a real engine in this process, without HTTP.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from bench_report import progress, tell, write_table
from demo_model import ensure_demo_model
from random_model import ensure_random_model
from stepped_engine import LongestPause, SteppedEngine, rss_mib, stepped

from lorad.engine.messages import AbortRequest, LoadAdapter, UnloadAdapter

app = typer.Typer(add_completion=False, no_args_is_help=True)
Markdown = Annotated[
    Path | None, typer.Option(help="Write the figures into this page, between their marks.")
]


# --- a store that takes long ------------------------------------------------------------------


class _Streams:
    """Requests that never end: begun again, outside of what is timed, before they get long."""

    def __init__(self, bench: SteppedEngine, count: int) -> None:
        self._bench = bench
        self._refs = bench.refs[:count]
        self._names: list[str] = []
        self._begun = 0

    def refresh(self, longest: int = 1200) -> None:
        """Run on unless one has more than `longest` tokens."""
        if self._names and len(self._bench.times[self._names[0]]) < longest:
            return
        for name in self._names:
            self._bench.engine.handle(AbortRequest(name))
        self._bench.settle()
        self._begun += 1
        self._names = [
            self._bench.send([self._begun, 2, 3 + i], ref, 2000) for i, ref in enumerate(self._refs)
        ]
        for _ in range(10):
            self._bench.step()


@app.command()
def stall(
    loads: int = 50,
    streams: int = 4,
    delay: Annotated[float, typer.Option(help="Seconds that each read takes longer.")] = 2.0,
    threads: int = 2,
    markdown: Markdown = None,
) -> None:
    """Inter-token times of running streams, with and without a cold load beside them, in turns.

    The adapter comes by a command, so that no prefill of its own is among what is timed. Each
    load is followed, or preceded, by as many quiet steps as it lasted.
    """
    options = {"max_cpu_loras": 64, "slab_bytes": 2**29, "max_model_len": 2048}
    with stepped(ensure_demo_model(), loads + streams, threads=threads, **options) as b:
        running, pause = _Streams(b, streams), LongestPause()
        gaps: dict[str, list[float]] = {"quiet": [], "load": []}
        steps = 0
        running.refresh()
        read_before = b.engine.stats().memory.load_seconds.sum
        b.delay = delay
        for i, ref in enumerate(b.refs[streams:]):
            running.refresh()
            if i % 2:
                gaps["quiet"] += [_timed(b.step) for _ in range(steps)]
            beside = _beside_a_load(b, LoadAdapter(f"l{i}", ref))
            gaps["load"] += beside
            if not i % 2:
                gaps["quiet"] += [_timed(b.step) for _ in beside]
            steps = len(beside)
            progress(f"load {i + 1} of {loads}: {steps} steps beside it")
        read = b.engine.stats().memory.load_seconds.sum - read_before
        row = _compared(gaps) | {
            "loads": loads,
            "threads": threads,
            "mean_read_s": read / loads,
            "longest_gc_ms": 1000 * pause.seconds,
        }
    tell(row)
    if markdown:
        write_table(markdown, f"stall, {threads} threads", _stall_table(gaps, row))


def _beside_a_load(b: SteppedEngine, command: LoadAdapter) -> list[float]:
    b.answer = None
    b.engine.handle(command)
    gaps = []
    while b.answer is None:
        gaps.append(_timed(b.step))
    return gaps


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def share(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def _compared(gaps: dict[str, list[float]]) -> dict[str, object]:
    row: dict[str, object] = {"gaps_each": len(gaps["load"])}
    for name, part in _SHARES.items():
        quiet, beside = (1000 * share(gaps[kind], part) for kind in ("quiet", "load"))
        row |= {f"{name}_ms": [round(quiet, 2), round(beside, 2)], f"{name}_ratio": beside / quiet}
    return row


def _stall_table(gaps: dict[str, list[float]], row: dict[str, object]) -> str:
    lines = [
        f"{row['loads']} cold loads of {row['mean_read_s']:.2f} s in the mean, "
        f"{row['gaps_each']} steps beside them and as many without; {row['threads']} threads.",
        "",
        "| inter-token time | without loads, ms | beside a load, ms | ratio |",
        "|---|---|---|---|",
    ]
    for name, part in _SHARES.items():
        quiet, beside = (1000 * share(gaps[kind], part) for kind in ("quiet", "load"))
        lines.append(f"| {name} | {quiet:.1f} | {beside:.1f} | {beside / quiet:.2f} |")
    return "\n".join(lines)


# --- churn ------------------------------------------------------------------------------------


@app.command()
def soak(
    rounds: int = 10_000,
    adapters: int = 64,
    demo: Annotated[bool, typer.Option("--demo", help="The demo model, not a tiny one.")] = False,
    markdown: Markdown = None,
) -> None:
    """Load, serve and unload in turn while another adapter answers; memory must stay flat."""
    model = ensure_demo_model() if demo else ensure_random_model("tiny-llama")
    with stepped(model, adapters + 1, max_cpu_loras=16, slab_bytes=2**27) as b:
        steady, names = b.refs[0], b.refs[1:]
        b.serve([steady], at_once=1, tokens=2)
        before = _resident(b)
        marks: list[tuple[int, float]] = []
        stream, began, left_behind = "", time.monotonic(), 0
        for i in range(rounds):
            if not stream or stream in b.ended:
                b.ended.discard(stream)
                b.times.pop(stream, None)
                stream = b.send([5, 6, 7], steady, 200)
            ref = names[i % adapters]
            b.command(LoadAdapter(f"l{i}", ref))
            b.serve([ref], at_once=1, tokens=2)
            b.command(UnloadAdapter(f"u{i}", ref, 30.0))
            left_behind += any(s.digest == ref.digest for s in b.engine.stats().adapters)
            if i % max(1, rounds // 100) == 0:
                marks.append((i, rss_mib()))
                progress(f"round {i} of {rounds}: {marks[-1][1]:.1f} MiB")
        marks.append((rounds, rss_mib()))
        b.settle()
        tenth = next(mib for i, mib in marks if i >= rounds // 10)
        row: dict[str, object] = {
            "model": model.name,
            "rounds": rounds,
            "seconds": time.monotonic() - began,
            "rss_mib_first": marks[0][1],
            "rss_mib_at_a_tenth": tenth,
            "rss_mib_last": marks[-1][1],
            "rss_mib_peak": max(mib for _, mib in marks),
            "kib_per_1000_rounds": 1024 * _slope(marks[len(marks) // 2 :]) * 1000,
            "left_behind": left_behind,
            "resident_before": before,
            "resident_after": _resident(b),
        }
    tell(row)
    if markdown:
        write_table(markdown, f"soak, {'demo' if demo else 'tiny'}", _soak_line(row))


def _resident(b: SteppedEngine) -> dict[str, int]:
    stats = b.engine.stats()
    return {
        "adapter_pages": stats.adapter_pages,
        "host_bytes": stats.host_cache_bytes,
        "kv_pages": stats.kv_pages,
    }


def _slope(marks: Sequence[tuple[int, float]]) -> float:
    """Of the line through the points, in the least squares."""
    xs, ys = zip(*marks, strict=True)
    return statistics.linear_regression(xs, ys).slope


def _soak_line(row: dict[str, object]) -> str:
    same = "the same" if row["resident_before"] == row["resident_after"] else "NOT the same"
    return (
        "| model | rounds | RSS at the start, at a tenth, at the end, peak (MiB) "
        "| slope over the second half | left behind by an unload | resident bytes after |\n"
        "|---|---|---|---|---|---|\n"
        f"| {row['model']} | {row['rounds']:,} | {row['rss_mib_first']:.1f}, "
        f"{row['rss_mib_at_a_tenth']:.1f}, {row['rss_mib_last']:.1f}, {row['rss_mib_peak']:.1f} "
        f"| {row['kib_per_1000_rounds']:+.1f} KiB per 1,000 rounds | {row['left_behind']} "
        f"| {same} as before |"
    )


# --- prefixes ---------------------------------------------------------------------------------


@app.command()
def prefix(requests: int = 24, system: int = 512, question: int = 32) -> None:
    """Time to first token with one long system prompt, shared or different each time."""
    with stepped(ensure_demo_model(), 1, slab_bytes=2**29) as b:
        choose = random.Random(0)

        def tokens(count: int) -> list[int]:
            return [choose.randrange(1000, 40000) for _ in range(count)]

        shared = tokens(system)
        found: dict[str, list[float]] = {"different": [], "shared": []}
        b.serve([None, *b.refs], at_once=2, tokens=2)
        for i in range(requests):
            for kind in ("different", "shared"):
                start = shared if kind == "shared" else tokens(system)
                name = b.send(start + tokens(question), b.refs[0] if i % 2 else None, 1)
                while len(b.times[name]) < 2:
                    b.step()
                if i >= 2:  # the first two fill the cache, for the base and the adapter
                    found[kind].append(b.times[name][1] - b.times[name][0])
        memory = b.engine.stats().memory
        tell(
            {
                "ttft_ms": {k: 1000 * statistics.median(v) for k, v in found.items()},
                "ratio": statistics.median(found["different"]) / statistics.median(found["shared"]),
                "hit_tokens": memory.prefix_hit_tokens,
                "prompt_tokens": memory.prefix_lookup_tokens,
            }
        )


if __name__ == "__main__":
    app()
