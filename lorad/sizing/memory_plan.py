"""The memory of one daemon: weights, scratch, and the slab that holds every page.

KV blocks and adapters live in one slab of equal pages. `loractl plan` prints what these
functions return and the daemon allocates by them, so that the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorad.errors import LoradError
from lorad.sizing.architecture import Architecture, Linear, Part
from lorad.sizing.families import llama_like
from lorad.sizing.model_shape import ModelShape

MIB = 1024**2

# What a CUDA process holds that no formula gives: driver context and loaded kernels, cuBLAS
# and split-K workspaces, and the pool of the captured decode graphs. Low, reserved, high.
_CUDA_FIXED_MIB = (450, 900, 1600)


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that no formula gives exactly: `low` to `high`, `best` is what is reserved."""

    low: int
    best: int
    high: int


def page_bytes(
    shape: ModelShape | Architecture, block_size: int, kv_itemsize: int, tp: int = 1
) -> int:
    """Bytes of one page: K and V of `block_size` tokens over all layers, on one GPU."""
    elements = shape.kv_elements_per_token if tp == 1 else _architecture(shape).kv_elements(tp)
    return block_size * elements * kv_itemsize


def pages_for(nbytes: int, page_nbytes: int) -> int:
    """Pages that `nbytes` occupy; an adapter always starts on a page of its own."""
    return -(-nbytes // page_nbytes)


def plan_slab(budget_bytes: int, page_nbytes: int) -> int:
    """Whole pages that fit into the budget; raises `memory.no_capacity` if not one does."""
    pages = max(0, budget_bytes) // page_nbytes
    if not pages:
        raise LoradError(
            "memory.no_capacity",
            f"{budget_bytes} bytes are left for pages, and one page takes {page_nbytes}",
            hint="give the slab more memory, or choose a smaller model, dtype or block size",
            details={"budget_bytes": budget_bytes, "page_bytes": page_nbytes},
        )
    return pages


def weight_elements(shape: ModelShape) -> int:
    """Parameters of the base model. Exact for Llama, Mistral, Qwen2 and Qwen3.

    A tied `lm_head` is the embedding itself and counts once.
    """
    return llama_like(shape).elements


def weight_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of the base model's parameters at `itemsize` bytes each."""
    return weight_elements(shape) * itemsize


def device_slab_bytes(
    total_bytes: int, gpu_memory_utilization: float, weights: int, scratch: int
) -> int:
    """Bytes left for the slab on a CUDA device; negative when the model does not fit."""
    return int(total_bytes * gpu_memory_utilization) - weights - scratch


def scratch_bytes(
    shape: ModelShape | Architecture,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    itemsize: int,
    max_rank: int,
    tp: int = 1,
) -> Interval:
    """What one step needs beside weights and pages on a CUDA device, and what to reserve.

    `max_rank` is the largest rank of an adapter in the step (0: none). The low end counts the
    tensors alive at once; the high end adds an allocator that keeps twice as many.
    """
    arch = _architecture(shape)
    tokens = max_num_batched_tokens
    step = tokens * _live_elements(arch, tp) * itemsize
    # Logits of one row per sequence: in the model's dtype, and twice in float32 for sampling.
    logits = max_num_seqs * arch.vocab_size * (itemsize + 8)
    lora = tokens * 3 * max_rank * 4  # the shrunk rows of q|k|v, float32
    low, fixed, high = (part * MIB for part in _CUDA_FIXED_MIB)
    exact = step + logits + lora
    return Interval(low + exact, fixed + exact * 3 // 2, high + exact * 2)


def _architecture(shape: ModelShape | Architecture) -> Architecture:
    return llama_like(shape) if isinstance(shape, ModelShape) else shape


def _live_elements(arch: Architecture, tp: int) -> int:
    """Elements alive per token inside one layer: the residual, its norm, the widest part."""
    widest = max(
        max(_outputs(group.linears, Part.ATTENTION, tp), _mlp_outputs(group.linears, arch, tp))
        for group in arch.groups
    )
    return 2 * arch.hidden_size + widest


def _outputs(linears: tuple[Linear, ...], part: Part, tp: int) -> int:
    return sum(x.out_per_gpu(tp) for x in linears if x.part is part)


def _mlp_outputs(linears: tuple[Linear, ...], arch: Architecture, tp: int) -> int:
    routed = arch.experts_per_token * _outputs(linears, Part.EXPERT, tp)
    return _outputs(linears, Part.MLP, tp) + routed
