"""The operations lorad adds to a decoder: LoRA deltas for mixed batches, and paged attention."""

from lorad_kernels.auto import captures, prepare
from lorad_kernels.factors import (
    FIELDS,
    AdapterFactors,
    FactorTable,
    LoraFactors,
    alignment,
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
from lorad_kernels.segments import SHORT_ROWS, LoraSegments, Segment, group_rows

__all__ = [
    "FIELDS",
    "SHORT_ROWS",
    "AdapterFactors",
    "AttentionBatch",
    "BaseLinear",
    "FactorTable",
    "LoraFactors",
    "LoraSegments",
    "Segment",
    "add_lora",
    "add_rms_norm",
    "alignment",
    "base_linear",
    "captures",
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
