"""The Triton kernels against float64, run by Triton's interpreter on the CPU.

Run by test_triton.py in a process of its own, as the interpreter is chosen when Triton is first
imported. Its `dot` is wrong in bfloat16, so float32 and float16 stand for the 16-bit types.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, below

from lorad_kernels import (
    AttentionBatch,
    FactorTable,
    LoraFactors,
    group_rows,
    triton_attention,
    triton_lora,
)
from lorad_kernels.triton_attention import decode

DTYPES = [torch.float32, torch.float16]
# Of one rounding, relative to the magnitudes that were summed.
UNIT = {torch.float32: 2e-6, torch.float16: 2**-11}
SPLIT = 64  # of decode attention here; the interpreter takes 10 ms a step of a program


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def adapters(ranks, width, outs, dtype):
    """A slab that is NaN between the factors, and the table into it."""
    parts, table, position = [], [], 0

    def place(tensor):
        nonlocal position
        parts.extend([tensor.reshape(-1), torch.full((3,), torch.nan, dtype=dtype)])
        position += tensor.numel() + 3
        return position - tensor.numel() - 3

    for rank in ranks:
        row = []
        for out in outs:
            a = (torch.randn(rank, width) / width**0.5).to(dtype)
            b = (torch.randn(out, rank) / max(rank, 1) ** 0.5).to(dtype)
            row.append(LoraFactors(rank, 0.7, place(a), place(b)))
        table.append(row)
    return torch.cat(parts), table


def expected(y, x, slab, table, outs, slots):
    want, size = y.double(), y.double().abs()
    for t, slot in enumerate(slots):
        start = 0
        for s, out in enumerate(outs):
            if slot is not None and table[slot][s].rank:
                f = table[slot][s]
                a = slab[f.a_offset :][: f.rank * x.shape[1]].view(f.rank, -1).double()
                b = slab[f.b_offset :][: out * f.rank].view(out, f.rank).double()
                want[t, start : start + out] += f.scaling * (b @ (a @ x[t].double()))
                size[t, start : start + out] += f.scaling * (
                    b.abs() @ (a.abs() @ x[t].double().abs())
                )
            start += out
    return want, size


def run(y, x, slab, table, outs, segments):
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + out)
    got = y.clone()
    triton_lora.add_lora(got, x, slab, FactorTable.of(table), starts, segments)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 17, 512])
def test_lora_at_true_rank_and_odd_widths(rank, dtype):
    outs = [37, 12, 5]
    slab, table = adapters([rank, 0, 2], 75, outs, dtype)
    slots = [None, 0, 0, 1, 2, 2, None]
    x, y = torch.randn(7, 75).to(dtype), torch.randn(7, 54).to(dtype)
    want, size = expected(y, x, slab, table, outs, slots)
    got = run(y, x, slab, table, outs, group_rows(slots, [1] * 7))
    assert ((got.double() - want).abs() <= UNIT[dtype] * size).all()
    for row in (0, 3, 6):
        assert torch.equal(got[row], y[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_input_is_summed_in_pieces(dtype):
    width = 2 * triton_lora.SPLIT_WIDTH + 100
    slab, table = adapters([5], width, [20], dtype)
    x, y = torch.randn(2, width).to(dtype), torch.randn(2, 20).to(dtype)
    want, size = expected(y, x, slab, table, [20], [0, 0])
    got = run(y, x, slab, table, [20], group_rows([0, 0], [1, 1]))
    assert ((got.double() - want).abs() <= UNIT[dtype] * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch_or_the_place_in_the_slab(dtype):
    outs = [33]
    slab, table = adapters([3, 16], 40, outs, dtype)
    slots = [0] * 3 + [1] * 20
    x, y = torch.randn(23, 40).to(dtype), torch.randn(23, 33).to(dtype)
    together = run(y, x, slab, table, outs, group_rows(slots, [1] * 23))
    for row in (0, 2, 3, 22):
        segments = group_rows([slots[row]], [1])
        assert torch.equal(
            run(y[row : row + 1], x[row : row + 1], slab, table, outs, segments)[0], together[row]
        )
    moved = torch.cat([torch.full((48,), torch.nan, dtype=dtype), slab])
    shifted = [
        [LoraFactors(f.rank, f.scaling, f.a_offset + 48, f.b_offset + 48) for f in row]
        for row in table
    ]
    segments = group_rows(slots, [1] * 23)
    assert torch.equal(run(y, x, moved, shifted, outs, segments), together)


def test_256_segments_and_none():
    slab, table = adapters([2] * 256, 16, [16], torch.float32)
    x, y = torch.randn(256, 16), torch.randn(256, 16)
    slots = list(range(256))
    want, size = expected(y, x, slab, table, [16], slots)
    got = run(y, x, slab, table, [16], group_rows(slots, [1] * 256))
    assert ((got.double() - want).abs() <= 2e-6 * size).all()
    assert torch.equal(run(y, x, slab, table, [16], group_rows([None] * 256, [1] * 256)), y)


def test_one_hot_segment_of_10000_rows_among_64_small_ones(monkeypatch):
    # Larger tiles than on a GPU: the interpreter takes 10 ms a program, whatever its size.
    monkeypatch.setattr(triton_lora, "SGMV", dataclasses.replace(triton_lora.SGMV, rows=512))
    lengths = [1] * 32 + [10_000] + [1] * 32
    slab, table = adapters([8] * 65, 32, [32], torch.float32)
    hot = torch.arange(32, 10_032)
    small = torch.cat([hot[:0], torch.arange(32), torch.arange(10_032, 10_064)])
    x, y = torch.randn(10_064, 32), torch.randn(10_064, 32)
    got = run(y, x, slab, table, [32], group_rows(list(range(65)), lengths))
    slots = [*range(32), *range(33, 65)]
    want, size = expected(y[small], x[small], slab, table, [32], slots)
    assert ((got[small].double() - want).abs() <= 2e-6 * size).all()
    f = table[32][0]
    a = slab[f.a_offset :][:256].view(8, 32).double()
    b = slab[f.b_offset :][:256].view(32, 8).double()
    want = y[hot].double() + 0.7 * (x[hot].double() @ a.T) @ b.T
    size = y[hot].double().abs() + 0.7 * (x[hot].double().abs() @ a.abs().T) @ b.abs().T
    assert ((got[hot].double() - want).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (7, None), (2 * SPLIT + 3, 5.0), (None, 5.0)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (3, 3, 20)])
def test_decode_attention(heads, kv_heads, dim, softcap, window, dtype, monkeypatch):
    """The last context has more splits than there may be, so they are twice as long."""
    monkeypatch.setattr(triton_attention, "SPLIT", SPLIT)
    monkeypatch.setattr(triton_attention, "MAX_SPLITS", 2)
    contexts = [1, SPLIT, SPLIT + 40, 2 * SPLIT + 25]
    batch, k_cache, v_cache = decode_batch(contexts, 16, dtype, kv_heads, dim)
    q = torch.randn(4, heads, dim).to(dtype)
    out = torch.full_like(q, torch.nan)
    options = {"scale": 0.4, "sliding_window": window, "softcap": softcap}
    decode(q, k_cache, v_cache, batch, out, **options)
    for i, context in enumerate(contexts):
        first = max(0, context - window) if window else 0
        k, v = (
            c[batch.block_tables[i]].flatten(0, 1)[first:context].double()
            for c in (k_cache, v_cache)
        )
        for h in range(heads):
            scores = 0.4 * (k[:, h * kv_heads // heads] @ q[i, h].double())
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            want = scores.softmax(0) @ v[:, h * kv_heads // heads]
            limit = 1e-5 if dtype is torch.float32 else 4e-3
            assert (out[i, h].double() - want).abs().max() < limit
    alone = torch.empty_like(q[:2])
    decode(q[:2], k_cache, v_cache, first_two(batch), alone, **options)
    assert torch.equal(alone, out[:2])


def first_two(batch):
    return AttentionBatch(
        query_starts=batch.query_starts[:3],
        context_lens=batch.context_lens[:2],
        num_decodes=2,
        block_tables=batch.block_tables[:2],
        context_lens_device=batch.context_lens_device[:2],
        kv_pages=batch.kv_pages[:2],
        kv_offsets=batch.kv_offsets[:2],
    )


def decode_batch(contexts, block, dtype, kv_heads, dim):
    blocks = [-(-context // block) for context in contexts]
    order = torch.randperm(sum(blocks) + 1).tolist()
    slab = torch.randn(len(order), 2, 2, block, kv_heads, dim).to(dtype)
    tables, used = [], 1
    for context, count in zip(contexts, blocks, strict=True):
        own = order[used : used + count]
        used += count
        tables.append(own + own[:1] * (max(blocks) - count))
        if context % block:
            slab[own[-1], :, :, context % block :] = torch.nan
    batch = AttentionBatch(
        query_starts=tuple(range(len(contexts) + 1)),
        context_lens=tuple(contexts),
        num_decodes=len(contexts),
        block_tables=torch.tensor(tables),
        context_lens_device=torch.tensor(contexts),
        kv_pages=torch.tensor([0] * len(contexts)),
        kv_offsets=torch.tensor([0] * len(contexts)),
    )
    return batch, slab[:, 1, 0], slab[:, 1, 1]
