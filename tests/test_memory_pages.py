"""The pool of pages and everything in it, against a model that knows what should lie where.

The slab is a real tensor, so that a page that moved without its table, or an adapter without
its offsets, shows as wrong content.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorad.adapters.weights import AdapterWeights
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.relocation import adapters_to_slide, best_window
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import AdapterLayout, SliceLayout

ELEMENTS, BLOCK = 8, 4


class Memory:
    """All parts of one slab, as `build_engine` puts them together, and a clock to turn."""

    def __init__(self, pages: int, *, pages_per_step: int = 3, **limits):
        self.now = 0.0
        data = torch.zeros(pages * ELEMENTS)
        self.slab = Slab(data, pages, ELEMENTS, BLOCK)
        self.pool = PagePool(pages, **limits)
        self.eviction = Eviction(self.pool, clock=self.clock)
        self.kv = KVCache(self.pool, self.slab, self.eviction)
        self.adapters = AdapterPool(
            self.pool,
            self.slab,
            self.eviction,
            self.kv,
            moved_bytes_per_step=pages_per_step * self.slab.page_bytes,
        )

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def upload(self, weights: AdapterWeights) -> str:
        """Ask step after step until it is there or cannot be."""
        for _ in range(self.pool.num_pages + 1):
            self.adapters.relocator.begin_step()
            state = self.adapters.upload(weights)
            if state != "moving":
                return state
        raise AssertionError("a run that never gets ready")


def adapter(digest: str, pages: int, seed: float) -> AdapterWeights:
    layout = AdapterLayout(
        (((SliceLayout(1, 0.5, 0, 3),),),), pages * ELEMENTS * 4, pages * ELEMENTS * 4, 1
    )
    data = torch.arange(pages * ELEMENTS, dtype=torch.float32) + seed
    return AdapterWeights(digest, layout, data)


class Sequence:
    def __init__(self, memory: Memory, number: int, owner: str | None, salt: str, tokens):
        self.memory, self.owner, self.salt = memory, owner, salt
        self.tokens = list(tokens)
        self.table: list[int] = []
        self.chain = memory.kv.chain(owner, salt)
        self.own = -1.0 - number  # what its unfinished block holds

    def begin(self) -> bool:
        cached = self.memory.kv.attach(self.table, self.chain, self.tokens)
        assert cached < len(self.tokens)
        self.check()  # found blocks hold what they should
        if not self.memory.kv.grow(self.table, len(self.tokens)):
            self.memory.kv.release(self.table)
            return False
        self.write(cached // BLOCK)
        return True

    def content(self, block: int) -> float:
        end = (block + 1) * BLOCK
        if end > len(self.tokens):
            return self.own
        return float(hash((self.owner, self.salt, *self.tokens[:end])) % 2**20)

    def write(self, first: int) -> None:
        for block in range(first, len(self.table)):
            page = self.table[block] * ELEMENTS
            self.memory.slab.data[page : page + ELEMENTS] = self.content(block)

    def check(self) -> None:
        for block, page in enumerate(self.table):
            held = self.memory.slab.data[page * ELEMENTS : (page + 1) * ELEMENTS]
            assert bool((held == self.content(block)).all()), f"block {block} on page {page}"


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(24, adapter_floor=2, adapter_ceiling=20)
        self.sequences: list[Sequence] = []
        self.loaded: dict[str, AdapterWeights] = {}
        self.users: dict[str, int] = {}
        self.made = 0

    # --- sequences ---

    @rule(
        owner=st.sampled_from([None, "a0", "a1"]),
        salt=st.sampled_from(["", "t"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    )
    def start(self, owner, salt, tokens):
        self.made += 1
        sequence = Sequence(self.memory, self.made, owner, salt, tokens)
        if sequence.begin():
            self.sequences.append(sequence)
        else:
            assert sequence.table == []

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(1, 9))
    def decode(self, data, more):
        sequence = data.draw(st.sampled_from(self.sequences))
        written = len(sequence.tokens) // BLOCK
        if not self.memory.kv.grow(sequence.table, len(sequence.tokens) + more):
            return
        sequence.tokens += [data.draw(st.integers(0, 1)) for _ in range(more)]
        sequence.write(written)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def prove(self, data):
        s = data.draw(st.sampled_from(self.sequences))
        self.memory.kv.remember(s.table, s.chain, s.tokens, len(s.tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.memory.kv.release(sequence.table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def poison(self, data):
        """Its blocks hold NaN: whoever finds them later is caught by `check`."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        pages = list(sequence.table)
        self.memory.kv.discard(sequence.table)
        for page in pages:
            if not self.memory.pool.references(page):
                self.memory.slab.data[page * ELEMENTS : (page + 1) * ELEMENTS] = torch.nan

    # --- adapters ---

    @rule(name=st.integers(0, 5), pages=st.integers(1, 9))
    def ask_once(self, name, pages):
        """One step of a load, which may leave a window half cleared."""
        digest = f"a{name}"
        if digest not in self.memory.adapters:
            weights = adapter(digest, pages, float(self.made))
            self.memory.adapters.relocator.begin_step()
            if self.memory.adapters.upload(weights) == "ready":
                self.loaded[digest] = weights

    @rule(name=st.integers(0, 5), pages=st.integers(1, 14))
    def load(self, name, pages):
        digest, pool = f"a{name}", self.memory.pool
        if digest in self.memory.adapters:
            return
        self.memory.adapters.relocator.cancel()
        must_fit = pages <= pool.adapter_room
        weights = adapter(digest, pages, 1000.0 * name + self.made)
        state = self.memory.upload(weights)
        assert state in ("ready", "no_room")
        assert state == "ready" or not must_fit, "pages are free and the adapter does not load"
        if state == "ready":
            self.loaded[digest] = weights

    @precondition(lambda self: self.memory.adapters.resident())
    @rule(data=st.data())
    def acquire(self, data):
        digest = data.draw(st.sampled_from(sorted(d.digest for d in self.residents())))
        self.memory.adapters.acquire(digest)
        self.users[digest] = self.users.get(digest, 0) + 1

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data):
        used = sorted(d for d, n in self.users.items() if n)
        digest = data.draw(st.sampled_from(used))
        self.users[digest] -= 1
        self.memory.adapters.release(digest)

    @rule()
    def unload_idle(self):
        for resident in self.residents():
            if not resident.users:
                self.memory.adapters.remove(resident.digest)
                return

    def residents(self):
        return self.memory.adapters.resident()

    # --- what always holds ---

    @invariant()
    def content_is_right(self):
        for sequence in self.sequences:
            sequence.check()
        for resident in self.residents():
            weights = self.loaded[resident.digest]
            start = resident.first_page * ELEMENTS
            held = self.memory.slab.data[start : start + weights.data.numel()]
            assert torch.equal(held, weights.data)
            factors = resident.factors[0][0][0]
            assert (factors.a_offset, factors.b_offset) == (start, start + 3)

    @invariant()
    def nothing_in_use_left(self):
        for digest, users in self.users.items():
            if users:
                assert self.memory.adapters.get(digest).users == users

    @invariant()
    def books_equal_a_recount(self):
        pool, owners = self.memory.pool, self.memory.pool.owners()
        held: dict[int, int] = {}
        for sequence in self.sequences:
            for page in sequence.table:
                held[page] = held.get(page, 0) + 1
        for page, owner in enumerate(owners):
            assert pool.references(page) == held.get(page, 0)
            assert owner == 1 or page not in held
        assert pool.kv_pages == len(held)
        assert pool.kv_pages + pool.cached_pages == owners.count(1)
        assert pool.adapter_pages == owners.count(2) == sum(r.num_pages for r in self.residents())
        assert pool.reserved_pages == owners.count(3)
        assert pool.free_pages == owners.count(0)
        assert pool.kv_pages + pool.cached_pages <= 22
        assert pool.adapter_pages + pool.reserved_pages <= 20
        assert pool.runs() == sorted((r.first_page, r.num_pages) for r in self.residents())
        assert len(self.memory.kv._prefixes) >= pool.cached_pages


