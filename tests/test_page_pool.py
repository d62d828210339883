"""Pages of the slab: never owned twice, never lost, KV from the top, adapters best-fit from below.

The state machine keeps a plain list of owners beside the pool and recounts it after every call.
Windows, moves, floor and ceiling are in test_memory_pages.py.
"""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab


def holes(owners: list[object]) -> list[tuple[int, int]]:
    """(first page, length) of every maximal free run of the model, from the bottom."""
    found, page = [], 0
    for owner, group in groupby(owners):
        length = len(list(group))
        if owner is None:
            found.append((page, length))
        page += length
    return found


def longest(owners: list[object]) -> int:
    return max((length for _, length in holes(owners)), default=0)


class Pages(RuleBasedStateMachine):
    """Any order of takes, shares and frees.

    `owners[page]` is "kv", a run's number, or None; `tables[page]` how many block tables hold it.
    A page that no table holds any more is not free but cached, until it is given up.
    """

    pages = Bundle("pages")
    runs = Bundle("runs")

    @initialize(size=st.integers(1, 24))
    def start(self, size: int) -> None:
        self.pool = PagePool(size)
        self.owners: list[object] = [None] * size
        self.tables = [0] * size
        self.run_number = 0

    @rule(target=pages)
    def take_page(self):
        page = self.pool.take_page()
        free = [p for p, owner in enumerate(self.owners) if owner is None]
        if not free:
            assert page is None
            return multiple()
        assert page == free[-1], "not the highest free page"
        self.owners[page] = "kv"
        self.tables[page] = 1
        return page

    @rule(page=pages)
    def share_page(self, page: int) -> None:
        self.pool.share(page)
        self.tables[page] += 1

    @rule(page=pages)
    def release_page(self, page: int) -> None:
        if not self.tables[page]:
            with pytest.raises(RuntimeError):
                self.pool.release(page)
            return
        self.tables[page] -= 1
        assert self.pool.release(page) == (self.tables[page] == 0)

    @rule(page=consumes(pages))
    def free_page(self, page: int) -> None:
        while self.tables[page]:
            with pytest.raises(RuntimeError):
                self.pool.free_page(page)
            self.release_page(page)
        self.pool.free_page(page)
        self.owners[page] = None
        for call in (self.pool.free_page, self.pool.release, self.pool.share):
            with pytest.raises(RuntimeError):
                call(page)

    @rule(target=runs, length=st.integers(1, 10))
    def take_run(self, length: int):
        start = self.pool.take_run(length)
        fitting = [(size, first) for first, size in holes(self.owners) if size >= length]
        if not fitting:
            assert start is None
            return multiple()
        assert start == min(fitting)[1], "not the lowest of the smallest holes that fit"
        self.run_number += 1
        self.owners[start : start + length] = [self.run_number] * length
        return (start, length)

    @rule(run=consumes(runs))
    def free_run(self, run: tuple[int, int]) -> None:
        start, length = run
        self.pool.free_run(start, length)
        self.owners[start : start + length] = [None] * length
        with pytest.raises(RuntimeError):
            self.pool.free_run(start, length)

    @precondition(lambda self: "kv" in self.owners)
    @rule()
    def a_run_cannot_free_pages_of_kv(self) -> None:
        with pytest.raises(RuntimeError):
            self.pool.free_run(self.owners.index("kv"), 1)

    @precondition(lambda self: any(type(owner) is int for owner in self.owners))
    @rule()
    def kv_cannot_touch_pages_of_a_run(self) -> None:
        page = next(p for p, owner in enumerate(self.owners) if type(owner) is int)
        for call in (self.pool.free_page, self.pool.release, self.pool.share):
            with pytest.raises(RuntimeError):
                call(page)

    @invariant()
    def books_equal_a_recount(self) -> None:
        if not hasattr(self, "pool"):
            return
        kv = self.owners.count("kv")
        free = self.owners.count(None)
        held = sum(tables > 0 for tables in self.tables)
        assert self.pool.num_pages == len(self.owners)
        assert (self.pool.kv_pages, self.pool.cached_pages) == (held, kv - held)
        assert self.pool.free_pages == self.pool.kv_room == self.pool.adapter_room == free
        assert self.pool.adapter_pages == len(self.owners) - kv - free
        assert self.pool.reserved_pages == 0
        assert list(self.pool.holes()) == holes(self.owners)
        assert self.pool.longest_run() == longest(self.owners)
        for page, tables in enumerate(self.tables):
            assert self.pool.references(page) == tables

    def teardown(self) -> None:
        """Every page can be taken once the owners have given theirs back."""
        if not hasattr(self, "pool"):
            return
        for page, owner in enumerate(self.owners):
            if owner == "kv":
                self.free_page(page)
        for number in {owner for owner in self.owners if type(owner) is int}:
            self.pool.free_run(self.owners.index(number), self.owners.count(number))
        assert self.pool.take_run(len(self.owners)) == 0


