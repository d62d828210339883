"""Greedy tokens equal transformers + PEFT: each adapter alone, and all rows in one mixed batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NEW_TOKENS = 16
CASES = {
    f"{kind}-r{rank}": (rank, targets)
    for kind, targets in (("attn", ATTENTION), ("mlp", MLP), ("all", ATTENTION + MLP))
    for rank in (1, 8, 64)
}


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Of different lengths, some longer than a page and than the sliding window."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 17, 40, 16, 25, 7, 33, 12, 5, 21]
    return [
        torch.randint(3, vocab, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(count)
    ]


def greedy(model, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """The oracle: transformers' own generation, end-of-text switched off."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def oracle(model_dir: Path, adapters: dict[str, Path], rows, new_tokens: int = NEW_TOKENS):
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = {i: greedy(base, prompt, new_tokens) for i, (prompt, a) in enumerate(rows) if not a}
    model = None
    for name, path in adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(base, path, adapter_name=name).eval()
        else:
            model.load_adapter(path, adapter_name=name)
        model.set_adapter(name)
        for i, (prompt, adapter) in enumerate(rows):
            if adapter == name:
                answers[i] = greedy(model, prompt, new_tokens)
    return [answers[i] for i in range(len(rows))]


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"])
def test_tiny_models_alone_and_mixed(family, tiny_model, random_adapter, sync_engine, tmp_path):
    model_dir = tiny_model(family)
    adapters = {
        name: random_adapter(model_dir, tmp_path / name, rank, targets, seed=seed)
        for seed, (name, (rank, targets)) in enumerate(CASES.items())
    }
    names = [*adapters, None, None]
    rows = list(zip(prompts(len(names), 256), names, strict=True))
    expected = oracle(model_dir, adapters, rows)
    engine = sync_engine(model_dir, adapters)

    assert engine.generate(rows) == expected  # adapters join as their loads end
    assert engine.generate(rows) == expected  # all resident: one batch from the first step on
    steps = [record.rows for record in engine.built.engine.records]
    assert any(len(step) == len(CASES) + 1 for step in steps), "never all in one batch"
    assert [engine.generate([row])[0] for row in rows] == expected

    base_answers = oracle(model_dir, {}, [(prompt, None) for prompt, _ in rows])
    changed = sum(a != b for a, b in zip(expected, base_answers, strict=True))
    assert changed >= len(CASES) - 1, "the adapters hardly change anything: the test is blind"


def test_demo_model_with_its_adapters(demo_model, sync_engine):
    examples = Path(__file__).resolve().parent.parent / "examples/adapters"
    adapters = {path.name: path for path in sorted(examples.iterdir()) if path.is_dir()}
    assert set(adapters) == {"json", "pirate-v1", "pirate-v2"}
    # Real words: " the quick brown ..." would do, but ids spread over the vocabulary test more.
    names = [*adapters, None]
    rows = [(prompt, name) for name in names for prompt in prompts(2, 49000, seed=len(name or ""))]
    expected = oracle(demo_model, adapters, rows, new_tokens=24)
    engine = sync_engine(demo_model, adapters, dtype="float32", slab_bytes=2**28, max_model_len=512)
    assert engine.generate(rows, max_tokens=24) == expected
    assert [engine.generate([row], max_tokens=24)[0] for row in rows] == expected


def test_chunked_prefill_and_preemption_change_nothing(
    tiny_model, random_adapter, sync_engine, tmp_path
):
    """A tiny step budget cuts prompts into chunks; a tiny slab forces recomputation."""
    model_dir = tiny_model("llama")
    adapters = {"a": random_adapter(model_dir, tmp_path / "a", 4, ("q_proj", "down_proj"))}
    rows = [(prompt, "a" if i % 2 else None) for i, prompt in enumerate(prompts(8, 256, seed=3))]
    expected = oracle(model_dir, adapters, rows, new_tokens=40)
    page = 16 * 2 * 2 * 32 * 4  # tokens x (K, V) x layers x kv width x float32
    engine = sync_engine(
        model_dir, adapters, max_num_batched_tokens=16, max_model_len=96, slab_bytes=12 * page
    )
    assert engine.generate(rows, max_tokens=40) == expected
    computed = sum(sum(record.rows.values()) for record in engine.built.engine.records)
    needed = sum(len(prompt) + 40 - 1 for prompt, _ in rows)
    assert computed > needed, "nothing was preempted: the slab of the test is too large"
