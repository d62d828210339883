"""Triton compiles at an engine's start what serving launches, and nothing later.

Here nothing is launched: Triton's own code says for what it would compile a kernel.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from lorad_kernels import auto

from lorad.engine import build, model_runner

triton = pytest.importorskip("triton")
gpu = importlib.import_module("lorad_kernels.gpu")

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def compiled(monkeypatch) -> set[tuple[str, str]]:
    """Kernels by name and specialisation, as they are launched on what passes for a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    backend, found = make_backend(GPUTarget("cuda", 90, 32)), set()

    def run(kernel, *args, grid, warmup, **named):
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialisation, options = binder(*args, **named)
        found.add((kernel.fn.__name__, f"{specialisation} {options}"))

    def greedy(logits):  # nothing has been computed: any token, but one that there is
        gpu.row_max(logits)
        return torch.zeros(len(logits), dtype=torch.int64)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(gpu, "greedy_tokens", greedy)
    monkeypatch.setattr(auto, "_for_type", lambda _: gpu)
    monkeypatch.setattr(model_runner, "long_rows", lambda *_: 64)
    monkeypatch.setattr(build, "compiled_at_launch", lambda _: True)
    monkeypatch.setattr(build, "_capture", lambda *_: None)  # as without CUDA graphs
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_serving_launches_what_the_start_has_compiled(
    family, tiny_model, random_adapter, tmp_path, sync_engine, compiled
):
    """Steps of one row and of 16, ranks 1 to 48, short and long prompts, two splits; probes."""
    model = tiny_model(family)
    targets = {1: LINEARS, 3: ("q_proj", "down_proj"), 16: LINEARS, 48: ("v_proj", "gate_proj")}
    adapters = {
        f"r{rank}": random_adapter(model, tmp_path / str(rank), rank, names, seed=rank)
        for rank, names in targets.items()
    }
    engine = sync_engine(model, adapters, max_num_seqs=17, max_model_len=512)
    at_start = set(compiled)
    names = {name for name, _ in at_start}
    assert {"shrink_kernel", "expand_kernel", "decode_kernel", "combine_kernel"} <= names
    engine.generate([([5, 6, 7], None)], max_tokens=3)
    for name in adapters:
        engine.generate([([5], name), ([6] * 90, name), ([7] * 5, None)], max_tokens=3)
    rows = [([i + 5] * (i * 20 + 1), [None, *adapters][i % 5]) for i in range(17)]
    engine.generate(rows, max_tokens=20)
    engine.generate([([9] * (16 * 16 + 9), "r16")], max_tokens=4)
    runner, tiers = engine.built.engine._runner, engine.built.engine._adapters
    resident = [tiers.get(engine.ref(name).digest) for name in adapters]
    for adapter in resident:
        runner.probe(adapter.factors, range(5, 24))
    assert compiled == at_start


def test_gpu_code_is_compiled_as_it_is_launched(monkeypatch):
    """compile_triton takes for multiples of 16 nothing that varies between steps."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "kernels/bench")
    script = importlib.import_module("compile_triton")
    varying = {
        param.name
        for variant in script.variants()
        for param in variant.kernel.params
        if param.do_not_specialize
    }
    assert {"num_rows", "max_rank", "rank_blocks", "pieces", "splits", "table_stride"} == varying
    assert varying.isdisjoint(script.DIVISIBLE)