TestPages = Pages.TestCase
TestPages.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_kv_and_adapters_grow_towards_each_other() -> None:
    pool = PagePool(6)
    assert [pool.take_page(), pool.take_page()] == [5, 4]
    assert pool.take_run(2) == 0
    assert pool.take_run(3) is None, "two pages are free, not three"
    assert pool.take_run(2) == 2
    assert pool.take_page() is None


def test_a_run_takes_the_smallest_hole_that_holds_it() -> None:
    pool = PagePool(12)
    starts = [pool.take_run(length) for length in (3, 1, 2, 1)]
    assert starts == [0, 3, 4, 6]
    pool.free_run(0, 3)  # holes: 0-2, 4-5 and 7-11
    pool.free_run(4, 2)
    assert pool.take_run(2) == 4
    assert pool.take_run(2) == 0
    assert pool.take_run(4) == 7


def test_a_run_that_is_only_partly_owned_is_refused_whole() -> None:
    pool = PagePool(4)
    pool.take_run(2)
    with pytest.raises(RuntimeError):
        pool.free_run(0, 3)
    assert pool.adapter_pages == 2
    assert pool.take_run(2) == 2, "the refused call has freed something"


@pytest.mark.parametrize("size", [0, 1, 7])
def test_an_empty_pool_gives_nothing(size: int) -> None:
    pool = PagePool(size)
    taken = [pool.take_page() for _ in range(size)]
    assert sorted(taken) == list(range(size))
    assert pool.take_page() is None
    assert pool.take_run(1) is None
    assert pool.longest_run() == 0


# --- block tables -----------------------------------------------------------------------------


def cache_of(pages: int, block_size: int = 4) -> tuple[PagePool, Slab, KVCache]:
    """A cache over pages of 8 elements, all NaN at first, as fresh memory may be."""
    pool = PagePool(pages)
    slab = Slab(torch.full((pages * 8,), torch.nan), pages, 8, block_size)
    return pool, slab, KVCache(pool, slab, Eviction(pool))


@given(tokens=st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_block_table_has_just_enough_pages_or_stays_as_it_is(tokens: list[int]) -> None:
    pool, _, cache = cache_of(8)
    table: list[int] = []
    for wanted in tokens:
        before = list(table)
        needed = max(len(before), -(-wanted // 4))
        if cache.grow(table, wanted):
            assert len(table) == needed
            assert table[: len(before)] == before
        else:
            assert needed > 8
            assert table == before
        assert len(set(table)) == len(table) == pool.kv_pages
    cache.release(table)
    assert table == []
    assert pool.free_pages == 8, "pages that the prefix cache never saw are not kept"


def test_a_page_is_cleared_for_each_new_owner() -> None:
    """NaN of an earlier owner, behind the end of a context, would pass through the softmax."""
    _, slab, cache = cache_of(2)
    table: list[int] = []
    assert cache.grow(table, 8)
    assert not slab.data.isnan().any()
    slab.data.fill_(torch.nan)
    cache.release(table)
    assert cache.grow(table, 1)
    page = slab.data.view(2, 8)[table[0]]
    assert torch.equal(page, torch.zeros(8))
