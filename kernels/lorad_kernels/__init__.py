"""The operations lorad adds to a decoder: LoRA deltas for mixed batches, and paged attention."""

from lorad_kernels.auto import forward_pass, prepare
from lorad_kernels.factors import (
    AdapterFactors,
    FactorTable,
    LoraFactors,
    pack_adapter,
    step_tables,
)
from lorad_kernels.linear import BaseLinear, base_linear, tune_linears
from lorad_kernels.memory import Arena, empty_block
from lorad_kernels.ops import (
    AttentionBatch,
    add_lora,
    add_rms_norm,
    paged_attention,
    rotate_and_store,
    row_max,
    silu_mul,
    write_kv,
)
from lorad_kernels.segments import LoraSegments, Segment, group_rows

__all__ = [
    "AdapterFactors",
    "Arena",
    "AttentionBatch",
    "BaseLinear",
    "FactorTable",
    "LoraFactors",
    "LoraSegments",
    "Segment",
    "add_lora",
    "add_rms_norm",
    "base_linear",
    "empty_block",
    "forward_pass",
    "group_rows",
    "pack_adapter",
    "paged_attention",
    "prepare",
    "rotate_and_store",
    "row_max",
    "silu_mul",
    "step_tables",
    "tune_linears",
    "write_kv",
]
