"""The fused Triton kernels against float64, and decode steps with fixed grids, by the interpreter.

Run by test_triton.py, like triton_interpreter_cases.py.
"""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, below

from lorad_kernels import AttentionBatch, LoraFactors, auto, gpu, group_rows, triton_fused

from lorad.engine.decode_graphs import DecodeGraphs, as_it_is
from lorad.engine.eager_steps import EagerSteps
from lorad.engine.step_inputs import StepInputs
from lorad.memory.slab import Slab
from lorad.model.config import ModelConfig

DTYPES = [torch.float32, torch.float16]
# One rounding to the type, and what float32 does before it: relative to the result's parts.
UNIT = {torch.float32: 1e-6, torch.float16: 2**-11 + 1e-6}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 960, 1536, 5])
def test_add_and_norm(width, dtype):
    """Error: 1e-6 of the result, and one rounding to the serving dtype."""
    stream, delta = 50 * torch.randn(4, width), torch.randn(4, width).to(dtype)
    weight = torch.randn(width)
    x = stream.clone()
    out = triton_fused.add_rms_norm(x, delta, weight, 1e-5, dtype)
    assert torch.equal(x, stream + delta)
    exact = x.double()
    want = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert ((out.double() - want).abs() <= UNIT[dtype] * want.abs() + 1e-7).all()
    alone = triton_fused.add_rms_norm(stream[2:3].clone(), delta[2:3], weight, 1e-5, dtype)
    assert torch.equal(alone[0], out[2])
    before = x.clone()
    assert torch.equal(triton_fused.add_rms_norm(x, None, weight, 1e-5, dtype), out)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 1536, 3])
def test_silu_times_up(width, dtype):
    """Error: one rounding of the result, and 1e-6 of it."""
    gate_up = (8 * torch.randn(3, 2 * width)).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0
    out = triton_fused.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    # The last term: halves below 6e-5 are not normal, and float32 flushes below 1e-38.
    least = 1e-37 if dtype is torch.float32 else 2**-25
    assert ((out.double() - want).abs() <= 2 * UNIT[dtype] * want.abs() + least).all()
    assert torch.equal(triton_fused.silu_mul(gate_up[2:])[0], out[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (2, 2, 128), (2, 1, 12)])
def test_rotate_and_store(heads, kv_heads, dim, dtype):
    """Error: one rounding of the result, and 1e-6 of the products that are added."""
    rows = 3
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.randn(rows, dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slab = torch.full((5, 2, 2, 4, kv_heads, dim), torch.nan, dtype=dtype)
    keys, values = slab[:, 1, 0], slab[:, 1, 1]
    batch = places([4, 0, 4], [1, 3, 2])
    out = triton_fused.rotate_and_store(q, k, v, cos, sin, keys, values, batch)

    def turned(x):
        first, second = x.double().chunk(2, -1)
        other = torch.cat([-second, first], -1)
        c, s = cos[:, None].double(), sin[:, None].double()
        return x.double() * c + other * s, (x.double() * c).abs() + (other * s).abs()

    for got, source in ((out, q), (keys[batch.kv_pages, batch.kv_offsets], k)):
        want, size = turned(source)
        assert ((got.double() - want).abs() <= UNIT[dtype] * size).all()
    assert torch.equal(values[batch.kv_pages, batch.kv_offsets], v)
    # Nothing else was written: rows x (K, V) in the one layer.
    assert int(slab.isfinite().sum()) == rows * 2 * kv_heads * dim
    one = places([2], [0])
    part = [tensor[1:2] for tensor in (q, k, v, cos, sin)]
    assert torch.equal(triton_fused.rotate_and_store(*part, keys, values, one)[0], out[1])
    assert torch.equal(keys[2, 0], keys[0, 3])


def places(pages: list[int], offsets: list[int]) -> AttentionBatch:
    count = len(pages)
    return AttentionBatch(
        query_starts=tuple(range(count + 1)),
        context_lens=(1,) * count,
        num_decodes=count,
        block_tables=torch.zeros(count, 1, dtype=torch.int64),
        context_lens_device=torch.ones(count, dtype=torch.int64),
        kv_pages=torch.tensor(pages),
        kv_offsets=torch.tensor(offsets),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 4096, 9000])
