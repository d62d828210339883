"""The prefix cache in the engine: found by content, adapter and tenant, and never otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lorad.engine.messages import GenerationRequest, SamplingParams
from lorad.memory.prefix_cache import BlockChain
from lorad.server.answer import Job
from lorad.server.protocol import Options

SHARED = [(7 * i) % 250 + 3 for i in range(40)]  # two full blocks and a half
PROMPT = [*SHARED, 11, 12, 13]


@pytest.fixture(scope="module")
def adapters(tiny_model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: random_adapter(tiny_model("llama"), root / name, 8, ("q_proj", "v_proj"), seed=seed)
        for seed, name in enumerate(("a", "b"))
    }


@pytest.fixture
def engine(tiny_model, sync_engine, adapters):
    return sync_engine(tiny_model("llama"), adapters)


def ask(engine, prompt, adapter=None, *, salt="", max_tokens=12, digest=None):
    """(tokens, cached prompt tokens) of one request that runs alone."""
    ref = engine.ref(adapter) if adapter else None
    if digest is not None:
        ref = dataclasses.replace(ref, digest=digest)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.built.engine.handle(GenerationRequest("r", tuple(prompt), params, ref, salt))
    outputs = engine.run()["r"]
    assert outputs[-1].error is None, outputs[-1].error
    return [output.token_id for output in outputs], outputs[-1].cached_tokens


@pytest.fixture
def cold(tiny_model, sync_engine, adapters):
    """Tokens of a request in an engine that has seen nothing."""

    def generate(prompt, adapter=None, **options):
        return ask(sync_engine(tiny_model("llama"), adapters), prompt, adapter, **options)[0]

    return generate


def test_a_shared_beginning_is_computed_once_and_changes_no_token(engine, cold):
    other = [*SHARED, 21, 22]
    assert ask(engine, PROMPT) == (cold(PROMPT), 0)
    computed = engine.built.engine.stats().prompt_tokens
    assert ask(engine, other) == (cold(other), 32)
    stats = engine.built.engine.stats()
    assert stats.prompt_tokens - computed == len(other) - 32
    memory = stats.memory
    assert (memory.prefix_hit_tokens, memory.prefix_lookup_tokens) == (32, 43 + 42)
    assert [r.cached_tokens for r in engine.built.engine.records if r.cached_tokens] == [32]
    assert stats.kv_pages == 0
    assert stats.cached_pages > 0


def test_answers_are_found_too_when_a_conversation_goes_on(engine, cold):
    first, _ = ask(engine, PROMPT, max_tokens=30)
    turn = [*PROMPT, *first, 99]
    # The last token of an answer was never computed: 43 + 29 = 72 tokens, 4 blocks.
    assert ask(engine, turn) == (cold(turn), 64)


def test_the_last_token_of_a_prompt_is_always_computed(engine, cold):
    exact = PROMPT[:32]
    assert ask(engine, exact) == (cold(exact), 0)
    assert ask(engine, exact) == (cold(exact), 16)


def test_each_adapter_and_the_base_have_their_own(engine, cold):
    """R02: in every order each answer equals its cold run."""
    expected = {name: cold(PROMPT, name) for name in ("a", "b", None)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    for name in ("a", "b", None, "a", None, "b"):
        assert ask(engine, PROMPT, name)[0] == expected[name]
    assert ask(engine, PROMPT, "b") == (expected["b"], 32)


def test_another_version_under_the_same_name_finds_nothing(engine, cold, adapters):
    """R01: the key is the content, so a reload in place starts from nothing."""
    assert ask(engine, PROMPT, "a")[0] == cold(PROMPT, "a")
    engine.adapters["a"] = adapters["b"]  # the store serves v2 under the old name
    assert ask(engine, PROMPT, "a", digest="sha256:v2") == (cold(PROMPT, "b"), 0)


def test_tenants_share_nothing(engine):
    assert ask(engine, PROMPT, salt="one")[1] == 0
    assert ask(engine, PROMPT, salt="two")[1] == 0
    assert ask(engine, PROMPT)[1] == 0
    assert ask(engine, PROMPT, salt="one")[1] == 32


def test_a_chain_knows_where_its_parts_end():
    """Adapter and salt cannot be shifted into each other, nor tokens into other blocks."""
    roots = {
        BlockChain(adapter, salt, 2).keys([1, 2], 1)[0]
        for adapter, salt in [(None, ""), ("ab", "c"), ("a", "bc"), ("a", ""), (None, "a")]
    }
    assert len(roots) == 5
    chain = BlockChain(None, "", 2)
    assert chain.keys([1, 2, 3, 4], 2)[1] != BlockChain(None, "", 2).keys([3, 4], 1)[0]


def test_blocks_of_a_request_that_computed_nan_are_gone(engine, cold):
    """Poison the K of its first block as a broken kernel would; the next request must not see."""
    assert ask(engine, PROMPT)[1] == 0
    assert ask(engine, PROMPT)[1] == 32
    slab = engine.built.engine._slab
    pages = {block.page for block in engine.built.engine._scheduler._kv._prefixes._by_key.values()}
    for page in pages:
        start = page * slab.page_elements
        slab.data[start : start + slab.page_elements] = torch.nan
    params = SamplingParams(max_tokens=4, temperature=0.0)
    engine.built.engine.handle(GenerationRequest("bad", tuple(PROMPT), params))
    (output,) = engine.run()["bad"]
    assert output.error.code == "engine.nonfinite_logits"
    assert ask(engine, PROMPT) == (cold(PROMPT), 0)


def test_a_preempted_sequence_finds_its_own_blocks_again(tiny_model, sync_engine, cold):
    page = 16 * 2 * 2 * 32 * 4  # tokens x (K, V) x layers x kv width x float32
    engine = sync_engine(tiny_model("llama"), {}, max_model_len=160, slab_bytes=16 * page)
    rows = [([i + 3] * 20, None) for i in range(4)]
    assert engine.generate(rows, max_tokens=70) == [
        cold(prompt, max_tokens=70) for prompt, _ in rows
    ]
    stats = engine.built.engine.stats()
    assert stats.memory.preemptions > 0
    rows_computed = sum(sum(r.rows.values()) for r in engine.built.engine.records)
    needed = 4 * (20 + 69)
    assert rows_computed < needed + stats.memory.preemptions * 60
    assert stats.free_pages + stats.cached_pages == 16


def test_the_server_gives_the_salt_and_counts_what_was_found():
    """Two prompts with two answers each: what one of the answers computed was not all cached."""
    options = Options("m", None, 2, False, False, None, SamplingParams(4), ())
    job = Job("j", options, None, ((1,) * 50, (2,) * 40), (4, 4), "acme")
    assert {request.cache_salt for request in job.requests()} == {"acme"}
    usage = job.usage([4, 3, 2, 1], [48, 32, 0, 32])
    assert usage == {
        "prompt_tokens": 90,
        "completion_tokens": 10,
        "total_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    open_to_all = Job("j", options, None, ((1,),), (4,), None)
    assert {request.cache_salt for request in open_to_all.requests()} == {""}
