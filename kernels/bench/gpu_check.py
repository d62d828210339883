"""Checks and times everything that runs on a GPU, in under four minutes, and writes a report.

    python kernels/bench/gpu_check.py --report gpu.md --json gpu.json

1. Every op against float64, over dtypes, ranks, odd widths and batch shapes, with NaN around the
   factors and in the outputs' memory, on inputs drawn anew; and bit for bit against itself in
   other batches.
2. A small decoder: decodes and prefills with adapters against the reference ops; steps with an
   adapter that arrives, or has moved, against steps with all in its place; captured decode steps
   against eager ones; the probe of a promotion against the factors.
3. The whole engine on random weights of a Llama-1B and a Llama-8B shape: a decode step with 0, 1,
   8 and 64 adapters, with graphs and without.

The report is written after each section, with its seconds; a section that raises has failed, and
the next ones go on unless the device is lost. What does not fit into `--limit` seconds is left out,
and the report says so. `--device cpu --tiny` runs the same code on small shapes; with
TRITON_INTERPRET=1 set and `--triton`, through the Triton kernels.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from attention_checks import check_attention, check_prefill_attention, check_prefill_memory
from decode_step import random_decoder
from draw_checks import check_drawing
from engine_run import check_graphs, time_engine
from fused_checks import check_fused
from lorad_kernels import LoraFactors, add_lora, auto, group_rows
from report import UNIT, Report
from step_checks import check_decoder, check_memory, check_prefills, check_probe
from torch import Tensor

from lorad.model.config import ModelConfig
from lorad.model.decoder import Decoder

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


def _check(report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool) -> None:
    for name, check in (
        ("LoRA", check_lora),
        ("decode attention", check_attention),
        ("prefill attention", check_prefill_attention),
        ("what lies between", check_fused),
    ):
        report.section(name, partial(check, report, device, dtypes, tiny))

    def decoder(dtype: torch.dtype) -> Decoder:
        return random_decoder(model_config("tiny"), dtype, device, 512)

    for name, check_steps in (
        ("decoder", check_decoder),
        ("prefills with adapters", check_prefills),
        ("arriving and moving", check_memory),
        ("captured steps", check_graphs),
    ):
        report.section(name, lambda check=check_steps: check(report, decoder(torch.float32)))
    report.section("drawing", partial(check_drawing, report, device))
    if device.type == "cuda":
        report.section("memory of a prefill", partial(check_prefill_memory, report, device))
    for dtype in dtypes:
        report.section(f"probe, {dtype}", lambda dtype=dtype: check_probe(report, decoder(dtype)))


def _time(
    report: Report,
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    decoder = random_decoder(model_config(model), dtype, device, 1024)
    time_engine(report, model, decoder, options.batch, options.steps)


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
    report = Report(name, options.limit, options.report, options.json)
    dtypes = [torch.float32, torch.float16]
    if not options.triton:  # the interpreter multiplies bfloat16 wrongly
        dtypes.append(torch.bfloat16)
    with torch.inference_mode():
        _check(report, device, dtypes, options.tiny)
        for model in ["tiny"] if options.tiny else options.models:
            dtype = torch.float32 if options.triton else torch.bfloat16
            time_model = partial(_time, report, model, dtype, device, options)
            report.section(f"the engine on {model}", time_model, _SECONDS[model])
    report.write()
    print(report.markdown())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
