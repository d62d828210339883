"""Attention of prompts on the matrix unit, against float64; and the memory of activations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from lorad_kernels import AttentionBatch, cpu_activations, cpu_prefill, cpu_tiles, paged_attention
from torch import Tensor

BF16 = torch.bfloat16
needs_amx = pytest.mark.skipif(not cpu_tiles.available(), reason="needs a processor with AMX")


class Case:
    """Sequences of (rows, context) over pages in random order; NaN is behind their ends."""

    def __init__(
        self,
        sequences: Sequence[tuple[int, int]],
        heads: int = 9,
        kv_heads: int = 3,
        dim: int = 64,
        page: int = 16,
        decodes: int = 0,
    ) -> None:
        torch.manual_seed(0)
        pages = sum(-(-context // page) for _, context in sequences)
        order, self.tables, taken = torch.randperm(pages + 1).tolist(), [], 0
        self.k = torch.full((pages + 1, page, kv_heads, dim), float("nan"), dtype=BF16)
        self.v = self.k.clone()
        for _, context in sequences:
            table = order[taken : taken + -(-context // page)]
            taken += len(table)
            self.tables.append(table)
            for position in range(context):
                place = table[position // page], position % page
                self.k[place] = torch.randn(kv_heads, dim)
                self.v[place] = torch.randn(kv_heads, dim)
        self.sequences, self.decodes, self.page = sequences, decodes, page
        self.q = torch.randn(sum(rows for rows, _ in sequences), heads, dim).to(BF16)

    def batch(
        self, sequences: Sequence[tuple[int, int]], tables: list[list[int]]
    ) -> AttentionBatch:
        starts = [0]
        for rows, _ in sequences:
            starts.append(starts[-1] + rows)
        contexts = [context for _, context in sequences]
        longest = max(map(len, tables))
        padded = [table + table[:1] * (longest - len(table)) for table in tables]
        unused = torch.zeros(starts[-1], dtype=torch.int64)
        return AttentionBatch(
            tuple(starts), tuple(contexts), self.decodes, torch.tensor(padded),
            torch.tensor(contexts), unused, unused,
        )  # fmt: skip

    def attend(self, window: int | None = None) -> Tensor:
        batch = self.batch(self.sequences, self.tables)
        scale = self.q.shape[2] ** -0.5
        return paged_attention(self.q, self.k, self.v, batch, scale=scale, sliding_window=window)

    def exact(self, window: int | None = None) -> Tensor:
        rows, group = [], self.q.shape[1] // self.k.shape[2]
        first = 0
        for (count, context), table in zip(self.sequences, self.tables, strict=True):
            k, v = (
                cache[table].flatten(0, 1)[:context].double().repeat_interleave(group, 1)
                for cache in (self.k, self.v)
            )
            for r in range(count):
                end = context - count + r + 1
                begin = max(0, end - window) if window else 0
                scores = torch.einsum("hd,thd->ht", self.q[first + r].double(), k[begin:end])
                weights = torch.softmax(scores * self.q.shape[2] ** -0.5, 1)
                rows.append(torch.einsum("ht,thd->hd", weights, v[begin:end]))
            first += count
        return torch.stack(rows)


@needs_amx
@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(9, 3, 64, 16), (2, 2, 32, 32), (4, 1, 96, 48)]
)
def test_prefill_attention(heads, kv_heads, dim, page, window):
    case = Case([(1, 1), (5, 5), (16, 16), (33, 40), (70, 203)], heads, kv_heads, dim, page)
    assert cpu_prefill.serves(case.q, case.k)
    # Weights are rounded to 9 bits, and so is the result.
    bound = 2**-8 * float(case.v.nan_to_num().abs().max())
    assert float((case.attend(window) - case.exact(window)).abs().max()) <= bound


@needs_amx
def test_decodes_and_prefills_of_one_batch_and_a_wide_head():
    case = Case([(1, 7), (1, 90), (20, 100), (3, 3)], 4, 2, 128, decodes=2)
    bound = 2**-8 * float(case.v.nan_to_num().abs().max())
    assert float((case.attend() - case.exact()).abs().max()) <= bound


@needs_amx
@pytest.mark.parametrize("window", [None, 40])
def test_sequences_are_laid_out_in_groups(window, monkeypatch):
    case = Case([(9, 30), (70, 70), (40, 60), (2, 200)])
    together = case.attend(window)
    monkeypatch.setattr(cpu_prefill, "_TOGETHER", 100)
    cpu_prefill._work.cache_clear()
    assert torch.equal(case.attend(window), together)
    cpu_prefill._work.cache_clear()


@needs_amx
@pytest.mark.parametrize("window", [None, 20])
def test_a_row_has_the_same_bits_in_any_chunk_and_any_batch(window):
    case = Case([(9, 30), (70, 70), (40, 60)])
    torch.set_num_threads(1)
    alone = case.attend(window)[9:79]
    torch.set_num_threads(2)
    together = case.attend(window)[9:79]
    assert torch.equal(alone, together)
    for cut in (1, 16, 37, 64):
        parts = []
        for rows, context, first in ((cut, cut, 9), (70 - cut, 70, 9 + cut)):
            batch = case.batch([(rows, context)], [case.tables[1]])
            q = case.q[first : first + rows]
            parts.append(
                paged_attention(q, case.k, case.v, batch, scale=64**-0.5, sliding_window=window)
            )
        assert torch.equal(torch.cat(parts), together)


@needs_amx
@pytest.mark.parametrize("cache", ["k", "v"])
def test_nan_in_a_used_key_or_value_shows_and_stays_in_its_sequence(cache):
    case = Case([(60, 60), (20, 20)])
    getattr(case, cache)[case.tables[0][2], 8] = float("nan")  # position 40
    out = case.attend()
    assert out[40:60].isnan().all()
    # The other rows of its tile fail with it: the request does in any case.
    assert out[:32].isfinite().all()
    assert out[60:].isfinite().all()


def test_what_the_matrix_unit_does_not_attend():
    q = torch.zeros(4, 9, 64, dtype=BF16)
    cache = torch.zeros(2, 16, 3, 64, dtype=BF16)
    assert cpu_prefill.serves(q, cache) == cpu_tiles.available()
    assert not cpu_prefill.serves(q.float(), cache.float())
    narrow = torch.zeros(2, 16, 3, 48, dtype=BF16)
    assert not cpu_prefill.serves(torch.zeros(4, 9, 48, dtype=BF16), narrow)
    assert not cpu_prefill.serves(q, cache[:, :8])


def test_a_block_is_lent_again_when_the_last_view_of_it_is_gone():
    blocks = cpu_activations.Blocks()
    first = blocks.lend(3 << 20)
    view = first[: 1 << 20].view(torch.float32).view(512, 512)
    address = first.data_ptr()
    del first
    assert blocks.free_bytes == 0
    other = blocks.lend(3 << 20)
    assert other.data_ptr() != address
    view.fill_(7.0)
    other.zero_()
    assert bool((view == 7.0).all())
    del view
    assert blocks.free_bytes == 4 << 20
    assert blocks.lend(3 << 20).data_ptr() == address
    big = blocks.lend(64 << 20)
    del big
    assert blocks.lend(5 << 20).nbytes == 6 << 20, "much more room than asked for is not lent"


def test_blocks_that_nobody_uses_are_kept_up_to_a_limit():
    blocks = cpu_activations.Blocks()
    lent = [blocks.lend(24 << 20) for _ in range(8)]
    del lent
    assert 100 << 20 < blocks.free_bytes <= 128 << 20


def test_activations_have_the_shape_asked_for():
    for shape in ((0, 4), (3, 5), (1024, 513), (2, 3, 2**18)):
        for dtype in (BF16, torch.float32):
            tensor = cpu_activations.empty(shape, dtype)
            assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
            assert tensor.is_contiguous()
