"""Adapters in the slab: their bytes, their offsets, and who may be evicted when.

What leaves first is decided by one price: here all adapters cost the same to bring back, so it
is use alone that counts, how often and how lately. Moves are in test_memory_pages.py as well.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lorad_kernels import LoraFactors
from safetensors.torch import load_file
from torch import Tensor

from lorad.adapters.weights import AdapterWeights, read_weights
from lorad.memory.adapter_pool import AdapterPool, ResidentAdapter
from lorad.memory.eviction import HALF_LIFE, Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import pack_adapter, uniform_modules
from lorad.sizing.model_shape import ModelShape, read_config

SHAPE = ModelShape(
    model_type="llama",
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=40,
    vocab_size=32,
)
BLOCK = 4
PAGE_ELEMENTS = BLOCK * SHAPE.kv_elements_per_token


class Memory:
    """Pool, slab, K and V, and adapters; garbage everywhere: what is read must have been written.

    `now` is the time of all uses; it goes on by a second with every upload and acquire.
    """

    def __init__(self, pages: int, dtype: torch.dtype = torch.float32) -> None:
        data = torch.full((pages * PAGE_ELEMENTS,), torch.nan, dtype=dtype)
        self.slab = Slab(data, pages, PAGE_ELEMENTS, BLOCK)
        self.pool = PagePool(pages)
        self.now = 0.0
        self.eviction = Eviction(self.pool, clock=lambda: self.now)
        self.kv = KVCache(self.pool, self.slab, self.eviction)
        self.adapters = AdapterPool(self.pool, self.slab, self.eviction, self.kv)
        self.evicted: list[str] = []
        self.adapters.on_evicted = self.evicted.append

    def upload(self, weights: AdapterWeights) -> str:
        """Ask, step after step, until it is there or has no room."""
        self.now += 1.0
        for _ in range(self.pool.num_pages + 1):
            self.adapters.relocator.begin_step()
            state = self.adapters.upload(weights)
            if state != "moving":
                return state
        raise AssertionError("it never got its run")

    def acquire(self, digest: str) -> ResidentAdapter:
        self.now += 1.0
        return self.adapters.acquire(digest)

    def use(self, digest: str) -> None:
        self.acquire(digest)
        self.adapters.release(digest)

    def evict(self) -> str | None:
        """Let the idle adapter that is worth least go, as the eviction does."""
        if self.adapters.price() is None:
            return None
        self.adapters.evict()
        return self.evicted[-1]

    @property
    def digests(self) -> str:
        return "".join(sorted(adapter.digest for adapter in self.adapters.resident()))


def weights(name: str, rank: int = 1, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """An adapter of a rank on three linears; rank r takes ceil(r * 1.2) or so pages."""
    layout = pack_adapter(
        SHAPE, uniform_modules(SHAPE, ("q_proj", "v_proj", "up_proj"), rank), dtype.itemsize
    )
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode()[-4:]))
    data = torch.randn(layout.nbytes // dtype.itemsize, generator=generator).to(dtype)
    return AdapterWeights(name, layout, data)


def pages_of(name_rank: AdapterWeights, slab: Slab) -> int:
    return -(-name_rank.nbytes // slab.page_bytes)


def resident_bytes(slab: Slab, adapter: ResidentAdapter) -> Tensor:
    start = adapter.first_page * slab.page_elements
    itemsize = slab.data.element_size()
    return slab.data[start : start + adapter.layout.nbytes // itemsize]


def factor_objects() -> int:
    return sum(isinstance(thing, LoraFactors) for thing in gc.get_objects())


def test_only_adapters_in_use_hold_an_object_for_each_matrix() -> None:
    """With hundreds on the device a garbage collection would otherwise hold the steps up."""
    memory = Memory(32)
    memory.upload(weights("a"))
    memory.upload(weights("b"))
    before = factor_objects()
    adapter = memory.acquire("a")
    memory.acquire("a")
    assert adapter.factors is adapter.factors
    assert factor_objects() == before + 2 * 7
    memory.adapters.release("a")
    assert factor_objects() == before + 2 * 7
    memory.adapters.release("a")
    assert factor_objects() == before


# --- bytes and offsets ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_upload_copies_the_packed_factors_and_nothing_else(dtype: torch.dtype) -> None:
    memory = Memory(40, dtype)
    slab, table = memory.slab, []
    assert memory.kv.grow(table, 3 * BLOCK)
    wanted = [weights(f"a{rank}", rank, dtype) for rank in (1, 3, 8)]
    for each in wanted:
        assert memory.upload(each) == "ready"
    taken = set(table)
    for each in wanted:
        adapter = memory.adapters.get(each.digest)
        assert torch.equal(resident_bytes(slab, adapter), each.data)
        assert adapter.num_pages == pages_of(each, slab)
        run = set(range(adapter.first_page, adapter.first_page + adapter.num_pages))
        assert not run & taken, "two owners share a page"
        taken |= run
    views = slab.data.view(40, PAGE_ELEMENTS)
    assert not views[table].any(), "an upload wrote into pages of KV"
    free = sorted(set(range(40)) - taken)
    assert views[free].isnan().all(), "an upload wrote into free pages"


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_views_through_the_factors_are_what_peft_saved(rank, tiny_model, random_adapter, tmp_path):
    """Every A and B, by PEFT's own names, at the offsets that the kernels are given."""
    model_dir = tiny_model("qwen3")
    directory = random_adapter(
        model_dir, tmp_path / "a", rank, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    )
    saved = load_file(directory / "adapter_model.safetensors")
    shape = ModelShape.from_config(read_config(model_dir))
    slab = Slab.allocate(shape, 64, 16, torch.float32, torch.device("cpu"))
    pool = PagePool(64)
    pool.take_run(3)  # so that the adapter does not begin at 0
    packed = read_weights(directory, "sha256:a", shape, torch.float32)
    eviction = Eviction(pool)
    adapters = AdapterPool(pool, slab, eviction, KVCache(pool, slab, eviction))
    assert adapters.upload(packed) == "ready"
    adapter = adapters.get("sha256:a")

    seen = 0
    for layer, projections in enumerate(adapter.factors):
        for projection, slices in zip(shape.projections, projections, strict=True):
            for part, factors in zip(projection.slices, slices, strict=True):
                path = f"base_model.model.model.layers.{layer}.{projection.parent}.{part.leaf}"
                a = saved.get(f"{path}.lora_A.weight")
                if a is None:
                    assert factors.rank == 0
                    continue
                b = saved[f"{path}.lora_B.weight"]
                assert (factors.rank, factors.scaling) == (rank, 2.0)
                assert torch.equal(slab.data[factors.a_offset :][: a.numel()].view(a.shape), a)
                assert torch.equal(slab.data[factors.b_offset :][: b.numel()].view(b.shape), b)
                seen += 2
    assert seen == len(saved) == 2 * 2 * 5


