"""Adapters between store, host memory and device: order, bounds, cancelling, counting."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.host_cache import HostCache
from lorad.adapters.loader import AdapterLoader, LoadResult
from lorad.adapters.weights import AdapterWeights
from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.messages import Histogram
from lorad.errors import LoradError
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import AdapterLayout

PAGE = 32  # bytes


def ref(number: int) -> AdapterRef:
    return AdapterRef(AdapterName.parse(f"a{number}"), "v1", f"d{number}")


def weights(number: int, pages: int = 1) -> AdapterWeights:
    layout = AdapterLayout((), pages * PAGE, pages * PAGE, 1)
    return AdapterWeights(f"d{number}", layout, torch.full((pages * PAGE // 4,), float(number)))


class Tiers:
    """Real tiers over a slab of 4 pages; the loads are answered by the test."""

    def __init__(self, pages: int = 4, max_cpu_loras: int = 3, prefetch: int = 2) -> None:
        self.slab = Slab(torch.zeros(pages * PAGE // 4), pages, PAGE // 4, 2)
        self.pool = PagePool(pages)
        self.eviction = Eviction(self.pool)
        kv = KVCache(self.pool, self.slab, self.eviction)
        self.host = HostCache(max_cpu_loras, 10**9)
        self.asked: list[int] = []
        self.tiers = AdapterTiers(
            AdapterPool(self.pool, self.slab, self.eviction, kv),
            self.host,
            lambda ref: self.asked.append(int(ref.digest[1:])),
            self.cancel,
            prefetch=prefetch,
        )

    def cancel(self, digest: str) -> bool:
        if int(digest[1:]) not in self.asked:
            return False
        self.asked.remove(int(digest[1:]))
        return True

    def arrive(self, number: int, pages: int = 1) -> None:
        self.asked.remove(number)
        self.tiers.finish_load(LoadResult(ref(number), 0.5, weights(number, pages)))

    def states(self) -> dict[str, str]:
        return {state.digest: state.residency for state in self.tiers.states({}, {})}


def test_an_adapter_goes_up_tier_by_tier_and_is_seen_doing_so():
    t = Tiers()
    t.tiers.count_request(ref(1))
    assert t.tiers.prepare(ref(1)) == "loading"
    assert t.tiers.prepare(ref(1)) == "loading"
    assert t.asked == [1], "asked once, however often it is looked for"
    assert t.states() == {"d1": "loading"}
    t.arrive(1)
    assert t.states() == {"d1": "host"}
    assert t.tiers.prepare(ref(1)) == "ready"
    assert t.states() == {"d1": "device"}
    t.tiers.count_request(ref(1))
    assert dict(t.tiers.lookups) == {"store": 1, "device": 1}
    assert t.tiers.drop("d1") == (PAGE, PAGE)
    assert t.states() == {}
    assert (t.pool.free_pages, t.tiers.host_bytes) == (4, 0)


def test_prefetch_keeps_to_its_bound_and_counts_by_reason():
    t = Tiers(prefetch=2)
    assert [t.tiers.prefetch(ref(i)) for i in (1, 2, 3)] == [True, True, False]
    assert t.asked == [1, 2]
    assert t.tiers.prepare(ref(3)) == "loading", "a request that can run is not held up by it"
    assert dict(t.tiers.loads) == {"prefetch": 2, "request": 1}
    t.arrive(1)
    assert not t.tiers.prefetch(ref(4)), "what has been read and waits counts too"
    assert t.tiers.prefetch(ref(1)), "it is there"


def test_what_nobody_waits_for_is_not_read_and_what_was_read_is_kept():
    t = Tiers()
    for i in (1, 2, 3):
        t.tiers.prepare(ref(i))
    t.arrive(1)
    t.tiers.keep_only({"d2"})
    assert t.asked == [2]
    assert t.tiers.cancelled_loads == 1
    assert "d1" in t.host
    assert t.states() == {"d1": "host", "d2": "loading"}


def test_a_load_in_a_host_cache_of_one_still_reaches_the_device():
    """The cache may refuse what was read; the request that waits gets it all the same."""
    t = Tiers(max_cpu_loras=1)
    t.tiers.prepare(ref(1))
    t.arrive(1)
    for _ in range(3):
        t.tiers.count_request(ref(1))
    assert t.tiers.prepare(ref(1)) == "ready"
    t.tiers.count_request(ref(2))
    t.tiers.prepare(ref(2))
    t.arrive(2)
    assert t.tiers.prepare(ref(2)) == "ready"
    assert ("d1" in t.host, "d2" in t.host) == (True, False)
    assert t.states() == {"d1": "device", "d2": "device"}


def test_no_room_beside_what_is_in_use_and_the_evicted_are_counted():
    t = Tiers(pages=4)
    for i, pages in ((1, 2), (2, 2)):
        t.tiers.prepare(ref(i))
        t.arrive(i, pages)
        assert t.tiers.prepare(ref(i)) == "ready"
    t.tiers.acquire("d1", again=False)
    t.tiers.prepare(ref(3))
    t.arrive(3, 3)
    assert t.tiers.prepare(ref(3)) == "no_room"
    assert "d2" in t.host
    t.tiers.release("d1")
    assert t.tiers.prepare(ref(3)) == "ready"
    assert t.states() == {"d1": "host", "d2": "host", "d3": "device"}
    assert dict(t.eviction.counts) == {("adapter", "adapter"): 2}


def test_a_failed_load_says_so_until_it_succeeds():
    t = Tiers()
    t.tiers.prepare(ref(1))
    t.asked.remove(1)
    t.tiers.finish_load(LoadResult(ref(1), 0.1, error=LoradError("store.unavailable", "gone")))
    (state,) = t.tiers.states({}, {})
    assert (state.residency, state.error) == ("failed", "gone")
    t.tiers.prepare(ref(1))
    t.arrive(1)
    (state,) = t.tiers.states({}, {})
    assert (state.residency, state.error) == ("host", "")


# --- the loader ---------------------------------------------------------------------------------


def test_loads_are_read_in_order_and_a_cancelled_one_not_at_all():
    begun, go, read = threading.Event(), threading.Event(), []
    done: list[LoadResult] = []

    def reading(wanted: AdapterRef) -> AdapterWeights:
        read.append(wanted.digest)
        begun.set()
        go.wait(10)
        return weights(int(wanted.digest[1:]))

    loader = AdapterLoader(reading, done.append)
    loader.start()
    for i in (1, 2, 3, 4):
        loader.load(ref(i))
    assert begun.wait(10)
    assert loader.cancel("d3")
    assert not loader.cancel("d1"), "its reading has begun"
    go.set()
    deadline = time.monotonic() + 10
    while len(done) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    loader.stop()
    assert read == ["d1", "d2", "d4"]
    assert [result.ref.digest for result in done] == ["d1", "d2", "d4"]
    assert all(result.queued >= 0 for result in done)


# --- the host cache -----------------------------------------------------------------------------


def hits(cache: HostCache, requests: list[int]) -> float:
    found = 0
    for number in requests:
        cache.count_request(f"d{number}")
        if cache.get(f"d{number}") is not None:
            found += 1
        else:
            cache.put(weights(number))
    return found / len(requests)


def lru_hits(places: int, requests: list[int]) -> float:
    order: dict[int, None] = {}
    found = 0
    for number in requests:
        found += number in order
        order.pop(number, None)
        order[number] = None
        if len(order) > places:
            del order[next(iter(order))]
    return found / len(requests)


def zipf(adapters: int, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(
        range(adapters), [1 / (i + 1) for i in range(adapters)], k=count
    )


def test_the_popular_stay_through_a_scan_as_with_lru_they_do_not():
    popular = zipf(500, 3000, 1)
    scanned = [x for i in range(0, 3000, 1000) for x in (*popular[i : i + 1000], *range(500))]
    ours, lru = hits(HostCache(50, 10**9), scanned), lru_hits(50, scanned)
    assert ours > lru + 0.02
    plain_ours, plain_lru = hits(HostCache(50, 10**9), popular), lru_hits(50, popular)
    assert plain_ours > plain_lru + 0.02


def test_a_new_favourite_gets_in():
    cache = HostCache(10, 10**9)
    hits(cache, zipf(100, 2000, 2))
    assert hits(cache, [777] * 40) > 0.5


@pytest.mark.parametrize("bound", ["count", "bytes"])
def test_the_cache_never_holds_more_than_it_may(bound):
    cache = HostCache(8, 10**9) if bound == "count" else HostCache(10**6, 8 * PAGE)
    choose = random.Random(3)
    for _ in range(2000):
        number = choose.randrange(40)
        cache.count_request(f"d{number}")
        if cache.get(f"d{number}") is None:
            left = cache.put(weights(number, 1 + number % 3))
            assert all(digest not in cache for digest in left)
        held = sum(entry.nbytes for entry in cache.items())
        assert held == cache.nbytes
        assert len(cache) <= 8
        assert held <= 10 * PAGE * 3
        if bound == "bytes":
            assert held <= 8 * PAGE
    assert len(cache) > 2


def test_the_counts_of_requests_stay_bounded():
    cache = HostCache(4, 10**9)
    for i in range(10_000):
        cache.count_request(f"d{i}")
    assert len(cache._requests) <= 4 * 16


def test_a_histogram_counts_each_duration_once():
    histogram = Histogram()
    for seconds in (0.0005, 0.001, 0.02, 5.0, 100.0):
        histogram.add(seconds)
    assert sum(histogram.counts) == 5
    assert (histogram.counts[0], histogram.counts[-1]) == (2, 1)
    copied = histogram.copy()
    histogram.add(1.0)
    assert sum(copied.counts) == 5
