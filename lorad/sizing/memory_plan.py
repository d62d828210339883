"""The memory of one daemon: weights, pages, and the slab that holds every page.

KV blocks and adapters live in one slab of equal pages. `loractl plan` prints what these
functions return and the daemon allocates by them, so that the two cannot differ.
"""

from __future__ import annotations

from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape


def page_bytes(shape: ModelShape, block_size: int, kv_itemsize: int) -> int:
    """Bytes of one page: K and V of `block_size` tokens over all layers."""
    return block_size * shape.kv_elements_per_token * kv_itemsize


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
    embedding = shape.vocab_size * shape.hidden_size
    head = 0 if shape.tie_word_embeddings else embedding
    return embedding + shape.num_layers * _layer_elements(shape) + shape.hidden_size + head


def weight_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of the base model's parameters at `itemsize` bytes each."""
    return weight_elements(shape) * itemsize


def _layer_elements(shape: ModelShape) -> int:
    matrices = sum(rows * columns for rows, columns in shape.linears.values())
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    return matrices + norms + _bias_elements(shape)


def _bias_elements(shape: ModelShape) -> int:
    return sum(shape.linears[leaf][0] for leaf in shape.biased_leaves)
