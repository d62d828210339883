"""The operations lorad adds to a decoder: LoRA deltas for mixed batches, and paged attention."""

from lorad_kernels.ops import AttentionBatch, LoraFactors, add_lora, paged_attention, write_kv
from lorad_kernels.segments import LoraSegments, Segment, group_rows

__all__ = [
    "AttentionBatch",
    "LoraFactors",
    "LoraSegments",
    "Segment",
    "add_lora",
    "group_rows",
    "paged_attention",
    "write_kv",
]
