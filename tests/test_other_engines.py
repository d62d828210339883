"""What vLLM and SGLang reserve, against values computed from their own classes."""

from __future__ import annotations

import pytest

from lorad.sizing.catalogue import find_model, known_models
from lorad.sizing.families import architecture
from lorad.sizing.fleet import kind_of_rank
from lorad.sizing.other_engines import (
    VLLM_RANKS,
    sglang_reservation,
    vllm_rank,
    vllm_reservation,
)
from lorad.sizing.targets import resolve_targets

GIB, MIB = 2**30, 2**20
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def arch_of(name):
    return architecture(find_model(name).config)


@pytest.mark.parametrize(
    ("rank", "total_gib", "embeddings_gib"), [(16, 0.69, 0.06), (64, 2.75, 0.25)]
)
def test_vllm_eight_slots_of_llama_8b(rank, total_gib, embeddings_gib):
    found = vllm_reservation(arch_of("llama-3.1-8b"), 8, rank, 2)
    assert round(found.high / GIB, 2) == total_gib
    assert found.low == found.high
    assert round(found.embeddings_high / GIB, 2) == embeddings_gib


def test_vllm_slots_of_llama_8b_in_bytes():
    arch = arch_of("llama-3.1-8b")
    assert vllm_reservation(arch, 8, 64, 2).linears == 2_684_354_560
    assert round(vllm_reservation(arch, 1, 16, 2).per_slot / MIB) == 88


@pytest.mark.parametrize(("tp", "gib"), [(1, 12.6), (8, 5.6)])
def test_vllm_llama_70b_is_not_divided_by_eight(tp, gib):
    found = vllm_reservation(arch_of("llama-3.1-70b"), 8, 64, 2, tp)
    assert round(found.high / GIB, 1) == gib


def test_vllm_fully_sharded_divides_almost_everything():
    arch = arch_of("llama-3.1-70b")
    whole = vllm_reservation(arch, 8, 64, 2).linears
    assert vllm_reservation(arch, 8, 64, 2, 8, fully_sharded=True).linears == whole // 8
    assert vllm_reservation(arch, 8, 64, 2, 8).linears > whole // 3


def test_vllm_experts_of_qwen3_moe():
    found = vllm_reservation(arch_of("qwen3-30b-a3b"), 1, 16, 2)
    assert round(found.experts / GIB, 2) == 1.55


def test_vllm_qkv_heads_are_repeated_beyond_their_number():
    """Eight KV heads on 16 GPUs: k and v keep one head each, so their B stops shrinking."""
    arch = arch_of("llama-3.1-70b")
    eight, sixteen = (vllm_reservation(arch, 1, 16, 2, tp).linears for tp in (8, 16))
    rank, layers, itemsize = 16, 80, 2
    halved = 8192 // 8 + 2 * 28672 // 8 + 8192 // 8 + 28672 // 8  # q, gate, up; o and down's A
    assert eight - sixteen == layers * itemsize * rank * halved // 2


@pytest.mark.parametrize(
    ("rank", "bucket"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (24, 32), (65, 128), (257, 320), (512, 512), (513, None)],
)
def test_vllm_rank_buckets(rank, bucket):
    assert vllm_rank(rank) == bucket


def test_vllm_refuses_what_it_cannot_hold():
    assert vllm_reservation(arch_of("llama-3.1-8b"), 8, 600, 2) is None


def test_embeddings_follow_the_model_class():
    """Llama and its subclass Phi-3 declare them, Qwen2 and Gemma do not, SmolLM3 is unknown."""
    for name, low, high in [
        ("llama-3.1-8b", True, True),
        ("phi-4", True, True),
        ("qwen2.5-7b", False, False),
        ("gemma-2-9b", False, False),
        ("smollm3-3b", False, True),
    ]:
        found = vllm_reservation(arch_of(name), 1, 16, 2)
        assert (found.embeddings_low > 0, found.embeddings_high > 0) == (low, high), name


@pytest.mark.parametrize("rank", VLLM_RANKS)
def test_vllm_slot_without_embeddings_is_an_all_linear_adapter(rank):
    """On a dense model a slot holds just what an adapter of the full rank on all linears does."""
    arch = arch_of("qwen2.5-7b")
    kind = kind_of_rank(arch, resolve_targets("all-linear", arch), rank)
    assert vllm_reservation(arch, 1, rank, 2).high == kind.nbytes(2)


def test_every_known_model_can_be_compared():
    for model in known_models():
        found = vllm_reservation(architecture(model.config), 4, 16, 2, 2)
        assert 0 < found.low <= found.high, model.name


def test_sglang_takes_the_union_of_targets_with_their_stacks():
    arch = arch_of("llama-3.1-8b")
    everything = sglang_reservation(arch, 8, 16, SEVEN, 2)
    assert everything.high == 8 * 83_886_080
    qkv = kind_of_rank(arch, resolve_targets("qkv", arch), 16).nbytes(2)
    # One of q, k and v brings the other two, at the rank as it is: no buckets.
    assert sglang_reservation(arch, 1, 16, ("q_proj",), 2).high == qkv
    assert sglang_reservation(arch, 1, 24, ("v_proj",), 2).high == qkv * 24 // 16


def test_sglang_stacks_a_for_fused_checkpoints_too():
    arch = arch_of("phi-4")
    linears = {linear.leaf: linear for _, linear in arch.linears()}
    qkv = linears["qkv_proj"]
    expected = 40 * 16 * (3 * qkv.in_features + qkv.out_features) * 2
    assert sglang_reservation(arch, 1, 16, ("qkv_proj",), 2).high == expected


def test_sglang_experts_only_when_targeted():
    arch = arch_of("mixtral-8x7b")
    attention = sglang_reservation(arch, 1, 16, ("q_proj", "o_proj"), 2)
    assert attention.experts == 0
    moe = sglang_reservation(arch, 1, 16, ("q_proj", "down_proj"), 2)
    assert moe.experts == 32 * 8 * 16 * (14336 + 4096) * 2


def test_sglang_sizes_experts_the_same_for_every_form_of_an_adapter():
    arch = arch_of("qwen3-30b-a3b")
    forms = ("attn,experts", "attn,experts-3d", "attn,experts-merged")
    kinds = [kind_of_rank(arch, resolve_targets(form, arch), 16) for form in forms]
    assert len({sglang_reservation(arch, 2, 16, kind.leaves, 2).high for kind in kinds}) == 1


def test_sglang_does_not_guess_at_latent_attention():
    assert sglang_reservation(arch_of("deepseek-v3"), 8, 16, ("o_proj",), 2) is None
