"""What vLLM and SGLang reserve for adapters, from their classes' own buffer shapes.

Both allocate a fixed number of equal slots at start, for the largest rank and (vLLM) for every
linear of the model, whatever adapters come. Read from vLLM 0.33.0 (`lora/layers/`,
`lora/model_manager.py`, `config/lora.py`, the `embedding_modules` of the model classes) and
SGLang 0.5.23 (`srt/lora/mem_pool.py`, `srt/lora/utils.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lorad.sizing.architecture import Architecture, Linear, Part, Split

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
VLLM_VERSION, SGLANG_VERSION = "0.33.0", "0.5.23"
_VLLM_MAX_VOCAB = 258_048  # above it vLLM refuses LoRA on the logits

# Whether the vLLM model class lists embed_tokens and lm_head among its LoRA modules.
_VLLM_EMBEDDINGS = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "phi3", "granite"), True),
    **dict.fromkeys(("qwen2", "qwen2_moe", "gemma", "gemma2", "gemma3", "gemma3_text"), False),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), False),
}


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one engine sets aside on one GPU. `low` and `high` differ where a class is unknown."""

    engine: str
    version: str
    slots: int
    rank: int  # after rounding up to what the engine allows
    linears: int  # bytes
    experts: int
    embeddings_low: int
    embeddings_high: int

    @property
    def low(self) -> int:
        return self.linears + self.experts + self.embeddings_low

    @property
    def high(self) -> int:
        return self.linears + self.experts + self.embeddings_high

    @property
    def per_slot(self) -> int:
        return self.high // self.slots


def vllm_rank(rank: int) -> int | None:
    """The smallest `max_lora_rank` vLLM accepts for this rank; None above 512."""
    return next((allowed for allowed in VLLM_RANKS if allowed >= rank), None)


def vllm_reservation(
    arch: Architecture,
    slots: int,
    rank: int,
    itemsize: int,
    tp: int = 1,
    fully_sharded: bool = False,
) -> Reservation | None:
    """Bytes per GPU of `slots` = `max_loras`; None where vLLM refuses the rank."""
    bucket = vllm_rank(rank)
    if bucket is None:
        return None
    scale = slots * itemsize

    def total(parts: tuple[Part, ...]) -> int:
        chosen = [(n, x) for n, x in arch.linears() if x.part in parts]
        return scale * _slot_elements(chosen, bucket, tp, fully_sharded)

    declared = _VLLM_EMBEDDINGS.get(arch.model_type)
    embeddings = scale * 2 * bucket * (arch.vocab_size + arch.hidden_size)
    if arch.vocab_size > _VLLM_MAX_VOCAB:
        declared = False
    return Reservation(
        "vllm",
        VLLM_VERSION,
        slots,
        bucket,
        linears=total((Part.ATTENTION, Part.MLP, Part.ROUTER)),
        experts=total((Part.EXPERT,)),
        embeddings_low=embeddings if declared else 0,
        embeddings_high=0 if declared is False else embeddings,
    )


def _slot_elements(
    linears: Iterable[tuple[int, Linear]], rank: int, tp: int, fully_sharded: bool = False
) -> int:
    return sum(
        layers * linear.copies * _factors(linear, rank, tp, fully_sharded)
        for layers, linear in linears
    )


def _factors(linear: Linear, rank: int, tp: int, fully_sharded: bool) -> int:
    """Elements of A and B of one linear on one GPU.

    Without `fully_sharded`, tensor parallelism divides only the factor that follows the base
    weight's own split: B of a column-parallel linear, A of a row-parallel one.
    """
    divided = -(-rank // tp) if fully_sharded else rank
    if linear.split is Split.COLUMN:
        return divided * linear.in_features + rank * linear.out_per_gpu(tp)
    if linear.split is Split.ROW:
        out = -(-linear.out_features // tp) if fully_sharded else linear.out_features
        return rank * linear.in_per_gpu(tp) + rank * out
    return rank * (linear.in_features + linear.out_features)


# SGLang stacks these in one buffer: a target in a stack brings the whole stack.
_SGLANG_STACKS = {
    "q_proj": ("q_proj", "k_proj", "v_proj"),
    "k_proj": ("q_proj", "k_proj", "v_proj"),
    "v_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_proj": ("gate_proj", "up_proj"),
    "up_proj": ("gate_proj", "up_proj"),
    "gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj"),
}
_SGLANG_STACKED = {"qkv_proj": 3, "gate_up_proj": 2}


def sglang_reservation(
    arch: Architecture,
    slots: int,
    rank: int,
    leaves: Iterable[str],
    itemsize: int,
    tp: int = 1,
) -> Reservation | None:
    """Bytes per GPU of `slots` = `max_loras_per_batch` for the union of the targets.

    A base-only request takes a slot too. None for latent attention, whose buffers differ.
    """
    if arch.attention == "MLA":
        return None
    wanted = {name for leaf in leaves for name in _SGLANG_STACKS.get(leaf, (leaf,))}
    chosen = [
        (n, x)
        for n, x in arch.linears()
        if x.leaf in wanted and x.part in (Part.ATTENTION, Part.MLP)
    ]
    elements = _slot_elements(chosen, rank, tp) + sum(
        layers * (_SGLANG_STACKED.get(x.leaf, 1) - 1) * rank * x.in_features for layers, x in chosen
    )
    experts = [(n, x) for n, x in arch.linears() if x.part is Part.EXPERT and x.leaf in wanted]
    scale = slots * itemsize
    return Reservation(
        "sglang",
        SGLANG_VERSION,
        slots,
        rank,
        linears=scale * elements,
        experts=scale * _slot_elements(experts, rank, tp),
        embeddings_low=0,
        embeddings_high=0,
    )