TestMemory = Machine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- relocation ---------------------------------------------------------------------------------


def test_the_window_with_the_fewest_kv_pages_is_chosen():
    #       0  1  2  3  4  5  6  7  8  9
    owners = bytes([0, 1, 1, 0, 2, 0, 1, 0, 0, 1])
    assert best_window(owners, 3) == range(7, 10) or best_window(owners, 3) == range(5, 8)
    assert best_window(owners, 4) in (range(5, 9),)
    assert best_window(owners, 6) is None, "the adapter on page 4 is in the way"


def test_adapters_slide_only_when_no_window_is_long_enough_and_the_fewest_pages_of_them():
    pool = PagePool(20)
    lengths = [2, 5, 1, 3, 2, 4, 3]
    starts = [pool.take_run(length) for length in lengths]
    for i in (0, 2, 4, 6):  # gaps of 2, 1, 2 and 3 between adapters of 5, 3 and 4 pages
        pool.free_run(starts[i], lengths[i])
    assert best_window(pool.owners(), 5) is None
    assert adapters_to_slide(pool, 5) == [starts[5]]
    assert adapters_to_slide(pool, 3) == [starts[3]]
    assert adapters_to_slide(pool, 8) == [starts[1], starts[3], starts[5]]


def test_shared_pages_move_over_several_steps_and_every_table_is_patched():
    memory = Memory(12, pages_per_step=1)
    tokens = list(range(5 * BLOCK))
    first, filler = (Sequence(memory, i, None, "", []) for i in range(2))
    for block in range(5):  # their pages alternate
        for sequence in (first, filler):
            sequence.tokens = tokens[: (block + 1) * BLOCK]
            assert memory.kv.grow(sequence.table, len(sequence.tokens))
            sequence.write(block)
    memory.kv.release(filler.table)
    memory.kv.remember(first.table, first.chain, tokens, len(tokens))
    second = Sequence(memory, 2, None, "", [*tokens[: 4 * BLOCK], 0])
    assert second.begin()
    assert second.table[:4] == first.table[:4]
    assert memory.pool.longest_run() < 6 <= memory.pool.free_pages
    before, states = list(first.table), []
    while not states or states[-1] == "moving":
        memory.adapters.relocator.begin_step()
        states.append(memory.adapters.upload(adapter("big", 6, 7.0)))
        first.check()
        second.check()
    assert states == ["moving", "ready"]
    assert memory.adapters.relocator.moved_pages == 2
    assert first.table != before
    assert second.table[:4] == first.table[:4]