def test_an_adapter_leaves_kv_of_the_same_pages_clean() -> None:
    """Pages go from an adapter to KV and back; neither reads what the other left."""
    memory = Memory(16)
    first, table = weights("first", 4), []
    size = pages_of(first, memory.slab)
    assert size > 3
    assert memory.upload(first) == "ready"
    memory.adapters.acquire("first")
    assert not memory.kv.grow(table, 16 * BLOCK)
    memory.adapters.release("first")
    assert memory.adapters.remove("first") == size
    assert memory.kv.grow(table, 16 * BLOCK)
    assert not memory.slab.data.any(), "K and V would see the adapter's bytes"
    memory.slab.data.fill_(7.0)
    memory.kv.release(table)
    assert memory.upload(first) == "ready"
    assert torch.equal(resident_bytes(memory.slab, memory.adapters.get("first")), first.data)


# --- who goes, who stays ----------------------------------------------------------------------


def filled(names: str) -> tuple[Memory, int]:
    """A slab in which these adapters of equal size just fit; each takes the returned pages."""
    size = pages_of(weights("x", 4), Memory(1).slab)
    memory = Memory(len(names) * size)
    for name in names:
        assert memory.upload(weights(name, 4)) == "ready"
    return memory, size


def test_of_those_used_as_often_the_one_used_longest_ago_goes_first() -> None:
    memory, _ = filled("abc")
    for name in "bca":
        memory.now += 100.0
        memory.use(name)
    assert [memory.evict() for _ in range(4)] == ["b", "c", "a", None]


