"""The operations lorad adds to a decoder: LoRA deltas for mixed batches, and paged attention."""

from lorad_kernels.auto import captures, finish, forward_pass, prepare
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
from lorad_kernels.segments import SHORT_ROWS, LoraSegments, Segment, group_rows

__all__ = [
    "FIELDS",
    "SHORT_ROWS",
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
    "alignment",
    "base_linear",
    "captures",
    "empty_block",
    "finish",
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
