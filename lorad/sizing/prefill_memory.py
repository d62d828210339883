"""Device memory of prefill attention beside the rows themselves, and of the rotary tables.

Attention of a prompt takes one sequence and one layer at a time. It gathers K and V of the whole
context from their pages; layers with a window need less, which is not counted on, as a
`ModelShape` does not know them.
"""

from __future__ import annotations

from lorad.sizing.architecture import Architecture, LayerGroup, Part, Split

# `MASKED_ROWS` of lorad_kernels.gpu_prefill: rows that share a mask in float32.
MASKED_ROWS = 256

_FLOAT32 = 4
_MASK_BYTES = 1 + 2 * _FLOAT32  # of a row and key: a bool, a float, and a copy of aligned width


def prefill_bytes(
    arch: Architecture,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    itemsize: int,
    tp: int = 1,
) -> int:
    """Bytes at the longest context. Exact for 16 bits on a GPU with FlashAttention.

    In float32 K and V are repeated for all query heads, and there is a mask.
    """
    gathered = -(-max_model_len // block_size) * block_size
    most = max(
        gathered * _kv_elements(group, tp) + max_model_len * _repeated(group, itemsize, tp)
        for group in arch.groups
    )
    rows = min(MASKED_ROWS, max_num_batched_tokens) if itemsize == _FLOAT32 else 0
    return most * itemsize + rows * max_model_len * _MASK_BYTES


def rotary_bytes(arch: Architecture, max_model_len: int, itemsize: int) -> int:
    """Tables of cos and sin, each `[max_model_len, head_dim]`."""
    return max_model_len * max(group.kv_head_elements for group in arch.groups) * itemsize


def _kv_elements(group: LayerGroup, tp: int) -> int:
    """K and V of one token in one layer."""
    return group.kv_head_elements * -(-group.kv_heads // tp)


def _repeated(group: LayerGroup, itemsize: int, tp: int) -> int:
    """K and V of one token at every query head, where that is a copy."""
    heads = 2 * max(
        (
            linear.in_per_gpu(tp)
            for linear in group.linears
            if linear.part is Part.ATTENTION and linear.split is Split.ROW
        ),
        default=0,
    )
    return heads if itemsize == _FLOAT32 and heads > _kv_elements(group, tp) else 0
