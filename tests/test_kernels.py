"""The operations against float64, implementation by implementation, within stated error bounds.

Unit roundoff u is half the distance from 1 to the next number: 2^-24 in float32, 2^-8 in
bfloat16. Whatever an operation has no business with (gaps of the slab, pages of others, rows of
the base model) holds NaN, so that reading it shows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorad_kernels import (
    AttentionBatch,
    LoraFactors,
    LoraSegments,
    Segment,
    add_lora,
    cpu,
    group_rows,
    paged_attention,
    reference,
    write_kv,
)
from lorad_kernels.factors import FactorTable
from torch import Tensor

torch.set_num_threads(1)

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
ROUNDOFF = {FLOAT32: 2.0**-24, BFLOAT16: 2.0**-8}
implementations = pytest.mark.parametrize(
    "implementation", [cpu, reference], ids=["cpu", "reference"]
)
dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["fp32", "bf16"])


def random(*shape: int, seed: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """For comparisons that tell NaN from NaN and 0 from -0."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == FLOAT32 else torch.int16)


# --- LoRA -------------------------------------------------------------------------------------


@dataclass
class LoraCase:
    """One call of add_lora. `ranks[slot][s]` are the adapters' ranks per slice."""

    ranks: list[list[int]]
    slots: list[int | None]
    lengths: list[int]
    in_features: int = 37
    widths: tuple[int, ...] = (29,)
    dtype: torch.dtype = FLOAT32

    def __post_init__(self) -> None:
        self.starts = [0, *itertools.accumulate(self.widths)]
        self.segments = group_rows(self.slots, self.lengths)
        rows = self.segments.num_rows
        self.x = random(rows, self.in_features, seed=1, dtype=self.dtype)
        self.y = random(rows, self.starts[-1], seed=2, dtype=self.dtype)
        self._pack()

    def _pack(self) -> None:
        """Factors at odd places, NaN before, between and behind them."""
        pieces, self.table, place = [], [], 0

        def put(rows: int, columns: int) -> int:
            nonlocal place
            gap = 1 + place % 7
            scale = max(columns, 1) ** -0.5
            matrix = random(rows, columns, seed=place, dtype=self.dtype) * scale
            pieces.extend([torch.full((gap,), torch.nan, dtype=self.dtype), matrix.flatten()])
            offset, place = place + gap, place + gap + rows * columns
            return offset

        for slot, ranks in enumerate(self.ranks):
            factors = []
            for width, rank in zip(self.widths, ranks, strict=True):
                a, b = put(rank, self.in_features), put(width, rank)
                factors.append(LoraFactors(rank, 0.37 * (-2) ** slot, a, b))
            self.table.append(factors)
        self.table = FactorTable.of(self.table)
        self.slab = torch.cat([*pieces, torch.full((5,), torch.nan, dtype=self.dtype)])

    def factors(self, slot: int, s: int) -> tuple[Tensor, Tensor]:
        place, width = self.table[slot][s], self.widths[s]
        a = self.slab[place.a_offset :][: place.rank * self.in_features]
        b = self.slab[place.b_offset :][: width * place.rank]
        return a.view(place.rank, self.in_features).double(), b.view(width, place.rank).double()

    def row_slots(self) -> list[int | None]:
        pairs = zip(self.slots, self.lengths, strict=True)
        return [slot for slot, length in pairs for _ in range(length)]

    def exact(self) -> tuple[Tensor, Tensor]:
        """y in float64, and |y| + |scaling| |x| |A| |B|: what rounding errors are relative to."""
        y, size = self.y.double(), self.y.double().abs()
        for t, slot in enumerate(self.row_slots()):
            for s in range(len(self.widths)) if slot is not None else ():
                scaling, (a, b) = self.table[slot][s].scaling, self.factors(slot, s)
                columns, x = slice(self.starts[s], self.starts[s + 1]), self.x[t].double()
                y[t, columns] += scaling * (b @ (a @ x))
                size[t, columns] += abs(scaling) * (b.abs() @ (a.abs() @ x.abs()))
        return y, size

    def run(self, implementation) -> Tensor:
        y = self.y.clone()
        implementation.add_lora(y, self.x, self.slab, self.table, self.starts, self.segments)
        return y

    def bound(self, implementation, size: Tensor, exact: Tensor) -> Tensor:
        """What rounding may do at worst, element by element.

        Sums of n products in float32: n u size. In bfloat16 each rounding to memory adds its own
        u: the reference rounds the result alone, the CPU path the shrunk rows too.
        """
        longest = self.in_features + max((r for ranks in self.ranks for r in ranks), default=0)
        sums = (longest + 4) * ROUNDOFF[FLOAT32] * size
        if self.dtype is FLOAT32:
            return sums
        u = ROUNDOFF[BFLOAT16]
        inner = 0 if implementation is reference else u * size
        return sums + inner + u * (exact.abs() + inner)

    def check(self, implementation) -> None:
        exact, size = self.exact()
        got = self.run(implementation)
        assert got.dtype == self.dtype
        error = (got.double() - exact).abs()
        allowed = self.bound(implementation, size, exact)
        assert (error <= allowed).all(), f"off by {(error / allowed).max():.2f} times the bound"
        self.check_untouched(got)

    def check_untouched(self, got: Tensor) -> None:
        for t, slot in enumerate(self.row_slots()):
            for s in range(len(self.widths)):
                if slot is None or self.ranks[slot][s] == 0:
                    columns = slice(self.starts[s], self.starts[s + 1])
                    assert torch.equal(bits(got[t, columns]), bits(self.y[t, columns]))


