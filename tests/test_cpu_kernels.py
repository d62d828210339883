"""The CPU's kernels against float64, and bit for bit against themselves in other batches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lorad_kernels
import pytest
import torch
from lorad_kernels import (
    Arena,
    AttentionBatch,
    add_lora,
    add_rms_norm,
    base_linear,
    cpu_amx,
    empty_block,
    finish,
    forward_pass,
    greedy_tokens,
    group_rows,
    paged_attention,
    record,
    rotate_and_store,
    row_max,
    silu_mul,
    take_rows,
    tune_linears,
)
from lorad_kernels.cpu_linear import few_rows

from lora_factors import UNIT, RandomAdapters

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 35])
@pytest.mark.parametrize("rank", [1, 3, 8, 17, 64, 512])
def test_lora_is_exact_to_one_rounding(rank, width, dtype):
    adapters = RandomAdapters([rank, 0, 5], width, [70, 33], dtype)
    slots = [None, 0, 0, 0, 0, 0, 1, 2, 2, 0, None]
    x, y = torch.randn(11, width).to(dtype), torch.randn(11, 103).to(dtype)
    want, size = adapters.expected(y, x, slots)
    got = y.clone()
    segments = group_rows(slots, [1] * 11)
    add_lora(got, x, adapters.slab, adapters.table, adapters.starts, segments)
    assert ((got.double() - want).abs() <= UNIT[dtype] * size).all()
    for base in (0, 6, 10):
        assert torch.equal(got[base], y[base])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_delta_has_the_same_bits_in_any_batch(dtype):
    adapters = RandomAdapters([8, 17, 64], 48, [40], dtype)
    slots = [0] * 1 + [1] * 2 + [2] * 3 + [0] * 33 + [1] * 4
    x, y = torch.randn(len(slots), 48).to(dtype), torch.randn(len(slots), 40).to(dtype)

    def run(rows):
        got = y[rows].clone()
        segments = group_rows([slots[row] for row in rows], [1] * len(rows))
        add_lora(got, x[rows], adapters.slab, adapters.table, [0, 40], segments)
        return got

    together = run(list(range(len(slots))))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        alone = torch.cat([run([row]) for row in range(len(slots))])
        assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_segment_among_64_small_ones(dtype):
    adapters = RandomAdapters([4] * 65, 32, [48], dtype)
    lengths = [1] * 32 + [1000] + [2] * 32
    slots = list(range(65))
    rows = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    x, y = torch.randn(len(rows), 32).to(dtype), torch.randn(len(rows), 48).to(dtype)
    want, size = adapters.expected(y, x, rows)
    segments = group_rows(slots, lengths)
    add_lora(y, x, adapters.slab, adapters.table, [0, 48], segments)
    # Long segments go through torch, which rounds h to the dtype as well.
    assert ((y.double() - want).abs() <= 3 * UNIT[dtype] * size).all()


@pytest.mark.parametrize("count", [0, 1, 256])
def test_any_number_of_segments(count):
    adapters = RandomAdapters([2] * max(count, 1), 16, [16], torch.float32)
    x, y = torch.randn(257, 16), torch.randn(257, 16)
    slots = [*range(count), *[None] * (257 - count)]
    want, size = adapters.expected(y, x, slots)
    segments = group_rows(slots, [1] * 257)
    add_lora(y, x, adapters.slab, adapters.table, [0, 16], segments)
    assert ((y.double() - want).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_few_rows_is_exact_to_one_rounding_and_invariant(rows, dtype):
    x, weight = torch.randn(rows, 35).to(dtype), torch.randn(70, 35).to(dtype)
    got = few_rows(x, weight)
    size = x.double().abs() @ weight.double().abs().T
    assert ((got.double() - x.double() @ weight.double().T).abs() <= UNIT[dtype] * size).all()
    assert torch.equal(torch.cat([few_rows(x[i : i + 1], weight) for i in range(rows)]), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_add_a_bias_before_they_round(dtype):
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((3, 40), (70, 40), (70,)))
    want = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((few_rows(x, weight, bias).double() - want).abs() <= UNIT[dtype] * size).all()


@pytest.mark.skipif(not cpu_amx.available(), reason="needs a processor with AMX")
@pytest.mark.parametrize("features", [16, 48, 96])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 70])
def test_the_matrix_unit_is_exact_to_one_rounding_and_invariant(rows, features):
    x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(features, 64).bfloat16()
    bias = torch.randn(features).bfloat16()
    assert cpu_amx.serves(weight)
    got = cpu_amx.multiply(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((got.double() - want).abs() <= 2**-8 * size).all()
    alone = [cpu_amx.multiply(x[i : i + 1], weight, bias) for i in range(rows)]
    assert torch.equal(torch.cat(alone), got)


def test_what_the_matrix_unit_does_not_serve():
    for weight in (torch.zeros(20, 64), torch.zeros(32, 40), torch.zeros(64, 32).T):
        assert not cpu_amx.serves(weight.bfloat16())
    assert not cpu_amx.serves(torch.zeros(32, 64))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_queue_runs_in_order_and_when_it_is_finished(threads):
    torch.set_num_threads(threads)
    device, weight = torch.device("cpu"), torch.rand(64, 64) / 32
    x = torch.randn(5, 64)
    with forward_pass(device):
        y = x
        for _ in range(40):  # tensors that die early, and whose memory others would get
            y = few_rows(y, weight)
        finish(device)
        early = y.clone()
        z = few_rows(y, weight)
    want = x.double()
    for _ in range(40):
        want = want @ weight.double().T
    torch.testing.assert_close(early.double(), want, rtol=1e-4, atol=0)
    torch.testing.assert_close(z.double(), want @ weight.double().T, rtol=1e-4, atol=0)


def test_a_queue_runs_when_it_holds_much_memory():
    x = torch.randn(700, 64).bfloat16()
    want = silu_mul(x)
    with forward_pass(torch.device("cpu")):
        first = silu_mul(x)
        first.zero_()  # it has not run, and will write once more
        others = [silu_mul(x) for _ in range(20)]
        assert not first.any()
        others += [silu_mul(x) for _ in range(20)]  # 45 kB each
        assert torch.equal(first, want)


def test_a_queue_that_is_left_by_an_error_runs_nothing():
    x = torch.zeros(2, 32)
    with pytest.raises(KeyError), forward_pass(torch.device("cpu")):
        add_rms_norm(x, torch.ones(2, 32), torch.ones(32), 1e-5, torch.float32)
        raise KeyError
    assert not x.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_recorded_runs_again_over_the_same_tensors(dtype):
    table, rows = torch.randn(9, 48).to(dtype), torch.tensor([3, 3, 8])
    weight = torch.randn(32, 48).to(dtype)
    recorded = record(lambda: few_rows(take_rows(table, rows), weight))
    assert recorded is not None
    again, result = recorded
    for picked in ([3, 3, 8], [0, 7, 1]):
        rows.copy_(torch.tensor(picked))
        again()
        assert torch.equal(result, few_rows(table[rows], weight))


def test_what_torch_takes_part_in_is_not_recorded():
    device = torch.device("cpu")
    assert record(lambda: finish(device)) is None
    x = torch.zeros(2, 8)  # and nothing is queued afterwards
    add_rms_norm(x, torch.ones(2, 8), torch.ones(8), 1e-5, torch.float32)
    assert x.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_tokens_name_no_token_for_nan_and_infinity(dtype):
    logits = torch.randn(4, 1100).to(dtype)
    logits[1, 700], logits[2, 3] = torch.nan, torch.inf
    logits[3, 5] = -torch.inf
    want = logits.argmax(dim=1)
    assert greedy_tokens(logits).tolist() == [want[0], -1, -1, want[3]]


def test_large_blocks_lie_on_whole_huge_pages():
    block = empty_block(3 * 2**20, torch.bfloat16, torch.device("cpu"))
    assert block.shape == (3 * 2**20,) and block.data_ptr() % 2**21 == 0
    block.fill_(1.0)
    assert float(block.float().sum()) == 3 * 2**20


def test_an_arena_gives_aligned_tensors_that_do_not_overlap():
    shapes = [(3, 5), (1, 1), (64, 7)]
    arena = Arena(shapes, torch.bfloat16, torch.device("cpu"))
    tensors = [arena.take(shape).fill_(i) for i, shape in enumerate(shapes)]
    for i, tensor in enumerate(tensors):
        assert tensor.shape == shapes[i] and (tensor == i).all()
        assert (tensor.data_ptr() - tensors[0].data_ptr()) % 64 == 0


def test_a_tuned_linear_computes_what_torch_does():
    weights = [torch.randn(96, 64).bfloat16() for _ in range(3)]
    bias = torch.randn(96).bfloat16()
    linears = [base_linear(weight, bias) for weight in weights]
    tune_linears(linears, spare_bytes=2**30)
    for rows in (1, 4, 40):
        x = torch.randn(rows, 64).bfloat16()
        for linear, weight in zip(linears, weights, strict=True):
            want = x.double() @ weight.double().T + bias.double()
            size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
            assert ((linear(x).double() - want).abs() <= 2 * 2**-8 * size).all()


def _decode_batch(contexts, block, dtype, kv_heads, dim, layers=3):
    """Random caches as strided views of one slab, pages in random order."""
    blocks = [-(-context // block) for context in contexts]
    pages = torch.randperm(sum(blocks) + 2)
    slab = torch.randn(len(pages), layers, 2, block, kv_heads, dim).to(dtype)
    tables, used = [], 2
    for count in blocks:
        own = pages[used : used + count].tolist()
        tables.append(own + own[:1] * (max(blocks) - count))
        used += count
    for context, table in zip(contexts, tables, strict=True):
        # What lies behind the context must not be read.
        if context % block:
            slab[table[context // block], :, :, context % block :] = torch.nan
    batch = AttentionBatch(
        query_starts=tuple(range(len(contexts) + 1)),
        context_lens=tuple(contexts),
        num_decodes=len(contexts),
        block_tables=torch.tensor(tables),
        context_lens_device=torch.tensor(contexts),
        kv_pages=torch.tensor([t[(c - 1) // block] for c, t in zip(contexts, tables, strict=True)]),
        kv_offsets=torch.tensor([(c - 1) % block for c in contexts]),
    )
    return batch, slab[:, 1, 0], slab[:, 1, 1]


def _attention64(q, k_cache, v_cache, batch, scale, window):
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[2]
    for i, context in enumerate(batch.context_lens):
        begin = max(0, context - window) if window else 0
        k, v = (
            cache[batch.block_tables[i]].flatten(0, 1)[begin:context].double()
            for cache in (k_cache, v_cache)
        )
        for h in range(q.shape[1]):
            weights = (scale * (k[:, h // group] @ q[i, h].double())).softmax(0)
            out[i, h] = weights @ v[:, h // group]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 24])
@pytest.mark.parametrize("block", [16, 32, 12])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 4, 16), (8, 1, 80), (20, 1, 32), (16, 2, 128)],
)
def test_decode_attention(heads, kv_heads, dim, block, window, dtype):
    contexts = [1, 16, 17, 40, 5]
    batch, k_cache, v_cache = _decode_batch(contexts, block, dtype, kv_heads, dim)
    q = torch.randn(5, heads, dim).to(dtype)
    got = paged_attention(q, k_cache, v_cache, batch, scale=0.3, sliding_window=window)
    want = _attention64(q, k_cache, v_cache, batch, 0.3, window)
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    assert (got.double() - want).abs().max() < limit
    batch1, k1, v1 = _first(batch, 1), k_cache, v_cache
    alone = paged_attention(q[:1], k1, v1, batch1, scale=0.3, sliding_window=window)
    assert torch.equal(alone, got[:1])


def _first(batch, count):
    return AttentionBatch(
        query_starts=batch.query_starts[: count + 1],
        context_lens=batch.context_lens[:count],
        num_decodes=count,
        block_tables=batch.block_tables[:count],
        context_lens_device=batch.context_lens_device[:count],
        kv_pages=batch.kv_pages[:count],
        kv_offsets=batch.kv_offsets[:count],
    )


def test_nan_in_a_used_key_shows():
    batch, k_cache, v_cache = _decode_batch([20], 16, torch.float32, 1, 16)
    k_cache[batch.block_tables[0, 0], 3] = torch.nan
    got = paged_attention(torch.randn(1, 2, 16), k_cache, v_cache, batch, scale=1.0)
    assert got.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_and_the_cache(dtype):
    batch, k_cache, v_cache = _decode_batch([4, 20, 33], 16, dtype, 2, 32)
    qkv = torch.randn(3, 8, 32).to(dtype)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    angles = torch.rand(3, 16).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got = rotate_and_store(q, k, v, cos, sin, k_cache, v_cache, batch)

    def turned(x):
        first, second = x.double().chunk(2, dim=-1)
        other = torch.cat([-second, first], -1)
        return x.double() * cos[:, None].double() + other * sin[:, None].double()

    limit = 1e-6 if dtype is torch.float32 else 2e-2
    assert (got.double() - turned(q)).abs().max() < limit
    stored = k_cache[batch.kv_pages, batch.kv_offsets].double()
    assert (stored - turned(k)).abs().max() < limit
    assert torch.equal(v_cache[batch.kv_pages, batch.kv_offsets], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 50])
def test_residual_norm(width, dtype):
    x, delta = 100 * torch.randn(3, width), torch.randn(3, width).to(dtype)
    weight = torch.randn(width)
    total = x.double() + delta.double()
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = add_rms_norm(x, delta, weight, 1e-5, dtype)
    assert got.dtype is dtype
    assert torch.allclose(x.double(), total, rtol=1e-6)
    assert torch.allclose(got.double(), want, rtol=UNIT[dtype] * 2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_over_the_whole_range(dtype):
    gate = torch.cat([torch.linspace(-120, 120, 501), torch.tensor([0.0, -0.0, 1e-30])])
    gate_up = torch.cat([gate, torch.randn(504)])[None].to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want = gate * torch.sigmoid(gate) * up
    got = silu_mul(gate_up).double()
    assert torch.allclose(got, want, rtol=UNIT[dtype] * 2, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 511, 513, 2000])
def test_row_max_is_the_first_of_equals(width, dtype):
    x = torch.randn(5, width).to(dtype)
    x[1] = -torch.inf
    x[2] = 3.0
    values, indices = row_max(x)
    assert torch.equal(values, x.float().max(-1).values)
    assert indices.tolist() == [x[i].tolist().index(x[i].max().item()) for i in range(5)]
    for place in {0, width // 2, width - 1}:
        poisoned = x.clone()
        poisoned[3, place] = torch.nan
        values, _ = row_max(poisoned)
        assert values.isnan().tolist() == [False, False, False, True, False]


def test_a_kernel_is_compiled_again_when_a_source_it_calls_changed(tmp_path):
    """numba alone would go on using the old code."""
    package = tmp_path / "lorad_kernels"
    source = Path(lorad_kernels.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import torch
from lorad_kernels import silu_mul
print(silu_mul(torch.tensor([[1.0, 2.0]])).item())
"""

    def run() -> float:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environment.pop("NUMBA_CACHE_DIR", None)
        command = [sys.executable, "-c", script]
        return float(subprocess.check_output(command, env=environment, text=True))

    first = run()
    assert first == pytest.approx(2 * torch.sigmoid(torch.tensor(1.0)).item())
    simd = package / "cpu_simd.py"
    text = simd.read_text()
    changed = text.replace("builder.fadd(one, power)", "builder.fadd(one, one)")
    assert changed != text
    simd.write_text(changed)
    assert run() == 1.0
