"""Time of one projection's LoRA deltas: popularity x rank x batch x shape.

    python kernels/bench/bench_lora.py [--device cuda] [--json out.json]

A decode batch: one row per sequence, whose adapters are all the same (identical), drawn evenly
or by Zipf's law with exponent 1.5 from as many adapters as rows, or all different (distinct).
Compared with the reference, with a dense loop (two matmuls of the serving dtype per adapter and
slice), and with a device copy of the bytes of the used factors, which is the floor. A copy writes
what it has read, and so moves twice those bytes: deltas, which only read them, may be faster. Each
time is the least of several passes over enough copies of the factors that no cache holds them; on
CUDA a pass is a captured graph, so that launches cost nothing on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from lorad_kernels import FactorTable, LoraFactors, LoraSegments, group_rows, reference
from lorad_kernels.auto import implementation
from torch import Tensor

# Name -> (width of the input, widths of the slices).
SHAPES = {
    "llama-8b qkv": (4096, (4096, 1024, 1024)),
    "llama-8b o": (4096, (4096,)),
    "llama-8b gate_up": (4096, (14336, 14336)),
    "llama-8b down": (14336, (4096,)),
    "smollm2 qkv": (576, (576, 192, 192)),
    "smollm2 gate_up": (576, (1536, 1536)),
    "tiny": (48, (40, 24)),
}
RANKS = {"8": [8], "16": [16], "64": [64], "mixed": [8, 16, 32, 64]}
POPULARITY = ("identical", "uniform", "zipf-1.5", "distinct")
# Factors of all copies together, so that passes read memory and not a cache.
SPREAD_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
# An H200's second cache holds 60 MB: of the smallest factors here (43 KB) that takes 1400 copies.
MOST_COPIES = {"cuda": 2048, "cpu": 64}


@dataclass(frozen=True)
class Result:
    """Microseconds for one projection. `bytes` are those of the used factors."""

    shape: str
    popularity: str
    rank: str
    batch: int
    adapters: int
    bytes: int
    ours: float
    reference: float
    dense_loop: float
    copy: float


@dataclass(frozen=True)
class Problem:
    """One projection's batch over several copies of its factors."""

    x: Tensor
    y: Tensor
    slab: Tensor
    tables: list[FactorTable]
    starts: tuple[int, ...]
    segments: LoraSegments
    used_bytes: int


def draw_slots(popularity: str, batch: int, generator: torch.Generator) -> list[int]:
    """The adapter of each row, sorted, numbered without gaps."""
    if popularity == "identical":
        drawn = [0] * batch
    elif popularity == "distinct":
        drawn = list(range(batch))
    else:
        exponent = 0.0 if popularity == "uniform" else 1.5
        weights = torch.arange(1, batch + 1, dtype=torch.float64) ** -exponent
        drawn = torch.multinomial(weights, batch, True, generator=generator).tolist()
    numbers = {slot: i for i, slot in enumerate(sorted(set(drawn)))}
    return sorted(numbers[slot] for slot in drawn)


def make_problem(
    shape: str, popularity: str, ranks: Sequence[int], batch: int, device: torch.device
) -> Problem:
    width, outs = SHAPES[shape]
    dtype = torch.bfloat16
    slots = draw_slots(popularity, batch, torch.Generator().manual_seed(batch))
    starts = (0, *accumulate(outs))
    used = [ranks[i % len(ranks)] for i in range(slots[-1] + 1)]
    elements = sum(rank * (width * len(outs) + sum(outs)) for rank in used)
    spread = SPREAD_BYTES[device.type] // (elements * dtype.itemsize)
    copies = max(1, min(MOST_COPIES[device.type], spread))
    slab = torch.empty(copies * elements, dtype=dtype, device=device).normal_(std=0.02)
    tables, position = [], 0
    for _ in range(copies):
        rows = []
        for rank in used:
            row = []
            for out in outs:
                row.append(LoraFactors(rank, 1.0, position, position + rank * width))
                position += rank * (width + out)
            rows.append(row)
        tables.append(FactorTable.of(rows))
    x = torch.randn(batch, width, dtype=dtype, device=device)
    y = torch.zeros(batch, starts[-1], dtype=dtype, device=device)
    segments = group_rows(slots, [1] * batch)
    return Problem(x, y, slab, tables, starts, segments, elements * dtype.itemsize)


def dense_loop(problem: Problem, table: FactorTable) -> None:
    x, slab = problem.x, problem.slab
    for segment in problem.segments.segments:
        rows = slice(segment.start, segment.end)
        for (start, end), f in zip(pairwise(problem.starts), table[segment.slot], strict=False):
            a = slab[f.a_offset :][: f.rank * x.shape[1]].view(f.rank, -1)
            b = slab[f.b_offset :][: (end - start) * f.rank].view(-1, f.rank)
            problem.y[rows, start:end].addmm_(x[rows] @ a.T, b.T, alpha=f.scaling)


def best_seconds(work: Callable[[FactorTable], None], problem: Problem, passes: int) -> float:
    """Of one call, from whole passes over all copies of the factors."""

    def one_pass() -> None:
        for table in problem.tables:
            work(table)

    one_pass()
    runs = passes
    if problem.x.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_pass()
        seconds = min(_timed_cuda(graph.replay) for _ in range(runs))
    else:
        seconds = min(_timed(one_pass) for _ in range(runs))
    return seconds / len(problem.tables)


def _timed(work: Callable[[], None]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def _timed_cuda(work: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(
    shape: str, popularity: str, rank: str, batch: int, device: torch.device, passes: int
) -> Result:
    problem = make_problem(shape, popularity, RANKS[rank], batch, device)
    ours = implementation(device)
    target = torch.empty(problem.used_bytes // 2, dtype=torch.bfloat16, device=device)
    places = {id(table): i for i, table in enumerate(problem.tables)}

    def add(add_lora: Callable[..., None], table: FactorTable) -> None:
        add_lora(problem.y, problem.x, problem.slab, table, problem.starts, problem.segments)

    def copy(table: FactorTable) -> None:
        start = places[id(table)] * target.numel()
        target.copy_(problem.slab[start : start + target.numel()])

    works: dict[str, Callable[[FactorTable], None]] = {
        "ours": partial(add, ours.add_lora),
        "reference": partial(add, reference.add_lora),
        "dense_loop": partial(dense_loop, problem),
        "copy": copy,
    }
    times = {name: best_seconds(work, problem, passes) * 1e6 for name, work in works.items()}
    adapters = len(problem.tables[0])
    return Result(shape, popularity, rank, batch, adapters, problem.used_bytes, **times)


def table(results: Sequence[Result]) -> str:
    lines = [
        "| shape | popularity | rank | batch | adapters | ours us | GB/s | reference us |"
        " dense loop us | copy us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.shape} | {r.popularity} | {r.rank} | {r.batch} | {r.adapters} | {r.ours:.1f} |"
        f" {r.bytes / r.ours / 1e3:.1f} | {r.reference:.1f} | {r.dense_loop:.1f} | {r.copy:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time LoRA deltas of one projection.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", default=["llama-8b qkv", "smollm2 qkv"])
    parser.add_argument("--popularity", nargs="+", default=POPULARITY, choices=POPULARITY)
    parser.add_argument("--ranks", nargs="+", default=list(RANKS), choices=list(RANKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with torch.inference_mode():
        results = [
            measure(shape, kind, rank, batch, torch.device(options.device), options.passes)
            for shape in options.shapes
            for rank in options.ranks
            for batch in options.batches
            for kind in options.popularity
        ]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