@implementations
@dtypes
@pytest.mark.parametrize("rank", [1, 3, 17, 64, 512])
def test_any_rank(implementation, dtype: torch.dtype, rank: int) -> None:
    LoraCase([[rank]], [0, None, 0], [3, 2, 1], dtype=dtype).check(implementation)


@implementations
@dtypes
@pytest.mark.parametrize(("in_features", "width"), [(1, 1), (1, 130), (131, 1), (63, 65), (96, 7)])
def test_any_width(implementation, dtype: torch.dtype, in_features: int, width: int) -> None:
    case = LoraCase([[5], [2]], [0, 1], [4, 3], in_features, (width,), dtype)
    case.check(implementation)


@implementations
@dtypes
@pytest.mark.parametrize("lengths", [[1], [256], [1, 256], [256, 1, 1, 1, 256]])
def test_segments_of_one_row_and_of_many(implementation, dtype: torch.dtype, lengths) -> None:
    """A step's prefills and decodes: different adapters side by side, the same one apart."""
    slots = [i % 2 for i in range(len(lengths))]
    LoraCase([[8], [3]], slots, lengths, widths=(16,), dtype=dtype).check(implementation)


@implementations
@dtypes
def test_slices_of_a_fused_projection_with_some_left_alone(implementation, dtype) -> None:
    """q|k|v with grouped-query widths; each adapter has its own ranks, 0 where it is not."""
    ranks = [[4, 0, 9], [0, 2, 0], [0, 0, 0], [1, 16, 3]]
    LoraCase(ranks, [0, 1, None, 2, 3], [2, 3, 2, 1, 4], 24, (32, 8, 8), dtype).check(
        implementation
    )


@implementations
@dtypes
def test_rows_of_the_base_model_keep_their_bits(implementation, dtype: torch.dtype) -> None:
    """Even NaN, infinity and -0: they are not computed with at all."""
    case = LoraCase([[4]], [None, 0, None], [2, 2, 3], dtype=dtype)
    for row in (0, 1, 4, 5, 6):
        case.y[row, :4] = torch.tensor([torch.nan, torch.inf, -0.0, -torch.inf])
        case.x[row] = torch.nan
    got = case.run(implementation)
    case.check_untouched(got)
    assert not torch.equal(bits(got[2:4]), bits(case.y[2:4]))


@implementations
@dtypes
def test_nan_in_a_row_or_an_adapter_stays_in_its_rows(implementation, dtype: torch.dtype) -> None:
    case = LoraCase([[4], [4]], [0, 1, None], [3, 2, 2], dtype=dtype)
    case.x[1] = torch.nan
    a_offset = case.table[1][0].a_offset
    case.slab[a_offset] = torch.nan
    got = case.run(implementation)
    assert [bool(row.isnan().any()) for row in got] == [
        False,
        True,
        False,
        True,
        True,
        False,
        False,
    ]


@implementations
@pytest.mark.parametrize(
    ("slots", "lengths"), [([], []), ([None], [3]), ([0], [0]), ([0, None, 1], [0, 4, 0])]
)
def test_no_segment_at_all(implementation, slots, lengths) -> None:
    case = LoraCase([[4], [2]], slots, lengths)
    assert torch.equal(bits(case.run(implementation)), bits(case.y))


