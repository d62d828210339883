"""The operations lorad adds to a decoder: LoRA deltas for mixed batches, and paged attention."""

from lorad_kernels.auto import (
    captures,
    compiled_at_launch,
    finish,
    forward_pass,
    prepare,
    record,
)
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
    Draws,
    add_lora,
    add_rms_norm,
    draw_tokens,
    greedy_tokens,
    paged_attention,
    rotate_and_store,
    row_max,
    silu_mul,
    take_rows,
    write_kv,
)
from lorad_kernels.segments import SHORT_ROWS, LoraSegments, Segment, group_rows, long_rows

__all__ = [
    "FIELDS",
    "SHORT_ROWS",
    "AdapterFactors",
    "Arena",
    "AttentionBatch",
    "BaseLinear",
    "Draws",
    "FactorTable",
    "LoraFactors",
    "LoraSegments",
    "Segment",
    "add_lora",
    "add_rms_norm",
    "alignment",
    "base_linear",
    "captures",
    "compiled_at_launch",
    "draw_tokens",
    "empty_block",
    "finish",
    "forward_pass",
    "greedy_tokens",
    "group_rows",
    "long_rows",
    "pack_adapter",
    "paged_attention",
    "prepare",
    "record",
    "rotate_and_store",
    "row_max",
    "silu_mul",
    "step_tables",
    "take_rows",
    "tune_linears",
    "write_kv",
]
