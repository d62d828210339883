"""Time of a decode step on the CPU: batch x distinct adapters, against the bytes it must read.

    python kernels/bench/bench_cpu.py --model ~/.cache/lorad/models/SmolLM2-135M-Instruct

Each case is one forward pass of one row per sequence over a context of `--context` tokens, and
the choice of the greedy token. Adapters are random, on all linear layers, their ranks cycling
through `--ranks`. Cases are measured in turns, so that a slow spell of the machine meets all of
them, and the least time counts. The floor is the bytes of the weights, the K and V and the used
adapters, each once, at the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from lorad_kernels import (
    AdapterFactors,
    AttentionBatch,
    LoraFactors,
    group_rows,
    pack_adapter,
    row_max,
    step_tables,
)

from lorad.memory.slab import Slab
from lorad.model.config import ModelConfig
from lorad.model.decoder import Decoder, KVCacheViews
from lorad.model.forward_batch import ForwardBatch, LoraBatch
from lorad.model.loader import load_decoder
from lorad.sizing.adapter_size import pack_adapter as lay_out
from lorad.sizing.adapter_size import uniform_modules
from lorad.sizing.memory_plan import page_bytes
from lorad.sizing.model_shape import ModelShape, read_config

BLOCK = 16
# On a busy machine, one thread's own CPU time says more than the clock on the wall.
CLOCK = time.thread_time if "--threads=1" in sys.argv else time.perf_counter


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


@dataclass(frozen=True)
class Bench:
    decoder: Decoder
    slab: Slab
    kv: KVCacheViews
    adapters: list[AdapterFactors]
    adapter_bytes: list[int]
    context: int

    def batch(self, size: int, adapters: int) -> ForwardBatch:
        blocks = -(-self.context // BLOCK)
        pages = torch.arange(self.slab.num_pages - size * blocks, self.slab.num_pages)
        tables = pages.view(size, blocks)
        position = self.context - 1
        attention = AttentionBatch(
            query_starts=tuple(range(size + 1)),
            context_lens=(self.context,) * size,
            num_decodes=size,
            block_tables=tables,
            context_lens_device=torch.full((size,), self.context),
            kv_pages=tables[:, position // BLOCK].contiguous(),
            kv_offsets=torch.full((size,), position % BLOCK),
        )
        lora = None
        if adapters:
            slots = sorted(row % adapters for row in range(size))
            used = self.adapters[:adapters]
            tables_ = step_tables(used, [pack_adapter(a) for a in used], torch.device("cpu"))
            lora = LoraBatch(self.slab.data, tables_, group_rows(slots, [1] * size))
        vocab = self.decoder.config.shape.vocab_size
        return ForwardBatch(
            token_ids=torch.arange(size) * 977 % vocab,
            positions=torch.full((size,), position),
            attention=attention,
            logits_rows=torch.arange(size),
            lora=lora,
        )

    def bytes_read(self, size: int, adapters: int) -> int:
        shape = self.decoder.config.shape
        weights = sum(
            projection.in_features * projection.out_features for projection in shape.projections
        )
        elements = weights * shape.num_layers + shape.vocab_size * shape.hidden_size
        elements += size * self.context * shape.kv_elements_per_token
        return elements * self.slab.data.element_size() + sum(self.adapter_bytes[:adapters])


def random_adapters(
    shape: ModelShape, slab: Slab, ranks: Sequence[int]
) -> tuple[list[AdapterFactors], list[int]]:
    """Adapters packed from the slab's start on, as the device tier packs them."""
    adapters: list[AdapterFactors] = []
    sizes, start = [], 0
    for rank in ranks:
        layout = lay_out(
            shape, uniform_modules(shape, tuple(shape.linears), rank), slab.data.element_size()
        )
        adapters.append(
            tuple(
                tuple(
                    tuple(
                        LoraFactors(s.rank, s.scaling, start + s.a_offset, start + s.b_offset)
                        for s in projection
                    )
                    for projection in layer
                )
                for layer in layout.slices
            )
        )
        sizes.append(layout.nbytes)
        start += -(-layout.nbytes // slab.page_bytes) * slab.page_elements
    return adapters, sizes


def prepare(model: Path, dtype: torch.dtype, context: int, batch: int, ranks: list[int]) -> Bench:
    config = ModelConfig.from_config(read_config(model))
    shape = config.shape
    decoder = load_decoder(
        model, config, dtype=dtype, device=torch.device("cpu"), max_positions=context
    )
    page = page_bytes(shape, BLOCK, dtype.itemsize)
    layouts = [
        lay_out(shape, uniform_modules(shape, tuple(shape.linears), rank), dtype.itemsize)
        for rank in ranks
    ]
    pages = sum(-(-layout.nbytes // page) for layout in layouts) + batch * -(-context // BLOCK)
    slab = Slab.allocate(shape, pages, BLOCK, dtype, torch.device("cpu"))
    for part in slab.data.split(2**24):
        part.normal_(std=0.02)
    adapters, sizes = random_adapters(shape, slab, ranks)
    return Bench(decoder, slab, KVCacheViews(*slab.kv_views(shape)), adapters, sizes, context)


def read_bandwidth() -> float:
    """Bytes a second of summing 256 MiB, the best of five."""
    data = torch.ones(2**26)
    return data.nbytes / min(_seconds(lambda: data.sum()) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    start = CLOCK()
    work()
    return CLOCK() - start


@torch.inference_mode()
def measure(bench: Bench, points: list[tuple[int, int]], turns: int) -> list[Case]:
    batches = [bench.batch(size, adapters) for size, adapters in points]

    def step(batch: ForwardBatch) -> None:
        row_max(bench.decoder.forward(batch, bench.kv))

    least = [float("inf")] * len(points)
    bandwidth = 0.0
    for turn in range(turns + 1):  # the first one compiles and warms up
        bandwidth = max(bandwidth, read_bandwidth())
        for i, batch in enumerate(batches):
            seconds = _seconds(lambda batch=batch: step(batch))  # type: ignore[misc]
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
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    points = [(b, a) for b in options.batches for a in options.adapters if a <= b]
    ranks = [options.ranks[i % len(options.ranks)] for i in range(max(options.adapters))]
    dtype = getattr(torch, options.dtype)
    bench = prepare(options.model, dtype, options.context, max(options.batches), ranks)
    cases = measure(bench, points, options.turns)
    print(f"threads {torch.get_num_threads()}, {options.dtype}, context {options.context}")
    print(table(cases))
    if options.json:
        rows = [asdict(case) for case in cases]
        result = {"threads": torch.get_num_threads(), "context": options.context, "cases": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
