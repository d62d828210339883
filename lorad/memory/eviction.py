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
from collections.abc import Callable, Hashable, Iterator
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

    def __iter__(self) -> Iterator[K]:
        return iter(self._current)

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

    def idle_pages(self) -> int:
        """Pages that would be free if all its idle things left."""
        ...

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
        """Until `pages` can be taken for K and V; False, and nothing evicted, if they cannot."""
        pool = self._pool
        return self._free(
            pages,
            reason="kv",
            room=lambda: pool.kv_room,
            limit=lambda: pool.kv_limit - pool.kv_pages - pool.cached_pages,
            limited="prefix",
        )

    def free_for_adapter(self, pages: int) -> bool:
        """Until `pages` can be taken for an adapter, in however many holes."""
        pool = self._pool
        return self._free(
            pages,
            reason="adapter",
            room=lambda: pool.adapter_room,
            limit=lambda: (
                pool.adapter_limit - pool.adapter_pages - pool.reserved_pages - pool.promised_pages
            ),
            limited="adapter",
        )

    def free_for_move(self, pages: int) -> bool:
        """Until `pages` are free, for K and V that leave a window."""
        pool = self._pool
        return self._free(
            pages,
            reason="adapter",
            room=lambda: pool.free_pages,
            limit=lambda: pool.num_pages,
            limited="",
        )

    def _free(
        self,
        pages: int,
        *,
        reason: str,
        room: Callable[[], int],
        limit: Callable[[], int],
        limited: str,
    ) -> bool:
        """Evict until there is room for `pages`.

        `limit` is what the asking side may have more, whatever is free; beyond it only its own
        kind, `limited`, helps. Whoever waits for room asks again in every step, so nothing is
        evicted for one who would not get it.
        """
        if room() >= pages:
            return True
        idle = {source.kind: source.idle_pages() for source in self._sources}
        if self._pool.free_pages + sum(idle.values()) - self._pool.promised_pages < pages:
            return False
        if limit() + idle.get(limited, 0) < pages:
            return False
        while room() < pages:
            self._evict_cheapest(limited if limit() < pages else None, reason)
        return True

    def _evict_cheapest(self, kind: str | None, reason: str) -> None:
        priced = [
            (price, i)
            for i, source in enumerate(self._sources)
            if kind in (None, source.kind) and (price := source.price()) is not None
        ]
        source = self._sources[min(priced)[1]]
        source.evict()
        self.counts[source.kind, reason] += 1