def test_one_that_was_used_more_often_stays_longer() -> None:
    """Not plain LRU: `a` was used before `d` and `e` came, and outlives them."""
    memory, _ = filled("abc")
    memory.use("a")
    assert memory.upload(weights("d", 4)) == "ready"
    assert memory.digests == "acd"
    assert memory.upload(weights("e", 4)) == "ready"
    assert memory.digests == "ade"
    assert [memory.evict() for _ in range(4)] == ["d", "e", "a", None]


def test_what_was_used_often_is_forgotten_in_time() -> None:
    memory, _ = filled("ab")
    for _ in range(4):
        memory.use("a")
    memory.now += 3 * HALF_LIFE
    memory.use("b")
    assert memory.evict() == "a"


def test_a_request_counts_as_use_when_it_begins() -> None:
    """In which order requests end does not matter: each is one use, of one time."""
    memory, _ = filled("ab")
    memory.acquire("a")
    memory.acquire("b")
    memory.adapters.release("b")
    memory.adapters.release("a")
    assert memory.evict() == "a"


def test_an_adapter_in_use_is_never_evicted() -> None:
    memory, _ = filled("ab")
    memory.acquire("a")
    memory.acquire("a")
    memory.adapters.release("a")
    assert memory.upload(weights("c", 4)) == "ready"
    assert memory.digests == "ac"
    memory.acquire("c")
    assert memory.upload(weights("d", 4)) == "no_room"
    assert memory.evict() is None
    with pytest.raises(RuntimeError):
        memory.adapters.remove("a")
    assert memory.digests == "ac"
    memory.adapters.release("a")
    assert memory.upload(weights("d", 4)) == "ready"
    assert memory.digests == "cd"


def test_a_pinned_adapter_stays_until_it_is_unpinned() -> None:
    memory, _ = filled("ab")
    memory.adapters.pin("a", True)
    assert memory.upload(weights("c", 4)) == "ready"
    assert memory.upload(weights("d", 4)) == "ready"
    assert memory.digests == "ad"
    memory.adapters.pin("d", True)
    assert memory.upload(weights("e", 4)) == "no_room"
    memory.adapters.pin("a", False)
    assert memory.upload(weights("e", 4)) == "ready"
    assert memory.digests == "de"


def test_a_pinned_adapter_can_be_unloaded_by_name() -> None:
    memory, size = filled("ab")
    memory.adapters.pin("a", True)
    assert memory.adapters.remove("a") == size
    assert "a" not in memory.adapters
    assert memory.pool.free_pages == size


def test_what_could_fit_counts_the_pinned_alone() -> None:
    memory, size = filled("abc")
    wanted = SimpleNamespace(nbytes=2 * size * memory.slab.page_bytes)
    memory.acquire("a")
    memory.acquire("b")
    assert memory.adapters.could_fit(wanted), "requests end"
    memory.adapters.pin("b", True)
    assert memory.adapters.could_fit(wanted), "b's place in the middle can be moved"
    memory.adapters.pin("c", True)
    assert not memory.adapters.could_fit(wanted)


def test_nobody_is_evicted_for_an_adapter_that_does_not_fit_even_so() -> None:
    """Larger than all that is not in use: the idle ones would go for nothing, at every step."""
    memory, size = filled("abc")
    big = weights("big", 8)
    assert size < pages_of(big, memory.slab) <= 2 * size
    memory.acquire("b")
    memory.acquire("c")
    assert memory.upload(big) == "no_room"
    assert memory.digests == "abc"
    memory.adapters.release("c")
    assert memory.upload(big) == "ready", "a's place and c's are made one: b moves"
    assert memory.digests == "bbig"
    for name, rank in (("b", 4), ("big", 8)):
        resident = memory.adapters.get(name)
        assert torch.equal(resident_bytes(memory.slab, resident), weights(name, rank).data)


