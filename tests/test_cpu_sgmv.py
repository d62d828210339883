"""LoRA of long segments on the matrix unit, against float64, and bit for bit against itself."""

from __future__ import annotations

import pytest
import torch
from lorad_kernels import add_lora, cpu_sgmv, cpu_tiles, group_rows, long_rows
from lorad_kernels.factors import FactorTable

from lora_factors import UNIT, RandomAdapters

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not cpu_tiles.available(), reason="needs a processor with AMX")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(2)


def serves(adapters: RandomAdapters) -> bool:
    x, y = (
        torch.zeros(1, adapters.width, dtype=BF16),
        torch.zeros(1, sum(adapters.outs), dtype=BF16),
    )
    odd = FactorTable.of(adapters.table).odd_slots
    return not odd and cpu_sgmv.serves(y, x, adapters.slab, adapters.starts)


def check(adapters: RandomAdapters, slots: list[int | None], lengths: list[int]) -> None:
    rows = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    x = torch.randn(len(rows), adapters.width).to(BF16)
    y = torch.randn(len(rows), sum(adapters.outs)).to(BF16)
    want, size = adapters.expected(y, x, rows)
    got = y.clone()
    segments = group_rows(slots, lengths, 10)
    assert segments.long
    add_lora(got, x, adapters.slab, adapters.table, adapters.starts, segments)
    # One rounding of y; x A^T is kept to 16 bits.
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 2**-14 * size).all()
    base = torch.tensor([slot is None for slot in rows])
    assert torch.equal(got[base], y[base])


@pytest.mark.parametrize("rank", [2, 6, 8, 16, 30, 32, 64, 100, 512])
@pytest.mark.parametrize("outs", [[16], [64, 32], [80, 16, 144]])
def test_lora_is_exact_to_one_rounding(rank, outs):
    adapters = RandomAdapters([rank, 0, 4], 96, outs, BF16, align=16)
    assert serves(adapters)
    check(adapters, [None, 0, 1, 2, 0, None, 0], [3, 17, 11, 64, 65, 12, 130])


def test_short_and_long_segments_of_one_batch():
    check(RandomAdapters([8, 16], 64, [48], BF16, align=16), [0, 1, 0, 1], [1, 3, 40, 70])


def test_one_hot_segment_of_10_000_rows_among_64_small_ones():
    lengths = [*[11] * 32, 10_000, *[20] * 32]
    check(RandomAdapters([4] * 65, 32, [48], BF16, align=16), list(range(65)), lengths)


def test_a_row_has_the_same_bits_in_any_batch():
    adapters = RandomAdapters([8, 48], 64, [80], BF16, align=16)
    slots, lengths = [0, 1, 0], [70, 33, 129]
    x, y = torch.randn(232, 64).to(BF16), torch.randn(232, 80).to(BF16)

    def run(first: int, count: int, slots: list[int], lengths: list[int]) -> torch.Tensor:
        got = y[first : first + count].clone()
        segments = group_rows(slots, lengths, 10)
        add_lora(got, x[first : first + count], adapters.slab, adapters.table, [0, 80], segments)
        return got

    together = run(0, 232, slots, lengths)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(run(70, 33, [1], [33]), together[70:103])
        # In two chunks that no tile ends with.
        parts = [run(103, 50, [0], [50]), run(153, 79, [0], [79])]
        assert torch.equal(torch.cat(parts), together[103:])


def test_an_adapter_that_does_not_fit_tiles_changes_no_other():
    alone = RandomAdapters([8], 64, [48], BF16, align=16)
    torch.manual_seed(7)
    beside = RandomAdapters([8, 3], 64, [48], BF16, align=16)
    x, y = torch.randn(171, 64).to(BF16), torch.randn(171, 48).to(BF16)
    want, got = y[:100].clone(), y.clone()
    add_lora(want, x[:100], alone.slab, alone.table, [0, 48], group_rows([0], [100], 10))
    for lengths in ([100, 71], [100, 1, 70]):
        got = y.clone()
        segments = group_rows([0, *[1] * (len(lengths) - 1)], lengths, 10)
        add_lora(got, x, beside.slab, beside.table, [0, 48], segments)
        assert torch.equal(got[:100], want)
        odd, size = beside.expected(y, x, [0] * 100 + [1] * 71)
        # torch rounds x A^T to the dtype as well.
        assert ((got.double() - odd).abs() <= 3 * UNIT[BF16] * size).all()


@pytest.mark.parametrize(
    ("ranks", "width", "outs", "align"),
    [([3], 64, [32], 16), ([4], 48, [32], 16), ([4], 64, [40], 16), ([4], 64, [32], 1)],
    ids=["odd rank", "width", "columns", "offsets"],
)
def test_what_does_not_fit_tiles_is_computed_all_the_same(ranks, width, outs, align):
    adapters = RandomAdapters(ranks, width, outs, BF16, align)
    assert not serves(adapters)
    rows = [0] * 40
    x, y = torch.randn(40, width).to(BF16), torch.randn(40, sum(outs)).to(BF16)
    want, size = adapters.expected(y, x, rows)
    add_lora(y, x, adapters.slab, adapters.table, adapters.starts, group_rows([0], [40], 10))
    # torch rounds x A^T to the dtype as well.
    assert ((y.double() - want).abs() <= 3 * UNIT[BF16] * size).all()


def test_prompts_of_bfloat16_are_long_sooner():
    cpu = torch.device("cpu")
    assert long_rows(cpu, BF16) < long_rows(cpu, torch.float32)