def test_a_window_nobody_asks_for_any_more_is_given_back():
    memory = Memory(12, pages_per_step=1)
    sequences = [Sequence(memory, i, None, str(i), [i] * BLOCK) for i in range(10)]
    assert all(s.begin() for s in sequences)
    for s in sequences[::2]:
        memory.kv.release(s.table)
    assert memory.pool.longest_run() < 5 <= memory.pool.free_pages
    memory.adapters.relocator.begin_step()
    assert memory.adapters.upload(adapter("a", 5, 0.0)) == "moving"
    assert memory.pool.reserved_pages > 0
    memory.adapters.relocator.begin_step()
    memory.adapters.relocator.begin_step()
    assert (memory.pool.reserved_pages, memory.pool.free_pages) == (0, 7)


def test_a_window_can_be_given_up_once():
    """Who needs pages now asks until there is no window to take them from."""
    memory = Memory(12, pages_per_step=1)
    sequences = [Sequence(memory, i, None, str(i), [i] * BLOCK) for i in range(10)]
    assert all(s.begin() for s in sequences)
    for s in sequences[::2]:
        memory.kv.release(s.table)
    assert memory.adapters.upload(adapter("a", 5, 0.0)) == "moving"
    assert memory.adapters.relocator.cancel()
    assert not memory.adapters.relocator.cancel()
    assert memory.pool.free_pages == 7


