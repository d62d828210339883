"""The operations lorad adds to a decoder: LoRA deltas for mixed batches, and paged attention."""

from lorad_kernels.auto import prepare
from lorad_kernels.factors import (
    AdapterFactors,
    FactorTable,
    LoraFactors,
    pack_adapter,
    step_tables,
)
from lorad_kernels.linear import BaseLinear, base_linear, tune_linears
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
    "AttentionBatch",
    "BaseLinear",
    "FactorTable",
    "LoraFactors",
    "LoraSegments",
    "Segment",
    "add_lora",
    "add_rms_norm",
    "base_linear",
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
