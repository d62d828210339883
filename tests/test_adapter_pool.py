"""Adapters in the slab: their bytes, their offsets, and who may be evicted when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file
from torch import Tensor

from lorad.adapters.peft_format import read_adapter
from lorad.adapters.weights import AdapterWeights, read_weights
from lorad.memory.adapter_pool import AdapterPool, ResidentAdapter
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


def memory(pages: int, dtype: torch.dtype = torch.float32) -> tuple[PagePool, Slab, AdapterPool]:
    """Garbage everywhere at first: what is read must have been written."""
    slab = Slab(
        torch.full((pages * PAGE_ELEMENTS,), torch.nan, dtype=dtype), pages, PAGE_ELEMENTS, BLOCK
    )
    pool = PagePool(pages)
    return pool, slab, AdapterPool(pool, slab)


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


# --- bytes and offsets ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_upload_copies_the_packed_factors_and_nothing_else(dtype: torch.dtype) -> None:
    pool, slab, adapters = memory(40, dtype)
    table: list[int] = []
    assert KVCache(pool, slab).grow(table, 3 * BLOCK)
    wanted = [weights(f"a{rank}", rank, dtype) for rank in (1, 3, 8)]
    for each in wanted:
        assert adapters.upload(each)
    taken = set(table)
    for each in wanted:
        adapter = adapters.get(each.digest)
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
    packed = read_weights(read_adapter(directory, shape), "sha256:a", shape, torch.float32)
    adapter = AdapterPool(pool, slab).upload(packed)

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
    pool, slab, adapters = memory(16)
    first = weights("first", 4)
    assert pages_of(first, slab) > 3
    assert adapters.upload(first)
    cache, table = KVCache(pool, slab), []
    assert not cache.grow(table, 16 * BLOCK)
    assert adapters.evict("first") == pages_of(first, slab)
    assert cache.grow(table, 16 * BLOCK)
    assert not slab.data.any(), "K and V would see the adapter's bytes"
    slab.data.fill_(7.0)
    cache.release(table)
    again = adapters.upload(first)
    assert torch.equal(resident_bytes(slab, again), first.data)


# --- who goes, who stays ----------------------------------------------------------------------


def filled(names: str, room: int = 0) -> tuple[PagePool, AdapterPool, int]:
    """A pool in which these adapters of equal size just fit; each takes the returned pages."""
    probe = memory(1)[1]
    size = pages_of(weights("x", 4), probe)
    pool, _, adapters = memory(len(names) * size + room)
    for name in names:
        assert adapters.upload(weights(name, 4))
    return pool, adapters, size


def digests(adapters: AdapterPool) -> str:
    return "".join(sorted(adapter.digest for adapter in adapters.resident()))


def test_the_idle_adapter_used_longest_ago_goes_first() -> None:
    _, adapters, _ = filled("abc")
    adapters.acquire("a")
    adapters.release("a")
    assert adapters.upload(weights("d", 4))
    assert digests(adapters) == "acd"
    assert adapters.upload(weights("e", 4))
    assert digests(adapters) == "ade"
    assert [adapters.evict_idle() for _ in range(4)] == ["a", "d", "e", None]


def test_when_a_request_ends_counts_as_use() -> None:
    _, adapters, _ = filled("ab")
    adapters.acquire("a")
    adapters.acquire("b")
    adapters.release("b")
    adapters.release("a")
    assert adapters.evict_idle() == "b"


def test_an_adapter_in_use_is_never_evicted() -> None:
    _, adapters, _ = filled("ab")
    adapters.acquire("a")
    adapters.acquire("a")
    adapters.release("a")
    assert adapters.upload(weights("c", 4))
    assert digests(adapters) == "ac"
    adapters.acquire("c")
    assert adapters.upload(weights("d", 4)) is None
    assert adapters.evict_idle() is None
    with pytest.raises(RuntimeError):
        adapters.evict("a")
    assert digests(adapters) == "ac"
    adapters.release("a")
    assert adapters.upload(weights("d", 4))
    assert digests(adapters) == "cd"


def test_a_pinned_adapter_stays_until_it_is_unpinned() -> None:
    _, adapters, _ = filled("ab")
    adapters.pin("a", True)
    assert adapters.upload(weights("c", 4))
    assert adapters.upload(weights("d", 4))
    assert digests(adapters) == "ad"
    adapters.pin("d", True)
    assert adapters.upload(weights("e", 4)) is None
    adapters.pin("a", False)
    assert adapters.upload(weights("e", 4))
    assert digests(adapters) == "de"


def test_a_pinned_adapter_can_be_unloaded_by_name() -> None:
    pool, adapters, size = filled("ab")
    adapters.pin("a", True)
    assert adapters.evict("a") == size
    assert "a" not in adapters
    assert pool.free_pages == size


def test_nobody_is_evicted_for_an_adapter_that_does_not_fit_even_so() -> None:
    """Larger than all that is not in use: the idle ones would go for nothing, at every step."""
    _, adapters, size = filled("abc")
    big = weights("big", 8)
    assert size < pages_of(big, memory(1)[1]) <= 2 * size
    adapters.acquire("b")
    assert adapters.upload(big) is None, "a's place and c's are no run"
    assert digests(adapters) == "abc"
    adapters.release("b")
    assert adapters.upload(big)
    assert "big" in adapters


# --- any order of calls -----------------------------------------------------------------------

NAMES = st.sampled_from([f"adapter-{i}" for i in range(8)])


class Residents(RuleBasedStateMachine):
    """Uploads, uses, pins, evictions and KV in any order; the bytes are compared at each point."""

    @initialize(pages=st.integers(2, 30))
    def start(self, pages: int) -> None:
        self.pool, self.slab, self.adapters = memory(pages)
        self.known = {f"adapter-{i}": weights(f"adapter-{i}", 1 + i) for i in range(8)}
        self.users: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.kv: list[int] = []

    def idle(self) -> set[str]:
        busy = {name for name, users in self.users.items() if users}
        return {a.digest for a in self.adapters.resident()} - busy - self.pinned

    @rule(name=NAMES)
    def upload(self, name: str) -> None:
        if name in self.adapters:
            return
        before, idle = {a.digest for a in self.adapters.resident()}, self.idle()
        adapter = self.adapters.upload(self.known[name])
        gone = before - {a.digest for a in self.adapters.resident()}
        assert gone <= idle
        if adapter is None:
            assert not gone, "adapters were evicted although it did not help"
        elif not gone:
            assert adapter.num_pages == pages_of(self.known[name], self.slab)
        self.pinned -= gone

    @precondition(lambda self: self.adapters.resident())
    @rule(data=st.data())
    def acquire(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(a.digest for a in self.adapters.resident())))
        assert self.adapters.acquire(name).digest == name
        self.users[name] = self.users.get(name, 0) + 1

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

    @rule()
    def evict_idle(self) -> None:
        idle = self.idle()
        last_used = {a.digest: a.last_used for a in self.adapters.resident()}
        gone = self.adapters.evict_idle()
        assert gone == min(idle, key=last_used.__getitem__, default=None)

    @rule()
    def take_kv(self) -> None:
        page = self.pool.take_page()
        if page is not None:
            self.slab.clear_page(page)
            self.kv.append(page)

    @precondition(lambda self: self.kv)
    @rule(data=st.data())
    def free_kv(self, data) -> None:
        page = data.draw(st.sampled_from(sorted(self.kv)))
        self.kv.remove(page)
        self.pool.free_page(page)

    @invariant()
    def every_byte_is_where_it_belongs(self) -> None:
        if not hasattr(self, "pool"):
            return
        resident = self.adapters.resident()
        assert {name for name, users in self.users.items() if users} <= {a.digest for a in resident}
        assert self.pinned <= {a.digest for a in resident}
        owned = list(self.kv)
        for adapter in resident:
            assert adapter.users == self.users.get(adapter.digest, 0)
            assert torch.equal(resident_bytes(self.slab, adapter), self.known[adapter.digest].data)
            owned += range(adapter.first_page, adapter.first_page + adapter.num_pages)
        assert len(owned) == len(set(owned)) == self.pool.num_pages - self.pool.free_pages
        assert not self.slab.data.view(self.pool.num_pages, -1)[self.kv].any()


TestResidents = Residents.TestCase
TestResidents.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