# --- floor, ceiling, price ----------------------------------------------------------------------


def test_the_floor_keeps_pages_for_adapters_and_the_ceiling_keeps_them_from_the_rest():
    memory = Memory(10, adapter_floor=3, adapter_ceiling=5)
    assert not Sequence(memory, 0, None, "", [0] * 8 * BLOCK).begin()
    assert Sequence(memory, 1, None, "", [0] * 7 * BLOCK).begin()
    assert memory.upload(adapter("a", 3, 0.0)) == "ready"
    other = Memory(10, adapter_ceiling=5)
    assert other.upload(adapter("big", 6, 0.0)) == "no_room"
    assert other.upload(adapter("a", 3, 0.0)) == "ready"
    assert other.upload(adapter("b", 3, 0.0)) == "ready"
    assert [r.digest for r in other.adapters.resident()] == ["b"], "a had to leave for b"
    assert other.eviction.counts == {("adapter", "adapter"): 1}


def test_at_its_limit_kv_takes_nothing_from_adapters_that_would_not_help_it():
    memory = Memory(10, adapter_floor=3)
    assert memory.upload(adapter("a", 2, 0.0)) == "ready"
    assert Sequence(memory, 0, None, "", [0] * 5 * BLOCK).begin()
    cached(memory, None, [1] * BLOCK)
    assert Sequence(memory, 1, None, "", [2] * 2 * BLOCK).begin()
    assert memory.eviction.counts == {("prefix", "kv"): 1}
    assert "a" in memory.adapters


def test_nothing_is_evicted_for_one_who_would_not_fit_even_so():
    memory = Memory(10)
    assert Sequence(memory, 0, None, "", [0] * 4 * BLOCK).begin()
    cached(memory, None, [1] * 2 * BLOCK)
    memory.upload(adapter("a", 1, 0.0))
    assert memory.upload(adapter("big", 7, 0.0)) == "no_room"
    assert not memory.eviction.counts
    assert memory.upload(adapter("big", 6, 0.0)) == "ready"


def test_adapters_that_lie_scattered_slide_together_with_their_content():
    memory = Memory(16, pages_per_step=1)
    held = {f"a{i}": adapter(f"a{i}", 2, 100.0 * i) for i in range(8)}
    for weights in held.values():
        assert memory.upload(weights) == "ready"
    for i in (0, 2, 4, 6):
        memory.adapters.remove(f"a{i}")
    sequence = Sequence(memory, 0, None, "", [3] * BLOCK)
    assert sequence.begin()
    assert memory.pool.longest_run() == 2
    assert memory.upload(adapter("big", 7, 5.0)) == "ready"
    sequence.check()
    assert memory.adapters.relocator.moved_runs >= 3
    for i in (1, 3, 5, 7):
        resident = memory.adapters.get(f"a{i}")
        start = resident.first_page * ELEMENTS
        assert resident.factors[0][0][0].a_offset == start
        assert torch.equal(memory.slab.data[start : start + 2 * ELEMENTS], held[f"a{i}"].data)


def cached(memory: Memory, owner: str | None, tokens: list[int]) -> None:
    sequence = Sequence(memory, 0, owner, "", tokens)
    assert sequence.begin()
    memory.kv.remember(sequence.table, sequence.chain, tokens, len(tokens))
    memory.kv.release(sequence.table)


def test_what_costs_least_to_get_back_leaves_first():
    """An adapter of one page against one cached block, equally wanted."""
    for token_seconds, left in ((1e-12, "prefix"), (1e-3, "adapter")):
        memory = Memory(4)
        memory.eviction.kv_token_seconds = token_seconds
        memory.now = 0.0
        memory.clock = lambda: 0.0
        memory.eviction.clock = memory.clock
        assert memory.upload(adapter("a", 1, 0.0)) == "ready"
        cached(memory, None, [1] * BLOCK)
        assert memory.eviction.free_for_kv(3)
        assert memory.eviction.counts == {(left, "kv"): 1}