def test_nobody_is_evicted_for_pages_that_are_promised_to_another() -> None:
    """While a window is cleared for one adapter, another that fits only into it has no room."""
    memory = Memory(40)
    memory.adapters = AdapterPool(
        memory.pool,
        memory.slab,
        memory.eviction,
        memory.kv,
        moved_bytes_per_step=memory.slab.page_bytes,
    )
    tables: list[list[int]] = [[] for _ in range(36)]
    for table in tables:
        assert memory.kv.grow(table, BLOCK)
    idle = weights("idle", 1)
    assert memory.adapters.upload(idle) == "ready"
    for table in tables[::2]:
        memory.kv.release(table)
    first, second = weights("first", 10), weights("second", 9)
    memory.adapters.relocator.begin_step()
    assert memory.adapters.upload(first) == "moving"
    assert memory.adapters.upload(second) == "no_room"
    assert "idle" in memory.adapters, "it was evicted, and that did not help"
    while memory.adapters.upload(first) == "moving":
        memory.adapters.relocator.begin_step()
    assert "first" in memory.adapters


@pytest.mark.parametrize("limit", ["floor", "ceiling"])
def test_at_a_limit_only_those_leave_who_count_towards_it(limit: str) -> None:
    """An idle adapter makes no room for K and V at their limit, nor they for it at its own."""
    memory = Memory(20)
    memory.pool = PagePool(20, adapter_floor=8, adapter_ceiling=10)
    memory.eviction = Eviction(memory.pool, clock=lambda: memory.now)
    # Who does not count towards the limit is the cheaper by far.
    memory.eviction.kv_token_seconds = 1.0 if limit == "floor" else 1e-12
    memory.kv = KVCache(memory.pool, memory.slab, memory.eviction)
    memory.adapters = AdapterPool(memory.pool, memory.slab, memory.eviction, memory.kv)
    small = weights("small", 1)
    assert pages_of(small, memory.slab) <= 4
    assert memory.upload(small) == "ready"
    table, chain = [], memory.kv.chain(None, "")
    tokens = list(range(4 * BLOCK))
    assert memory.kv.grow(table, len(tokens))
    memory.kv.remember(table, chain, tokens, len(tokens))
    memory.kv.release(table)
    assert memory.pool.cached_pages == 4
    if limit == "floor":
        assert memory.kv.grow([], 9 * BLOCK)
        assert set(memory.eviction.counts) == {("prefix", "kv")}
    else:
        big = weights("big", 6)
        taken = memory.pool.adapter_pages
        assert 10 - taken < pages_of(big, memory.slab) <= 10
        assert memory.upload(big) == "ready"
        assert set(memory.eviction.counts) == {("adapter", "adapter")}


# --- any order of calls -----------------------------------------------------------------------

NAMES = st.sampled_from([f"adapter-{i}" for i in range(8)])


