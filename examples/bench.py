"""`make bench`: output tokens a second of lorad over HTTP, and of PEFT on the same prompts.

Both run on SmolLM2-135M-Instruct, or a model of random_model.py, in bfloat16 with the same threads,
one after the other in one run, between two readings of the machine's speed: figures of different
runs do not compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from demo_model import ensure_demo_model
from openai import AsyncOpenAI
from random_model import SHAPES, ensure_random_model
from rich.console import Console
from rich.table import Table

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS = [8, 16, 32, 64, 8, 16, 32, 64]
CASES = {"base only": 0, "one adapter": 1, "eight adapters": 8}
PORT = 8472
HERE = Path(__file__).resolve().parent
NOTES = Console(stderr=True)


def make_adapters(model: Path, directory: Path) -> list[Path]:
    """Random adapters on all linears, ranks 8 to 64: speed does not depend on their values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    paths = []
    for i, rank in enumerate(RANKS):
        torch.manual_seed(i)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=LINEARS)
        peft_model = get_peft_model(base, config, autocast_adapter_dtype=False)
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.01)
        paths.append(directory / f"bench-{i}")
        peft_model.save_pretrained(paths[-1])
    return paths


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random, so that no two cases share a prefix: a prefix cache would skip the prefill."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 40000, (count, length), generator=generator).tolist()


# --- lorad --------------------------------------------------------------------------------


