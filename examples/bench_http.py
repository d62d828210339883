"""Output tokens a second over HTTP with 0, 1, 8 and 32 adapters in the batch, against base only.

    python examples/bench_http.py                      # SmolLM2-135M-Instruct
    python examples/bench_http.py --random llama-1.1b  # TinyLlama's shape, random weights

One daemon, adapters on all linear layers with ranks 8, 16, 32, 64 in turn. Prompts are random, so
the prefill is always computed; it is in the figures. All cases take turns, round after round, and
the median counts: the machine may drift, but not from one case to the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from adapter_fleet import write_adapter
from bench import PORT, Lorad, machine_speed
from bench_report import progress, write_table
from bench_server import Load, Row, add_sampling, measure, sampling
from demo_model import ensure_demo_model
from random_model import SHAPES, ensure_random_model

from lorad.sizing.model_shape import ModelShape, read_config

RANKS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Point:
    """The median round of a case; `of_base` compares with base only at the same concurrency."""

    adapters: int
    row: Row
    of_base: float


@contextmanager
def serving(model: Path, adapters: int, threads: int) -> Iterator[Lorad]:
    shape = ModelShape.from_config(read_config(model))
    with tempfile.TemporaryDirectory(prefix="lorad-bench-") as folder:
        paths = []
        for i in range(adapters):
            progress(f"adapter {i + 1} of {adapters}")
            rank, leaves = RANKS[i % len(RANKS)], tuple(shape.linears)
            paths.append(write_adapter(Path(folder) / f"bench-{i}", shape, rank, i, leaves))
        lorad = Lorad(model, paths, Path(folder), threads)
        try:
            yield lorad
        finally:
            lorad.stop()


def run(lorad: Lorad, options: argparse.Namespace) -> list[Point]:
    cases = [(a, c) for c in options.concurrency for a in options.adapters if a <= c]
    found: dict[tuple[int, int], list[Row]] = {case: [] for case in cases}
    for turn in range(-1, options.rounds):  # the first one only warms up
        for adapters, concurrency in cases:
            progress(
                f"round {turn + 1} of {options.rounds}: {adapters} adapters, c = {concurrency}"
            )
            models = lorad.names[:adapters] or [lorad.base]
            load = Load(PORT, models, options.prompt_tokens, options.new_tokens, sampling(options))
            seed = 1000 * (turn + 1) + 100 * adapters + concurrency
            row = asyncio.run(measure(load, concurrency, max(2, concurrency), seed))
            if turn >= 0:
                found[adapters, concurrency].append(row)
    median = {
        case: sorted(rows, key=lambda row: row.tokens_per_s)[len(rows) // 2]
        for case, rows in found.items()
    }
    return [
        Point(adapters, row, row.tokens_per_s / median[0, concurrency].tokens_per_s)
        for (adapters, concurrency), row in median.items()
    ]


def table(points: list[Point], read: list[float]) -> str:
    """`read`: GB/s that the machine read before and after."""
    lines = [
        "| c | adapters | tokens/s | of base | TTFT, ms | between tokens, ms | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        row = point.row
        times = " | ".join(f"{1e3 * t:.1f}" for t in (row.ttft, row.itl, row.itl_p99))
        lines.append(
            f"| {row.concurrency} | {point.adapters} | {row.tokens_per_s:.1f} |"
            f" {point.of_base:.2f} | {times} |"
        )
    before, after = read
    lines += ["", f"The machine read {before:.0f} GB/s before and {after:.0f} after."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--random", choices=SHAPES, help="a model of random_model.py")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    add_sampling(parser)
    parser.add_argument("--markdown", type=Path, help="write the table between its marks here")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    options.adapters = sorted({0, *options.adapters})
    model = ensure_random_model(options.random) if options.random else ensure_demo_model()
    speeds = [machine_speed()["read_GB_per_s"]]
    with serving(model, max(options.adapters), options.threads) as lorad:
        points = run(lorad, options)
    speeds.append(machine_speed()["read_GB_per_s"])
    if options.json:
        rows = [asdict(point) for point in points]
        print(json.dumps({"model": model.name, "read_GB_per_s": speeds, "points": rows}, indent=1))
    else:
        print(table(points, speeds))
    if options.markdown:
        write_table(options.markdown, f"http {model.name}", table(points, speeds))


if __name__ == "__main__":
    main()
