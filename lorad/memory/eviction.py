"""One price for everything that could leave the device: cached K and V, and idle adapters.

What a page is worth is the time lost without it: the seconds to get its content back, times
how often it is likely to be wanted. Uses are counted with exponential decay (LRFU, Lee et al.,
IEEE Trans. Computers 50(12), 2001), so that the order of two idle things never changes while
both are idle: a price is computed once, when a thing becomes idle, and a heap keeps the order.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import log2
from typing import Generic, Protocol, TypeVar

from lorad.memory.page_pool import PagePool

HALF_LIFE = 300.0  # seconds after which a use counts half
_LEAST_SECONDS = 1e-9

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Reuse:
    """How often and how lately something was used."""

    weight: float = 0.0
    last: float = 0.0

    def touch(self, now: float) -> None:
        self.weight = 1.0 + self.weight * 2.0 ** ((self.last - now) / HALF_LIFE)
        self.last = now

    def price(self, seconds_per_page: float) -> float:
        """log2 of the seconds saved per page, up to a constant that is the same for all.

        Both decay alike, so the decay itself cancels out of every comparison.
        """
        lost = max(seconds_per_page, _LEAST_SECONDS)
        return log2(lost) + log2(max(self.weight, _LEAST_SECONDS)) + self.last / HALF_LIFE


class PriceQueue(Generic[K]):
    """The idle things of one kind, cheapest first. Adding one again replaces its price."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._current: dict[K, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: K) -> bool:
        return key in self._current

    def add(self, key: K, price: float) -> None:
        self._serial += 1
        self._current[key] = self._serial
        heapq.heappush(self._heap, (price, self._serial, key))
        if len(self._heap) > 64 + 2 * len(self._current):
            self._drop_stale()

    def discard(self, key: K) -> None:
        self._current.pop(key, None)

    def cheapest(self) -> tuple[float, K] | None:
        while self._heap:
            price, serial, key = self._heap[0]
            if self._current.get(key) == serial:
                return price, key
            heapq.heappop(self._heap)
        return None

    def _drop_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)


class Evictable(Protocol):
    """One kind of thing that can leave the device."""

    kind: str  # for the counters: "prefix" or "adapter"

    def price(self) -> float | None:
        """Of its cheapest idle thing, None when it has none."""
        ...

    def evict(self) -> None:
        """Let that thing go."""
        ...


class Eviction:
    """Frees pages, whosever are worth least. Things in use have no price and are never freed."""

    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._sources: list[Evictable] = []
        self.clock = clock
        self.counts: Counter[tuple[str, str]] = Counter()  # (kind, for whom) -> things
        # Seconds to compute the K and V of one token again; the engine measures it.
        self.kv_token_seconds = 1e-3

    def add_source(self, source: Evictable) -> None:
        self._sources.append(source)

    def free_for_kv(self, pages: int) -> bool:
        """Until `pages` can be taken for K and V; False when that cannot be had now."""
        return self._free(lambda: self._pool.kv_room >= pages, "kv", self._short_of_kv)

    def free_for_adapter(self, pages: int) -> bool:
        return self._free(lambda: self._pool.adapter_room >= pages, "adapter", self._over_ceiling)

    def free_for_move(self, pages: int) -> bool:
        """Free pages for K and V that leave a window."""
        return self._free(lambda: self._pool.free_pages >= pages, "adapter", lambda: None)

    def _free(
        self, enough: Callable[[], bool], reason: str, only: Callable[[], str | None]
    ) -> bool:
        while not enough():
            kind = only()
            priced = [
                (price, i)
                for i, source in enumerate(self._sources)
                if kind in (None, source.kind) and (price := source.price()) is not None
            ]
            if not priced:
                return False
            source = self._sources[min(priced)[1]]
            source.evict()
            self.counts[source.kind, reason] += 1
        return True

    def _short_of_kv(self) -> str | None:
        """At the limit of K and V, only theirs help."""
        pool = self._pool
        return "prefix" if pool.kv_pages + pool.cached_pages >= pool.kv_limit else None

    def _over_ceiling(self) -> str | None:
        pool = self._pool
        taken = pool.adapter_pages + pool.reserved_pages
        return "adapter" if taken >= pool.adapter_limit else None