class Lorad:
    """A daemon of its own, with every adapter live."""

    def __init__(self, model: Path, adapters: list[Path], directory: Path, threads: int) -> None:
        self.socket = directory / "lorad.sock"
        self._run(
            "lorad.main",
            "start",
            *("--model", str(model), "--name", model.name, "--port", str(PORT), "--detach"),
            *("--dtype", "bfloat16", "--threads", str(threads), "--slab-bytes", "2GiB"),
            *("--registry", str(directory / "registry"), "--log-file", str(directory / "log")),
        )
        try:
            for path in adapters:
                self._run("loractl.main", "push", path.name, str(path))
                self._run("loractl.main", "promote", path.name)
        except subprocess.CalledProcessError:
            self.stop()
            raise
        self.base = model.name
        self.names = [path.name for path in adapters]

    def stop(self) -> None:
        self._run("lorad.main", "stop")

    def _run(self, module: str, *words: str) -> None:
        command = [sys.executable, "-m", module, *words, "--socket", str(self.socket)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def measure(self, adapters: int, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        models = self.names[:adapters] or [self.base]
        return asyncio.run(self._measure(models, prompts, new_tokens))

    async def _measure(
        self, models: list[str], prompts: list[list[int]], new_tokens: int
    ) -> dict[str, float]:
        first: list[float] = []

        async def one(i: int) -> int:
            begin = time.perf_counter()
            stream = await client.completions.create(
                model=models[i % len(models)],
                prompt=prompts[i],
                max_tokens=new_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
                stream_options={"include_usage": True},
            )
            count, seen = 0, False
            async for chunk in stream:
                if not seen:
                    first.append(time.perf_counter() - begin)
                    seen = True
                if chunk.usage is not None:
                    count = chunk.usage.completion_tokens
            return count

        url = f"http://127.0.0.1:{PORT}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
            begin = time.perf_counter()
            counts = await asyncio.gather(*(one(i) for i in range(len(prompts))))
            seconds = time.perf_counter() - begin
        if sum(counts) != len(prompts) * new_tokens:
            raise RuntimeError(f"asked for {new_tokens} tokens each, got {counts}")
        return {"tokens_per_s": sum(counts) / seconds, "ttft_p50_s": statistics.median(first)}


# --- PEFT ---------------------------------------------------------------------------------


class Peft:
    """transformers and PEFT: `generate(adapter_names=...)` on one static batch, no server."""

    def __init__(self, model: Path, adapters: list[Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.names = [path.name for path in adapters]
        self.model = PeftModel.from_pretrained(
            base, adapters[0], adapter_name=self.names[0], autocast_adapter_dtype=False
        )
        for path in adapters[1:]:
            self.model.load_adapter(path, adapter_name=path.name, autocast_adapter_dtype=False)
        self.model.eval()

    @torch.inference_mode()
    def measure(self, adapters: int, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        names = self.names[:adapters] or ["__base__"]
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=[names[i % len(names)] for i in range(len(prompts))],
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - begin
        return {"tokens_per_s": (out.shape[1] - ids.shape[1]) * len(prompts) / seconds}


# --- the run ------------------------------------------------------------------------------


def machine_speed() -> dict[str, float]:
    """GB/s of reading 256 MiB, and GFLOP/s of a bf16 matmul: shows whether the machine drifted."""
    block = torch.ones(2**26)
    a, b = torch.randn(512, 2048).bfloat16(), torch.randn(4096, 2048).bfloat16()
    return {
        "read_GB_per_s": block.numel() * 4 / _best(lambda: block.sum()) / 1e9,
        "bf16_GFLOP_per_s": 2 * 512 * 2048 * 4096 / _best(lambda: a @ b.T) / 1e9,
    }


def _best(work: Callable[[], Any], rounds: int = 8) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    model = ensure_random_model(arguments.random) if arguments.random else ensure_demo_model()
    directory = Path(tempfile.mkdtemp(prefix="lorad-bench-"))
    try:
        NOTES.print("making eight random adapters")
        adapters = make_adapters(model, directory)
        before = machine_speed()
        lorad = Lorad(model, adapters, directory, arguments.threads)
        try:
            rows = _all_cases("lorad, over HTTP", lorad.measure, arguments)
        finally:
            lorad.stop()
        rows += _all_cases("PEFT generate()", Peft(model, adapters).measure, arguments)
        return {
            "schema": "lorad/bench/v1",
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {arguments.threads} threads",
            "model": f"{model.name}, bfloat16",
            "adapters": {"ranks": RANKS, "targets": LINEARS},
            "prompt_tokens": arguments.prompt_tokens,
            "new_tokens": arguments.new_tokens,
            "speed_before": before,
            "speed_after": machine_speed(),
            "rows": rows,
        }
    finally:
        shutil.rmtree(directory)


def _all_cases(
    system: str,
    measure: Callable[[int, list[list[int]], int], dict[str, float]],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    rows = []
    for case in arguments.cases:
        adapters = CASES[case]
        for concurrency in arguments.concurrency:
            length, seed = arguments.prompt_tokens, 100 * adapters + concurrency
            # Warm with other prompts: adapters resident, kernels chosen, nothing in the cache.
            measure(adapters, make_prompts(concurrency, length, seed + 10_000), 4)
            prompts = make_prompts(concurrency, length, seed)
            NOTES.print(f"{system}: {case}, concurrency {concurrency}")
            found = measure(adapters, prompts, arguments.new_tokens)
            rows.append({"system": system, "case": case, "concurrency": concurrency, **found})
    return rows


def show(report: dict[str, Any], console: Console) -> None:
    levels = sorted({row["concurrency"] for row in report["rows"]})
    cases = list(dict.fromkeys(row["case"] for row in report["rows"]))
    table = Table(title=f"output tokens/s, {report['model']}, {report['machine']}")
    table.add_column("system")
    table.add_column("case")
    for level in levels:
        table.add_column(f"c={level}", justify="right")
    found = {(r["system"], r["case"], r["concurrency"]): r["tokens_per_s"] for r in report["rows"]}
    for system in dict.fromkeys(row["system"] for row in report["rows"]):
        for case in cases:
            cells = [f"{found[system, case, level]:.1f}" for level in levels]
            table.add_row(system, case, *cells)
    for case in cases:
        systems = list(dict.fromkeys(row["system"] for row in report["rows"]))
        cells = [
            f"{found[systems[0], case, level] / found[systems[1], case, level]:.2f}x"
            for level in levels
        ]
        table.add_row("lorad / PEFT", case, *cells, style="bold")
    console.print(table)
    for when in ("before", "after"):
        speeds = ", ".join(f"{v:.0f} {k}" for k, v in report[f"speed_{when}"].items())
        console.print(f"machine {when}: {speeds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", choices=SHAPES, help="a model of random_model.py")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, help="write the JSON here as well")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    report = run(arguments)
    text = json.dumps(report, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if arguments.json:
        print(text)
    else:
        show(report, Console())


if __name__ == "__main__":
    main()