def test_row_max_is_the_first_of_equals(width, dtype):
    x = torch.randn(6, width).to(dtype)
    x[1] = -torch.inf
    x[2, [width // 2, width - 1]] = 60.0
    x[3, width - 1] = torch.nan
    x[4, width // 3] = torch.inf
    values, indices = triton_fused.row_max(x)
    assert torch.equal(values.isnan().nonzero().flatten(), torch.tensor([3]))
    for row in (0, 1, 2, 4, 5):
        assert values[row] == x[row].max()
        assert indices[row] == (x[row] == x[row].max()).nonzero()[0, 0]
    assert indices.dtype is torch.int64
    alone = triton_fused.row_max(x[5:])
    assert (alone[0][0], alone[1][0]) == (values[5], indices[5])


BLOCK, HEADS, KV_HEADS, DIM = 16, 2, 1, 16
FIRST_KV_PAGE, PAGES = 50, 75  # adapters lie before it


@pytest.fixture(scope="module")
def decoder():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "kernels/bench")
        script = importlib.import_module("decode_step")
    config = ModelConfig.from_config(
        {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "intermediate_size": 48,
            "vocab_size": 50,
            "tie_word_embeddings": True,
        }
    )
    return script.random_decoder(config, torch.float32, torch.device("cpu"), 1024)


def test_fixed_grids_compute_the_same_bits(decoder, monkeypatch):
    """Three rows of different lengths and ranks in a step that was captured for four, for 1,000
    positions and for rank 20; then others, without capturing again."""
    monkeypatch.setattr(auto, "_for_type", lambda _: gpu)
    shape, device = decoder.config.shape, torch.device("cpu")
    slab = Slab.allocate(shape, PAGES, BLOCK, torch.float32, device, scratch_page=True)
    slab.data[: PAGES * slab.page_elements].normal_()
    graphs = DecodeGraphs(
        decoder, slab, max_num_seqs=4, max_model_len=1000, max_lora_rank=20, capture=as_it_is
    )
    eager = EagerSteps(decoder, slab)
    first, second = adapter(shape, 3, 0), adapter(shape, 16, 4096)
    for contexts, slots, used in (
        ([1, 300, 33], [None, 0, 1], [first, second]),
        ([17, 16, 2], [0, 0, None], [second]),
        ([280, 5], [None, None], []),
    ):
        step = decode_step(contexts, slots, used)
        assert graphs.serves(step)
        logits, tokens = (tensor.clone() for tensor in graphs.run(step))
        want, want_tokens = eager.run(step)
        assert torch.equal(tokens, want_tokens)
        # torch's own matmuls may differ in the last bit between four rows and three.
        assert torch.allclose(logits, want, rtol=1e-6, atol=1e-6)
        if used:
            base, _ = eager.run(decode_step(contexts, slots, []))
            assert not torch.allclose(want, base, rtol=0.01)
    assert not graphs.serves(decode_step([5], [0], [adapter(shape, 21, 0)]))
    assert not graphs.serves(decode_step([5], [0], [adapter(shape, 8, 8)]))


def adapter(shape, rank: int, start: int):
    """Factors of `rank` anywhere in the slab's random numbers, at multiples of 16 from start."""
    offsets = itertools.count(start, 1024)
    return tuple(
        tuple(
            tuple(LoraFactors(rank, 0.5, next(offsets), next(offsets)) for _ in projection.slices)
            for projection in shape.projections
        )
        for _ in range(shape.num_layers)
    )


def decode_step(contexts, slots, adapters) -> StepInputs:
    count, pages = len(contexts), iter(range(FIRST_KV_PAGE, PAGES))
    tables = [[next(pages) for _ in range(-(-context // BLOCK))] for context in contexts]
    positions = [context - 1 for context in contexts]
    segments = group_rows(slots[:count], [1] * count) if adapters else None
    return StepInputs(
        token_ids=[7 * i + 3 for i in range(count)],
        positions=positions,
        kv_pages=[table[-1] for table in tables],
        kv_offsets=[position % BLOCK for position in positions],
        query_starts=list(range(count + 1)),
        context_lens=contexts,
        block_tables=tables,
        logits_rows=list(range(count)),
        segments=segments,
        adapters=adapters,
    )
