"""Time of choosing the tokens of a batch, against torch one row at a time.

    python kernels/bench/bench_sampling.py [--device cuda] [--json out.json]

The peer does what samplers of small servers do: softmax, for top-p a sort, and `torch.multinomial`
of each row. Times are the least of several turns, in milliseconds for the whole batch, with the
tokens copied to the host.
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
from lorad_kernels import Draws, draw_tokens
from torch import Tensor

CASES = {
    "temperature 1": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_k": 0, "top_p": 0.9},
    "temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50, "top_p": 1.0},
}


@dataclass(frozen=True)
class Result:
    """Milliseconds for all rows."""

    case: str
    vocabulary: int
    rows: int
    ours: float
    torch: float


def _ours(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[int]:
    rows, double = len(logits), torch.float64
    draws = Draws(
        torch.full((rows,), temperature, dtype=double),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=double),
        torch.zeros(rows, dtype=double),
        torch.rand(rows, dtype=double),
    )
    tokens: list[int] = draw_tokens(logits, draws).tolist()
    return tokens


def _by_row(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[int]:
    return [_one(row, temperature, top_k, top_p) for row in logits]


def _one(row: Tensor, temperature: float, top_k: int, top_p: float) -> int:
    probabilities = (row.float() / temperature).softmax(-1)
    if top_k:
        least = probabilities.topk(top_k).values[-1]
        probabilities = probabilities.where(probabilities >= least, 0)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        probabilities[order[ordered.cumsum(-1) - ordered >= top_p]] = 0
    return int(torch.multinomial(probabilities, 1))


def _milliseconds(work: Callable[[], object], turns: int) -> float:
    times = []
    for _ in range(turns + 1):  # the first one warms up
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1e3


@torch.inference_mode()
def measure(device: str, vocabularies: list[int], rows: int, turns: int) -> list[Result]:
    results = []
    for vocabulary in vocabularies:
        logits = (torch.randn(rows, vocabulary, device=device) * 3).to(torch.bfloat16)
        for name, case in CASES.items():
            times = [_milliseconds(partial(run, logits, **case), turns) for run in (_ours, _by_row)]
            results.append(Result(name, vocabulary, rows, *times))
    return results


def table(results: list[Result]) -> str:
    lines = [
        "| vocabulary | rows | case | ours, ms | torch, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.vocabulary:,} | {r.rows} | {r.case} | {r.ours:.2f} | {r.torch:.1f} |"
        f" {r.torch / r.ours:.0f}x |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = measure(options.device, options.vocabularies, options.rows, options.turns)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
