"""Checks and times everything that runs on a GPU, in under four minutes, and writes a report.

    python kernels/bench/gpu_check.py --report gpu.md --json gpu.json

1. Every op against float64, over dtypes, ranks, odd widths and batch shapes, with NaN around the
   factors and in the outputs' memory, on inputs drawn anew; and bit for bit against itself in
   other batches.
2. A small decoder against the reference ops, and captured decode steps against eager ones.
3. The whole engine on random weights of a Llama-1B and a Llama-8B shape: a decode step with 0, 1,
   8 and 64 adapters, with graphs and without.

What does not fit into `--limit` seconds is left out, and the report says so. `--device cpu --tiny`
runs the same code on small shapes; with TRITON_INTERPRET=1 set and
`--triton`, through the Triton kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from decode_step import DecodeStep, random_decoder
from engine_run import check_graphs, time_engine
from fused_checks import check_fused
from lorad_kernels import (
    AttentionBatch,
    LoraFactors,
    add_lora,
    auto,
    group_rows,
    paged_attention,
    reference,
)
from prefill_checks import check_prefill
from report import UNIT, Report, only
from torch import Tensor

from lorad.model.config import ModelConfig

MODELS = {
    "1b": (2048, 16, 32, 8, 64, 8192, 128256),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
    "tiny": (64, 2, 4, 2, 16, 96, 128),
}
# What one model's measurements take at most on a device that can be had today; a guess.
_SECONDS = {"1b": 40, "8b": 90, "tiny": 0}


def check_lora(report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool) -> None:
    shapes = [(75, [37, 12, 5])] if tiny else [(4096, [4096, 1024, 1024]), (1100, [333])]
    for dtype in dtypes:
        for width, outs in shapes:
            for ranks in ([1, 3], [8, 64], [17, 512]):
                for lengths in ([1] * 5, [1, 70, 1, 2]):
                    what = f"add_lora {dtype} {width}x{outs} ranks {ranks} rows {lengths}"
                    _check_lora_case(report, what, device, dtype, width, outs, ranks, lengths)


def _check_lora_case(
    report: Report,
    what: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    outs: list[int],
    ranks: list[int],
    lengths: list[int],
) -> None:
    parts: list[Tensor] = []
    position = 0

    def place(tensor: Tensor) -> int:
        nonlocal position
        gap = torch.full((-tensor.numel() % 32 + 32,), torch.nan, dtype=dtype, device=device)
        parts.extend([tensor.flatten(), gap])
        position += tensor.numel() + gap.numel()
        return position - tensor.numel() - gap.numel()

    def draw(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device=device) * columns**-0.5).to(dtype)

    factors = [[(draw(rank, width), draw(out, rank)) for out in outs] for rank in ranks]
    table = [[LoraFactors(a.shape[0], 0.7, place(a), place(b)) for a, b in row] for row in factors]
    slab = torch.cat(parts)
    slots = [None, *range(len(ranks)), *[0] * len(lengths)][: len(lengths)]
    rows = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    starts = [sum(outs[:i]) for i in range(len(outs) + 1)]
    x = torch.randn(len(rows), width, device=device).to(dtype)
    y = torch.randn(len(rows), starts[-1], device=device).to(dtype)
    want, size = y.double(), y.double().abs()
    for s in range(len(outs)):
        columns = slice(starts[s], starts[s + 1])
        for slot, row in enumerate(factors):
            mine = torch.tensor([t for t, other in enumerate(rows) if other == slot], device=device)
            a, b = row[s][0].double(), row[s][1].double()
            xs = x[mine].double()
            want[mine, columns] += 0.7 * (xs @ a.T) @ b.T
            size[mine, columns] += 0.7 * (xs.abs() @ a.abs().T) @ b.abs().T
    got = y.clone()
    add_lora(got, x, slab, table, starts, group_rows(slots, lengths))
    error = ((got.double() - want).abs() / size.clamp(min=1e-30)).max().item()
    # `not >` would let NaN pass.
    report.check(error <= UNIT[dtype], f"{what}: relative error {error:.2g}")
    base = [t for t, slot in enumerate(rows) if slot is None]
    report.check(torch.equal(got[base], y[base]), f"{what}: base rows changed")
    last = len(rows) - 1
    alone = y[last:].clone()
    add_lora(alone, x[last:], slab, table, starts, group_rows([rows[last]], [1]))
    if lengths[-1] <= 64:
        report.check(torch.equal(alone[0], got[last]), f"{what}: other bits in a batch")


def check_attention(
    report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool
) -> None:
    heads = [(6, 2, 32)] if tiny else [(32, 8, 128), (9, 3, 64), (28, 4, 128), (5, 5, 80)]
    contexts = [1, 17, 300] if tiny else [1, 16, 257, 1000, 4095]
    for dtype in dtypes:
        for count, kv_heads, dim in heads:
            for window in (None, 100):
                for softcap in (None, 20.0):
                    what = f"attention {dtype} {count}/{kv_heads}x{dim} {window} {softcap}"
                    shape = (count, kv_heads, dim)
                    _check_attention_case(
                        report, what, device, dtype, shape, contexts, window, softcap
                    )


def _check_attention_case(
    report: Report,
    what: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    contexts: list[int],
    window: int | None,
    softcap: float | None,
) -> None:
    heads, kv_heads, dim = shape
    blocks = [-(-context // 16) for context in contexts]
    order = torch.randperm(sum(blocks)).tolist()
    slab = torch.randn(len(order), 2, 2, 16, kv_heads, dim, device=device).to(dtype)
    tables, used = [], 0
    for context, count in zip(contexts, blocks, strict=True):
        own = order[used : used + count]
        used += count
        tables.append(own + own[:1] * (max(blocks) - count))
        if context % 16:
            slab[own[-1], :, :, context % 16 :] = torch.nan
    k_cache, v_cache = slab[:, 1, 0], slab[:, 1, 1]
    q = torch.randn(len(contexts), heads, dim, device=device).to(dtype)
    zeros = torch.zeros(len(contexts), dtype=torch.int64, device=device)

    def run(first: int) -> Tensor:
        batch = AttentionBatch(
            query_starts=tuple(range(len(contexts) - first + 1)),
            context_lens=tuple(contexts[first:]),
            num_decodes=len(contexts) - first,
            block_tables=torch.tensor(tables[first:], device=device),
            context_lens_device=torch.tensor(contexts[first:], device=device),
            kv_pages=zeros,
            kv_offsets=zeros,
        )
        return paged_attention(
            q[first:], k_cache, v_cache, batch, scale=0.1, sliding_window=window, softcap=softcap
        )

    got = run(0)
    for i, context in enumerate(contexts):
        begin = max(0, context - window) if window else 0
        k, v = (
            cache[torch.tensor(tables[i], device=device)].flatten(0, 1)[begin:context].double()
            for cache in (k_cache, v_cache)
        )
        grouped = q[i].double().view(kv_heads, heads // kv_heads, dim)
        scores = 0.1 * torch.einsum("hgd,khd->hgk", grouped, k)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        want = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v).reshape(heads, dim)
        error = (got[i].double() - want).abs().max().item()
        report.check(error <= 4 * UNIT[dtype], f"{what} context {context}: error {error:.2g}")
    report.check(torch.equal(run(len(contexts) - 1)[0], got[-1]), f"{what}: other bits in a batch")


def model_config(name: str) -> ModelConfig:
    hidden, layers, heads, kv_heads, head_dim, mid, vocab = MODELS[name]
    return ModelConfig.from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": mid,
            "vocab_size": vocab,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "dtype": "bfloat16",
        }
    )


def check_decoder(report: Report, device: torch.device) -> None:
    """A small decoder in float32: the device's ops against the reference, adapters mixed."""
    decoder = random_decoder(model_config("tiny"), torch.float32, device, 64)
    step = DecodeStep.prepare(decoder, 48, 6, [1, 8, 3])
    batch = step.batch(6, 3)
    ours = decoder.forward(batch, step.kv)
    with only(reference):
        want = decoder.forward(batch, step.kv)
    error = ((ours - want).abs().max() / want.abs().max()).item()
    report.check(error < 1e-4, f"decoder against reference ops: error {error:.2g}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the kernels on a GPU.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--triton", action="store_true", help="Triton kernels on any device")
    parser.add_argument("--models", nargs="+", default=["1b", "8b"], choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each measurement")
    parser.add_argument("--limit", type=float, default=240, help="seconds")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.triton:
        from lorad_kernels import gpu

        auto._for_type = lambda _: gpu
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report = Report(name, options.limit)
    dtypes = [torch.float32, torch.float16]
    if not options.triton:  # the interpreter multiplies bfloat16 wrongly
        dtypes.append(torch.bfloat16)
    with torch.inference_mode():
        check_lora(report, device, dtypes, options.tiny)
        check_attention(report, device, dtypes, options.tiny)
        check_prefill(report, device, dtypes, options.tiny)
        check_fused(report, device, dtypes, options.tiny)
        check_decoder(report, device)
        check_graphs(report, random_decoder(model_config("tiny"), torch.float32, device, 512))
        for model in ["tiny"] if options.tiny else options.models:
            dtype = torch.float32 if options.triton else torch.bfloat16
            if report.has_time(_SECONDS[model], f"the engine on {model}"):
                decoder = random_decoder(model_config(model), dtype, device, 1024)
                time_engine(report, model, decoder, options.batch, options.steps)
    report.seconds = time.perf_counter() - report.started
    text = report.markdown()
    print(text)
    if options.report:
        options.report.write_text(text)
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
