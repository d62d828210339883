"""The memory of one daemon: weights, scratch, and the slab that holds every page.

KV blocks and adapters live in one slab of equal pages. `loractl plan` prints what these
functions return and the daemon allocates by them, so that the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorad.errors import LoradError
from lorad.sizing.architecture import Architecture, Linear, Part
from lorad.sizing.families import llama_like
from lorad.sizing.graph_memory import (
    graph_buffer_bytes,
    graph_pool_bytes,
    graph_rows,
    shrunk_columns,
)
from lorad.sizing.model_shape import ModelShape
from lorad.sizing.prefill_memory import prefill_bytes, rotary_bytes

MIB = 1024**2

# What a CUDA process holds that no formula gives: driver context and loaded kernels, cuBLAS
# workspaces, and the recorded launches of the decode graphs. Low, reserved, high.
_CUDA_FIXED_MIB = (450, 900, 1600)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What one step on a CUDA device needs beside weights and pages, in bytes.

    The first four follow from the shapes; how much of them is alive at once does not, and
    `context` is no formula at all. So there is a low and a high end, and what is reserved.
    """

    activations: int
    logits: int
    lora: int  # the shrunk rows, float32, in the pieces they are summed from
    prefill: int  # K and V of the longest context, gathered for one layer
    rotary: int  # tables of cos and sin, made once
    graphs: int  # buffers and pool of the captured decode steps, and their scratch page
    context: tuple[int, int, int] = (
        _CUDA_FIXED_MIB[0] * MIB,
        _CUDA_FIXED_MIB[1] * MIB,
        _CUDA_FIXED_MIB[2] * MIB,
    )

    @property
    def _tensors(self) -> int:
        return self.activations + self.logits + self.lora + self.prefill

    @property
    def _lasting(self) -> int:
        return self.rotary + self.graphs

    @property
    def low(self) -> int:
        """Every tensor freed the moment it is used up."""
        return self.context[0] + self._tensors + self._lasting

    @property
    def reserved(self) -> int:
        """What the daemon sets aside: the allocator keeps half as much again."""
        return self.context[1] + self._tensors * 3 // 2 + self._lasting

    @property
    def high(self) -> int:
        return self.context[2] + self._tensors * 2 + self._lasting


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
    *,
    max_model_len: int,
    block_size: int,
) -> Scratch:
    """What one step needs beside weights and pages on a CUDA device.

    `max_rank` is the largest rank of an adapter in the step (0: none). The memory of the decode
    graphs is set aside whether they are used or not, so that a plan need not know.
    """
    arch = _architecture(shape)
    # Logits of one row per sequence: in the model's dtype, and 8 bytes for drawing. That takes more
    # for a few sequences, but never more rows than 16 at a time: the fixed part has room for those.
    return Scratch(
        activations=max_num_batched_tokens * _live_elements(arch, tp) * itemsize,
        logits=max_num_seqs * arch.vocab_size * (itemsize + 8),
        lora=max_num_batched_tokens * shrunk_columns(arch, tp) * max_rank * 4,
        prefill=prefill_bytes(
            arch, max_num_batched_tokens, max_model_len, block_size, itemsize, tp
        ),
        rotary=rotary_bytes(arch, max_model_len, itemsize),
        graphs=_graph_bytes(arch, max_num_seqs, itemsize, max_rank, tp, max_model_len, block_size),
    )


def _graph_bytes(
    arch: Architecture,
    max_num_seqs: int,
    itemsize: int,
    max_rank: int,
    tp: int,
    max_model_len: int,
    block_size: int,
) -> int:
    rows, live = graph_rows(max_num_seqs)[-1], _live_elements(arch, tp)
    buffers = graph_buffer_bytes(arch, rows, max_model_len, block_size, itemsize)
    pool = graph_pool_bytes(arch, rows, live, max_model_len, max_rank, itemsize, tp)
    return buffers + pool + page_bytes(arch, block_size, itemsize, tp)


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