@implementations
def test_offsets_count_from_the_slab_even_if_it_lies_in_a_larger_tensor(implementation) -> None:
    case = LoraCase([[4]], [0], [3])
    expected = case.run(implementation)
    larger = torch.cat([torch.full((11,), torch.nan), case.slab])
    case.slab = larger[11:]
    assert torch.equal(case.run(implementation), expected)


@given(
    ranks=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_of_any_adapters(ranks: list[list[int]], data) -> None:
    slot = st.none() | st.integers(0, len(ranks) - 1)
    batch = data.draw(st.lists(st.tuples(slot, st.integers(0, 5)), max_size=8))
    slots, lengths = [s for s, _ in batch], [n for _, n in batch]
    for dtype in (FLOAT32, BFLOAT16):
        case = LoraCase(ranks, slots, lengths, 11, (6, 5), dtype)
        case.check(cpu)
        case.check(reference)


def test_the_public_operation_computes_the_same() -> None:
    case = LoraCase([[3, 0], [0, 5]], [1, None, 0], [2, 1, 2], 13, (7, 4))
    y = case.y.clone()
    add_lora(y, case.x, case.slab, case.table, case.starts, case.segments)
    exact, size = case.exact()
    assert ((y.double() - exact).abs() <= case.bound(cpu, size, exact)).all()


@pytest.mark.parametrize("wrong", ["rows", "x", "slab", "segments", "slices"])
def test_shapes_that_do_not_fit_are_refused_before_anything_is_written(wrong: str) -> None:
    case = LoraCase([[3]], [0], [4])
    y, x, slab = case.y.clone(), case.x, case.slab
    starts, segments = case.starts, case.segments
    if wrong == "rows":
        x = x[:3]
    elif wrong == "x":
        x = x[None]
    elif wrong == "slab":
        slab = slab[None]
    elif wrong == "segments":
        segments = LoraSegments((Segment(0, 5, 0),), 5)
    else:
        starts = [0, 28]
    with pytest.raises(ValueError, match=r"must|segments|slices"):
        add_lora(y, x, slab, case.table, starts, segments)
    assert torch.equal(y, case.y)


# --- grouping ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(0, 4)), max_size=12))
@settings(deadline=None)
def test_segments_are_the_rows_of_each_adapter_in_the_longest_runs(batch) -> None:
    slots, lengths = [s for s, _ in batch], [n for _, n in batch]
    grouped = group_rows(slots, lengths)
    rows = [slot for slot, length in batch for _ in range(length)]
    runs, start = [], 0
    for slot, run in itertools.groupby(rows):
        end = start + len(list(run))
        if slot is not None:
            runs.append(Segment(start, end, slot))
        start = end
    assert grouped == LoraSegments(tuple(runs), len(rows))


def test_as_many_lengths_as_sequences() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        group_rows([0, None], [1])


# --- attention --------------------------------------------------------------------------------


@dataclass
class AttentionCase:
    """Sequences as (context, queries): the last `queries` tokens of each are this step's rows."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int | None = None
    dtype: torch.dtype = FLOAT32
    spare_pages: int = 3

    def __post_init__(self) -> None:
        assert [q > 1 for _, q in self.sequences] == sorted(q > 1 for _, q in self.sequences)
        self.scale = self.head_dim**-0.5
        self.rows = sum(queries for _, queries in self.sequences)
        self.q = random(self.rows, self.heads, self.head_dim, seed=3, dtype=self.dtype)
        self.keys, self.values = [], []
        for i, (context, _) in enumerate(self.sequences):
            for seed, made in ((100 + i, self.keys), (200 + i, self.values)):
                shape = (context, self.kv_heads, self.head_dim)
                made.append(random(*shape, seed=seed, dtype=self.dtype))
        self._store()

    def _store(self) -> None:
        """K and V in shuffled pages; the pages of nobody hold NaN, the ends of pages are zero."""
        blocks = [-(-context // self.block_size) for context, _ in self.sequences]
        total = sum(blocks) + self.spare_pages
        order = torch.randperm(total, generator=torch.Generator().manual_seed(7)).tolist()
        shape = (total, self.block_size, self.kv_heads, self.head_dim)
        self.k_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        self.v_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        self.tables = []
        for i, (context, _) in enumerate(self.sequences):
            pages, order = order[: blocks[i]], order[blocks[i] :]
            self.tables.append(pages)
            for cache, tokens in ((self.k_cache, self.keys[i]), (self.v_cache, self.values[i])):
                cache[pages] = 0
                for position in range(context):
                    page = pages[position // self.block_size]
                    cache[page, position % self.block_size] = tokens[position]

    @property
    def batch(self) -> AttentionBatch:
        longest = max(map(len, self.tables))
        padded = [table + table[:1] * (longest - len(table)) for table in self.tables]
        contexts = [context for context, _ in self.sequences]
        places = [
            (table[p // self.block_size], p % self.block_size)
            for table, (context, queries) in zip(self.tables, self.sequences, strict=True)
            for p in range(context - queries, context)
        ]
        return AttentionBatch(
            query_starts=(0, *itertools.accumulate(queries for _, queries in self.sequences)),
            context_lens=tuple(contexts),
            num_decodes=sum(queries == 1 for _, queries in self.sequences),
            block_tables=torch.tensor(padded),
            context_lens_device=torch.tensor(contexts),
            kv_pages=torch.tensor([page for page, _ in places]),
            kv_offsets=torch.tensor([offset for _, offset in places]),
        )

    def exact(self) -> Tensor:
        """One row, one head at a time, in float64."""
        out, group = [], self.heads // self.kv_heads
        q = iter(self.q.double())
        for (context, queries), k, v in zip(self.sequences, self.keys, self.values, strict=True):
            for position in range(context - queries, context):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                seen, row = slice(first, position + 1), next(q)
                for head in range(self.heads):
                    keys, values = k[seen, head // group], v[seen, head // group]
                    weights = (keys.double() @ row[head] * self.scale).softmax(0)
                    out.append(weights @ values.double())
        return torch.stack(out).view(self.rows, self.heads, self.head_dim)

    def run(self, implementation) -> Tensor:
        return implementation.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.batch,
            scale=self.scale,
            sliding_window=self.window,
            softcap=None,
        )

    def bound(self) -> float:
        """Outputs are averages of V, so errors are relative to its largest element.

        float32: scores are sums of `head_dim` products and errors of scores are errors of the
        weights; 20 u is about six times what is seen. bfloat16: the weights and the result are
        rounded, each by at most u of its own size.
        """
        largest = max(float(v.abs().max()) for v in self.values)
        factor = {FLOAT32: 20, BFLOAT16: 1}[self.dtype]
        return factor * ROUNDOFF[self.dtype] * largest

    def check(self, implementation) -> None:
        got = self.run(implementation)
        assert got.dtype == self.dtype
        assert got.shape == self.q.shape
        error = float((got.double() - self.exact()).abs().max())
        assert error <= self.bound(), f"off by {error / self.bound():.2f} times the bound"


MIXED = [(1, 1), (9, 1), (33, 1), (4, 4), (17, 17), (30, 11), (21, 2)]


@implementations
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (14, 2), (1, 1)])
def test_grouped_query_ratios(implementation, dtype, heads: int, kv_heads: int) -> None:
    AttentionCase(MIXED, heads, kv_heads, dtype=dtype).check(implementation)


@implementations
@dtypes
@pytest.mark.parametrize("window", [1, 3, 4, 5, 12, 1000])
def test_sliding_windows(implementation, dtype, window: int) -> None:
    """Shorter than a page, a whole page, over pages, longer than every context."""
    AttentionCase(MIXED, window=window, dtype=dtype).check(implementation)


@implementations
@dtypes
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("head_dim", [8, 20])
def test_page_sizes(implementation, dtype, block_size: int, head_dim: int) -> None:
    case = AttentionCase(MIXED, head_dim=head_dim, block_size=block_size, dtype=dtype)
    case.check(implementation)


@implementations
@dtypes
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 1)],
        [(40, 1)],
        [(1, 1), (40, 1)],
        [(5, 1)] * 12,
        [(7, 7)],
        [(40, 7)],
        [(40, 39)],
        [(2, 2), (64, 3)],
    ],
    ids=str,
)
def test_decodes_prefills_and_chunks_alone(implementation, dtype, sequences) -> None:
    AttentionCase(sequences, dtype=dtype).check(implementation)


@implementations
@dtypes
def test_a_prompt_in_chunks_is_the_prompt_at_once(implementation, dtype) -> None:
    """Each chunk's rows within twice the bound of the same rows of the whole prompt."""
    whole = AttentionCase([(23, 23)], window=9, dtype=dtype)
    expected = whole.run(implementation)
    start = 0
    for queries in (1, 4, 11, 7):
        end = start + queries
        chunk = AttentionCase([(23, 23)], window=9, dtype=dtype)
        chunk.q, chunk.sequences = whole.q[start:end], [(end, queries)]
        error = (chunk.run(implementation).double() - expected[start:end].double()).abs().max()
        assert error <= 2 * whole.bound()
        start = end
    assert start == 23


@implementations
@dtypes
def test_other_sequences_change_nothing(implementation, dtype) -> None:
    """NaN in the K and V of every other sequence of the batch, decodes and prefills alike."""
    expected = AttentionCase(MIXED, dtype=dtype).run(implementation)
    rows = AttentionCase(MIXED, dtype=dtype).batch.query_starts
    for i in range(len(MIXED)):
        case = AttentionCase(MIXED, dtype=dtype)
        for other, pages in enumerate(case.tables):
            if other != i:
                case.k_cache[pages] = torch.nan
                case.v_cache[pages] = torch.inf
        got = case.run(implementation)
        mine = slice(rows[i], rows[i + 1])
        assert torch.equal(bits(got[mine]), bits(expected[mine]))


@implementations
@dtypes
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_nan_is_never_hidden(implementation, dtype, what: str) -> None:
    """A row that sees NaN is NaN, whatever the size: zeros would be answered as if they were right.

    torch's causal attention on the CPU gives zeros below 16 keys.
    """
    for tokens in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130):
        for queries in {1, tokens}:
            case = AttentionCase([(tokens, queries)], dtype=dtype)
            if what == "q":
                case.q[:, 0] = torch.nan
            else:
                cache = case.k_cache if what == "k" else case.v_cache
                cache[case.tables[0][0], 0] = torch.nan
            got = case.run(implementation)
            assert got[:, 0].isnan().all(), f"{queries} rows of {tokens} tokens"
            assert what != "q" or not got[:, 1:].isnan().any()


