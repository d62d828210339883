"""Compiles every variant of the Triton kernels to GPU code, without a GPU.

    python kernels/bench/compile_triton.py [--markdown docs/benchmarks.md]

Prints, per variant and compute capability, registers per thread, shared memory, and the bytes
each thread keeps on its stack, where spilled registers go. With --markdown, the table replaces
what stands between the two marks in that file.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from lorad_kernels import triton_attention, triton_fused, triton_lora
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# As at run time: these sizes and strides of real models divide by 16. What varies between steps
# is not specialised, neither here nor there (`do_not_specialize` of the kernels).
DIVISIBLE = ("width", "x_stride", "y_stride", "dim")
BEGIN, END = "<!-- triton variants: begin -->", "<!-- triton variants: end -->"


@dataclass(frozen=True)
class Variant:
    """One kernel with its element type and constants, as the launchers choose them."""

    name: str
    dtype: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, object]
    floats: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Usage:
    """What one compiled variant takes. Bytes; `stack` is per thread and holds spills."""

    registers: int
    shared: int
    stack: int


def variants() -> Iterator[Variant]:
    for dtype, torch_dtype in DTYPES.items():
        for name, tiles in (("BGMV", triton_lora.BGMV), ("SGMV", triton_lora.SGMV)):
            yield _shrink(name, tiles, dtype)
            yield _expand(name, tiles, dtype, torch_dtype)
        for dim in (64, 128):
            yield _decode(dtype, torch_dtype, dim)
            yield _combine(dtype, dim)
        yield from _fused(dtype)


def _shrink(name: str, tiles: triton_lora.Tiles, dtype: str) -> Variant:
    return Variant(
        f"{name} shrink",
        dtype,
        triton_lora.shrink_kernel,
        {"x": dtype, "slab": dtype, "table": "i64", "tiles": "i64", "partial": "fp32"},
        {
            "SPLIT": triton_lora.SPLIT_WIDTH,
            "ROWS": tiles.rows,
            "WIDTH": tiles.width,
            "RANKS": tiles.ranks,
            "PRECISION": "ieee",
            "ALIGN": 16,
        },
        warps=tiles.warps,
        stages=tiles.shrink_stages,
    )


def _expand(name: str, tiles: triton_lora.Tiles, dtype: str, torch_dtype: torch.dtype) -> Variant:
    return Variant(
        f"{name} expand",
        dtype,
        triton_lora.expand_kernel,
        {"y": dtype, "slab": dtype, "table": "i64", "tiles": "i64", "partial": "fp32"},
        {
            "ROWS": tiles.rows,
            "RANKS": tiles.ranks,
            "COLUMNS": triton_lora.expand_columns(torch_dtype, tiles),
            "PRECISION": triton_lora.expand_precision(torch_dtype, tiles),
            "ALIGN": 16,
        },
        warps=tiles.warps,
        stages=triton_lora.EXPAND_STAGES,
    )


def _decode(dtype: str, torch_dtype: torch.dtype, dim: int) -> Variant:
    return Variant(
        f"decode attention, head {dim}",
        dtype,
        triton_attention.decode_kernel,
        {
            "q": dtype,
            "keys": dtype,
            "values": dtype,
            "tables": "i64",
            "contexts": "i64",
            "partial": "fp32",
            "limits": "fp32",
        },
        {
            "BLOCK": 16,
            "SPLIT": triton_attention.SPLIT,
            "MAX_SPLITS": triton_attention.MAX_SPLITS,
            "KEYS": triton_attention.KEYS,
            "GROUP": triton_attention.LEAST_GROUP,
            "DIM": dim,
            "SOFTCAP": 0.0,
            "PRECISION": "ieee",
        },
        floats=("scale",),
        warps=triton_attention.warps(torch_dtype),
        stages=triton_attention.STAGES,
    )


def _combine(dtype: str, dim: int) -> Variant:
    return Variant(
        f"combine splits, head {dim}",
        dtype,
        triton_attention.combine_kernel,
        {"partial": "fp32", "limits": "fp32", "contexts": "i64", "out": dtype},
        {
            "SPLIT": triton_attention.SPLIT,
            "MAX_SPLITS": triton_attention.MAX_SPLITS,
            "DIM": dim,
        },
        warps=1,
        stages=3,
    )


def _fused(dtype: str) -> Iterator[Variant]:
    for width in (1024, 8192):
        yield Variant(
            f"add and norm, width {width}",
            dtype,
            triton_fused.add_norm_kernel,
            {"x": "fp32", "delta": dtype, "weight": "fp32", "out": dtype},
            {"HAS_DELTA": True, "WIDTH": width},
            floats=("eps",),
            warps=triton_fused.norm_warps(width),
            stages=3,
        )
    yield Variant(
        "SiLU times up",
        dtype,
        triton_fused.silu_mul_kernel,
        {"gate_up": dtype, "out": dtype},
        {"BLOCK": triton_fused.SILU_BLOCK},
        stages=3,
    )
    rows = dict.fromkeys(("q", "k", "v", "cos", "sin", "keys", "values", "out"), dtype)
    yield Variant(
        "rotate and store, head 128",
        dtype,
        triton_fused.rotate_store_kernel,
        {**rows, "pages": "i64", "offsets": "i64"},
        {"HALF": 64},
        warps=1,
        stages=3,
    )
    yield Variant(
        "greatest of a block",
        dtype,
        triton_fused.block_max_kernel,
        {"x": dtype, "tops": "fp32", "places": "i32"},
        {"BLOCK": triton_fused.MAX_BLOCK},
        warps=8,
        stages=3,
    )
    if dtype == "fp32":
        yield Variant(
            "greatest of the blocks",
            dtype,
            triton_fused.row_max_kernel,
            {"tops": "fp32", "places": "i32", "values": "fp32", "indices": "i64"},
            {"BLOCKS": 32},
            warps=1,
            stages=3,
        )


def compile_variant(variant: Variant, capability: int) -> Usage:
    """Down to machine code by the ptxas that comes with Triton; raises what that raises."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in variant.pointers:
            signature[name] = f"*{variant.pointers[name]}"
        elif name in variant.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "fp32" if name in variant.floats else "i32"
        if name in variant.pointers or name in DIVISIBLE:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _usage(compiled.asm["cubin"], int(compiled.metadata.shared))


def _usage(cubin: bytes, shared: int) -> Usage:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None:
        raise RuntimeError(f"{tool} printed no resource usage: {text!r}")
    return Usage(int(registers[1]), shared, int(stack[1]))


def table() -> str:
    head = " | ".join(f"sm_{capability}" for capability in CAPABILITIES)
    lines = [f"| kernel | type | {head} |", "|---|---" + "|---" * len(CAPABILITIES) + "|"]
    for variant in variants():
        cells = []
        for capability in CAPABILITIES:
            usage = compile_variant(variant, capability)
            cells.append(f"{usage.registers} / {usage.shared} / {usage.stack}")
        lines.append(f"| {variant.name} | {variant.dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    text = (
        f"Triton {triton.__version__}. Registers per thread / bytes of shared memory per program"
        f" / bytes of stack per thread (spilled registers would be there).\n\n{table()}"
    )
    print(text)
    if options.markdown:
        page = options.markdown.read_text()
        before, rest = page.split(BEGIN)
        after = rest.split(END)[1]
        options.markdown.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