def test_cached_blocks_in_a_reserved_window_are_no_room_for_others():
    """Given up, their pages are the adapter's for which the window is being cleared."""
    memory = Memory(6)
    cached(memory, None, [1] * 2 * BLOCK)  # pages 5 and 4
    memory.pool.reserve(range(1, 6))
    assert memory.pool.promised_pages == 2
    assert not memory.eviction.free_for_kv(2)
    assert not memory.eviction.counts, "evicted for one who gets nothing"
    assert memory.eviction.free_for_kv(1)
    memory.pool.cancel_window()
    assert memory.pool.promised_pages == 0
    assert memory.eviction.free_for_kv(6)


def test_cached_blocks_in_a_reserved_window_count_towards_the_ceiling_of_adapters():
    """As pages that are the window's adapter's already: they would be, once given up."""
    memory = Memory(20, adapter_ceiling=10)
    assert memory.upload(adapter("used", 2, 0.0)) == "ready"
    memory.adapters.acquire("used")
    cached(memory, None, [1] * 15 * BLOCK)
    memory.pool.reserve(range(2, 8))
    assert memory.pool.promised_pages == 3
    assert not memory.eviction.free_for_adapter(3)
    assert not memory.eviction.counts
    assert memory.eviction.free_for_adapter(2)


def test_the_blocks_of_an_adapter_that_left_go_before_all_others():
    memory = Memory(8)
    memory.upload(adapter("a", 1, 0.0))
    cached(memory, None, [1] * BLOCK)
    cached(memory, "a", [2] * BLOCK)
    assert memory.kv.price() > float("-inf")
    memory.adapters.remove("a")
    assert memory.kv.price() == float("-inf")
    memory.kv.evict()
    found: list[int] = []
    assert memory.kv.attach(found, memory.kv.chain(None, ""), [1] * BLOCK + [0]) == BLOCK
    memory.kv.release(found)
    assert memory.kv.attach([], memory.kv.chain("a", ""), [2] * BLOCK + [0]) == 0


def test_a_block_never_outlives_those_before_it():
    memory = Memory(16)
    cached(memory, None, [1] * 3 * BLOCK)
    cached(memory, None, [1] * 2 * BLOCK + [2] * 3 * BLOCK)
    lengths = []
    while memory.kv.price() is not None:
        reachable = set()
        for tail in ([1] * 3 * BLOCK, [1] * 2 * BLOCK + [2] * 3 * BLOCK):
            table: list[int] = []
            memory.kv.attach(table, memory.kv.chain(None, ""), [*tail, 0])
            reachable |= set(table)
            memory.kv.release(table)
        lengths.append(len(reachable))
        assert len(reachable) == len(memory.kv._prefixes)
        memory.kv.evict()
    assert lengths == sorted(lengths, reverse=True)


# --- fragmentation ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_after_random_traffic_an_adapter_that_fits_always_loads(seed):
    """Loads, unloads and sequences at random; the slab is full most of the time."""
    choose = random.Random(seed)
    memory = Memory(256, pages_per_step=16)
    tables: list[list[int]] = []
    fitted = 0
    for i in range(4000):
        action = choose.random()
        if action < 0.4:
            table: list[int] = []
            if memory.kv.grow(table, choose.randint(1, 12) * BLOCK):
                tables.append(table)
        elif action < 0.7 and tables:
            memory.kv.release(tables.pop(choose.randrange(len(tables))))
        elif action < 0.9:
            pages = choose.choice([1, 2, 4, 8, 16, 32])
            fits = pages <= memory.pool.adapter_room
            state = memory.upload(adapter(f"a{i}", pages, 0.0))
            if state == "ready" and choose.random() < 0.7:
                memory.adapters.acquire(f"a{i}")
            assert state == "ready" or not fits
            fitted += fits
        else:
            used = [r for r in memory.adapters.resident() if r.users]
            if used:
                memory.adapters.release(choose.choice(used).digest)
    assert fitted > 100
    assert memory.adapters.relocator.moved_pages > 0