@given(
    decodes=st.lists(st.integers(1, 30), max_size=4),
    prefills=st.lists(st.tuples(st.integers(0, 20), st.integers(2, 12)), max_size=3),
    block_size=st.integers(1, 9),
    heads=st.sampled_from([(2, 1), (3, 3), (4, 2)]),
    window=st.none() | st.integers(1, 20),
)
@settings(max_examples=25, deadline=None)
def test_any_batch_of_any_sequences(decodes, prefills, block_size, heads, window) -> None:
    sequences = [(n, 1) for n in decodes] + [(before + n, n) for before, n in prefills]
    if not sequences:
        return
    for dtype in (FLOAT32, BFLOAT16):
        case = AttentionCase(sequences, *heads, 8, block_size, window, dtype)
        case.check(cpu)
        case.check(reference)


def test_the_public_attention_computes_the_same_and_checks_shapes() -> None:
    case = AttentionCase(MIXED, heads=6, kv_heads=3, window=6)
    arguments = (case.k_cache, case.v_cache, case.batch)
    got = paged_attention(case.q, *arguments, scale=case.scale, sliding_window=6)
    assert float((got - case.exact()).abs().max()) <= case.bound()
    with pytest.raises(ValueError, match="dim"):
        paged_attention(case.q[0], *arguments, scale=1.0)
    with pytest.raises(ValueError, match="multiple"):
        paged_attention(case.q[:, :4], *arguments, scale=1.0)


@dtypes
def test_k_and_v_are_written_where_the_batch_says_and_nowhere_else(dtype) -> None:
    case = AttentionCase(MIXED, dtype=dtype)
    batch = case.batch
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    k = random(case.rows, case.kv_heads, case.head_dim, seed=8, dtype=dtype)
    v = random(case.rows, case.kv_heads, case.head_dim, seed=9, dtype=dtype)
    write_kv(k, v, k_cache, v_cache, batch)
    places = list(zip(batch.kv_pages.tolist(), batch.kv_offsets.tolist(), strict=True))
    assert len(set(places)) == case.rows
    for row, (page, offset) in enumerate(places):
        assert torch.equal(k_cache[page, offset], k[row])
        assert torch.equal(v_cache[page, offset], v[row])
        k_cache[page, offset] = case.k_cache[page, offset]
        v_cache[page, offset] = case.v_cache[page, offset]
    assert torch.equal(bits(k_cache), bits(case.k_cache))
    assert torch.equal(bits(v_cache), bits(case.v_cache))