class Residents(RuleBasedStateMachine):
    """Uploads, uses, pins, evictions and KV in any order; the bytes are compared at each point.

    `uses` are the times at which each resident adapter was uploaded and acquired.
    """

    @initialize(pages=st.integers(2, 30))
    def start(self, pages: int) -> None:
        self.memory = Memory(pages)
        self.adapters = self.memory.adapters
        self.known = {f"adapter-{i}": weights(f"adapter-{i}", 1 + i) for i in range(8)}
        self.users: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.uses: dict[str, list[float]] = {}
        self.kv: dict[int, list[int]] = {}  # what its page holds -> block table of one page

    def idle(self) -> set[str]:
        busy = {name for name, users in self.users.items() if users}
        return {a.digest for a in self.adapters.resident()} - busy - self.pinned

    def worth(self, name: str) -> float:
        """Seconds saved a page, by its uses, each of which counts half after a half-life."""
        nbytes = self.known[name].nbytes
        ages = [self.memory.now - used for used in self.uses[name]]
        weight = sum(0.5 ** (age / HALF_LIFE) for age in ages)
        return weight * nbytes / pages_of(self.known[name], self.memory.slab)

    @rule(name=NAMES)
    def upload(self, name: str) -> None:
        if name in self.adapters:
            return
        before, idle = {a.digest for a in self.adapters.resident()}, self.idle()
        needed = pages_of(self.known[name], self.memory.slab)
        in_use = sum(self.adapters.get(each).num_pages for each in before - idle)
        state = self.memory.upload(self.known[name])
        gone = before - {a.digest for a in self.adapters.resident()}
        assert gone <= idle
        assert (state == "ready") == (needed + in_use + len(self.kv) <= self.memory.pool.num_pages)
        if state != "ready":
            assert not gone, "adapters were evicted although it did not help"
            return
        assert self.adapters.get(name).num_pages == needed
        self.uses[name] = [self.memory.now]

    @precondition(lambda self: self.adapters.resident())
    @rule(data=st.data())
    def acquire(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(a.digest for a in self.adapters.resident())))
        assert self.memory.acquire(name).digest == name
        self.users[name] = self.users.get(name, 0) + 1
        self.uses[name].append(self.memory.now)

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, users in self.users.items() if users)))
        self.adapters.release(name)
        self.users[name] -= 1

    @precondition(lambda self: self.adapters.resident())
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned: bool) -> None:
        name = data.draw(st.sampled_from(sorted(a.digest for a in self.adapters.resident())))
        self.adapters.pin(name, pinned)
        (self.pinned.add if pinned else self.pinned.discard)(name)

    @rule(seconds=st.sampled_from([1.0, HALF_LIFE]))
    def wait(self, seconds: float) -> None:
        self.memory.now += seconds

    @rule()
    def evict_idle(self) -> None:
        idle = self.idle()
        gone = self.memory.evict()
        if not idle:
            assert gone is None
            return
        assert gone in idle
        assert self.worth(gone) <= min(map(self.worth, idle)) * (1 + 1e-9)

    @rule(content=st.integers(1, 1000))
    def take_kv(self, content: int) -> None:
        """One page; idle adapters leave for it, so it is had unless all is in use."""
        table: list[int] = []
        in_use = sum(a.num_pages for a in self.adapters.resident() if a.digest not in self.idle())
        room = len(self.kv) + in_use < self.memory.pool.num_pages
        assert self.memory.kv.grow(table, BLOCK) == room
        if room:
            page = self.memory.slab.data.view(-1, PAGE_ELEMENTS)[table[0]]
            assert not page.any(), "not cleared"
            if content in self.kv:
                self.memory.kv.release(table)
            else:
                page.fill_(content)
                self.kv[content] = table

    @precondition(lambda self: self.kv)
    @rule(data=st.data())
    def free_kv(self, data) -> None:
        self.memory.kv.release(self.kv.pop(data.draw(st.sampled_from(sorted(self.kv)))))

    @invariant()
    def every_byte_is_where_it_belongs(self) -> None:
        if not hasattr(self, "memory"):
            return
        resident, pool = self.adapters.resident(), self.memory.pool
        digests = {a.digest for a in resident}
        assert {name for name, users in self.users.items() if users} <= digests
        assert self.pinned <= digests
        owned = []
        views = self.memory.slab.data.view(pool.num_pages, -1)
        for content, (page,) in self.kv.items():
            assert (views[page] == content).all(), "it moved without its bytes or its table"
            owned.append(page)
        for adapter in resident:
            assert adapter.users == self.users.get(adapter.digest, 0)
            held = resident_bytes(self.memory.slab, adapter)
            assert torch.equal(held, self.known[adapter.digest].data)
            owned += range(adapter.first_page, adapter.first_page + adapter.num_pages)
        assert len(owned) == len(set(owned)) == pool.num_pages - pool.free_pages


TestResidents = Residents.TestCase
TestResidents.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
