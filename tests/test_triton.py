"""The Triton kernels without a GPU: run by its interpreter, and compiled to machine code."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lorad.sizing import graph_memory

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parent
CASES = [str(TESTS / f"triton_{name}_cases.py") for name in ("interpreter", "fused")]


def test_kernels_are_right_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


def compile_script() -> ModuleType:
    path = TESTS.parent / "kernels/bench/compile_triton.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_planned_scratch_is_that_of_the_kernels():
    """`lorad.sizing` may not import what it counts."""
    from lorad_kernels import triton_attention, triton_lora

    assert graph_memory.SPLIT == triton_attention.SPLIT
    assert graph_memory.MAX_SPLITS == triton_attention.MAX_SPLITS
    assert graph_memory.SPLIT_WIDTH == triton_lora.SPLIT_WIDTH


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_variant_compiles_and_none_spills(capability):
    script = compile_script()
    spilled = {}
    for variant in script.variants():
        usage = script.compile_variant(variant, capability)
        assert usage.registers > 0
        if usage.stack:
            spilled[variant.name, variant.dtype] = usage
    assert not spilled
