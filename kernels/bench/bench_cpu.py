"""Time of a step on the CPU: batch x distinct adapters, against the bytes it must read.

    python kernels/bench/bench_cpu.py --model ~/.cache/lorad/models/SmolLM2-135M-Instruct
    python kernels/bench/bench_cpu.py --model ... --rows 128 --context 128   # whole prompts

Each case is one forward pass of `--rows` new tokens per sequence, at the end of a context of
`--context` tokens, and the choice of the greedy token. Adapters are random, on all linear layers,
their ranks cycling through `--ranks`. Cases are measured in turns, so that a slow spell of the
machine meets all of them, and the least time counts. The floor is the bytes of the weights, the
K and V and the used adapters, each once, at the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from decode_step import DecodeStep
from lorad_kernels import record

from lorad.model.config import ModelConfig
from lorad.model.forward_batch import ForwardBatch
from lorad.model.loader import load_decoder
from lorad.sizing.model_shape import read_config


@dataclass(frozen=True)
class Case:
    """One point of the table; milliseconds are the least of all turns."""

    batch: int
    adapters: int
    milliseconds: float
    megabytes: float
    floor_milliseconds: float

    @property
    def share(self) -> float:
        """Of the measured bandwidth."""
        return self.floor_milliseconds / self.milliseconds


def read_bandwidth() -> float:
    """Bytes a second of summing 256 MiB, the best of five."""
    data = torch.ones(2**26)
    return data.nbytes / min(_seconds(lambda: data.sum()) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    """On a busy machine, one thread's own CPU time says more than the clock on the wall."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


@torch.inference_mode()
def measure(bench: DecodeStep, points: list[tuple[int, int]], rows: int, turns: int) -> list[Case]:
    steps = [_again(bench, bench.batch(size, adapters, rows)) for size, adapters in points]
    least = [float("inf")] * len(points)
    bandwidth = 0.0
    for turn in range(turns + 1):  # the first one compiles and warms up
        bandwidth = max(bandwidth, read_bandwidth())
        for i, step in enumerate(steps):
            seconds = _seconds(step)
            least[i] = least[i] if turn == 0 else min(least[i], seconds)
    return [
        Case(
            size,
            adapters,
            seconds * 1e3,
            bench.bytes_read(size, adapters) / 1e6,
            bench.bytes_read(size, adapters) / bandwidth * 1e3,
        )
        for (size, adapters), seconds in zip(points, least, strict=True)
    ]


def _again(bench: DecodeStep, batch: ForwardBatch) -> Callable[[], object]:
    """The step as the engine repeats it: recorded, if it is kernels of our own alone."""
    step = partial(bench.run, batch)
    recorded = record(step)
    return step if recorded is None else recorded[0]


def table(cases: list[Case]) -> str:
    base = {case.batch: case.milliseconds for case in cases if not case.adapters}
    lines = [
        "| batch | adapters | step ms | of base speed | MB read | floor ms | share of bandwidth |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {case.batch} | {case.adapters} | {case.milliseconds:.2f} |"
        f" {base[case.batch] / case.milliseconds:.2f} | {case.megabytes:.0f} |"
        f" {case.floor_milliseconds:.2f} | {case.share:.0%} |"
        for case in cases
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1, help="new tokens of each sequence")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    points = [(b, a) for b in options.batches for a in options.adapters if a <= b]
    ranks = [options.ranks[i % len(options.ranks)] for i in range(max(options.adapters))]
    dtype = getattr(torch, options.dtype)
    decoder = load_decoder(
        options.model,
        ModelConfig.from_config(read_config(options.model)),
        dtype=dtype,
        device=torch.device("cpu"),
        max_positions=options.context,
    )
    bench = DecodeStep.prepare(decoder, options.context, max(options.batches), ranks)
    cases = measure(bench, points, options.rows, options.turns)
    where = f"context {options.context}, {options.rows} new tokens each"
    print(f"threads {torch.get_num_threads()}, {options.dtype}, {where}")
    print(table(cases))
    if options.json:
        rows = [asdict(case) for case in cases]
        result = {
            "threads": torch.get_num_threads(),
            "context": options.context,
            "rows": options.rows,
            "cases": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
