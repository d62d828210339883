"""How often an adapter is found where it is needed: models of a cache with LRU eviction.

Requests are independent draws from the popularity. For all but tiny caches Che's
approximation gives the hit rate: an adapter of size s_i stays for a time T after each use,
where sum_i s_i (1 - exp(-p_i T)) = capacity; the hit rate is sum_i p_i (1 - exp(-p_i T)).
It is within about a point of the truth from four adapters up; below that, the exact
recursion (one and two adapters of one size) or a simulation takes its place.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, expm1, log, sqrt
from typing import Protocol

_SMALL = 4  # adapters; below it Che's approximation is off by more than a point
_SIMULATED_REQUESTS = 200_000
_SEED = 20240229


@dataclass(frozen=True, slots=True)
class HitRate:
    """The share of requests that find their adapter, and how it was found."""

    rate: float
    method: str  # "che", "exact", "simulated" or "all fit"
    resident: float  # adapters there at once, on average

    @property
    def miss(self) -> float:
        return 1.0 - self.rate


class CacheModel(Protocol):
    """What gives a hit rate for a capacity: a model of requests, or a recorded trace."""

    def hit_rate(self, capacity: int) -> HitRate: ...


class LruModel:
    """An LRU cache under independent requests; `sizes[i]` belongs to `shares[i]`.

    Sizes and capacities are in any one unit: bytes, pages, or slots (all sizes 1).
    """

    def __init__(self, shares: Sequence[float], sizes: Sequence[int]) -> None:
        self.shares = shares
        self.sizes = sizes
        self.total = sum(sizes)
        self._same_size = sizes[0] if min(sizes) == max(sizes) else 0
        self._classes = _classes(shares, sizes)

    def hit_rate(self, capacity: int) -> HitRate:
        """The share of hits with this much room, by whichever method is right for it."""
        if self.total <= capacity:
            return HitRate(1.0, "all fit", len(self.shares))
        if capacity < min(self.sizes):
            return HitRate(0.0, "exact", 0.0)
        if self._same_size:
            capacity -= capacity % self._same_size
            if capacity // self._same_size <= 2:
                return _exact(self.shares, capacity // self._same_size)
        if capacity < _SMALL * self.total / len(self.sizes):
            return simulate(self.shares, self.sizes, capacity)
        return self.che(capacity)

    def che(self, capacity: int) -> HitRate:
        """Che's approximation alone; the cache must not hold everything."""
        lifetime = characteristic_time(self._classes, capacity)
        rate = resident = 0.0
        for count, share, _ in self._classes:
            present = -expm1(-share * lifetime)
            rate += count * share * present
            resident += count * present
        return HitRate(rate, "che", resident)


def slots_model(shares: Sequence[float]) -> LruModel:
    """A cache whose places are counted, whatever is in them."""
    return LruModel(shares, [1] * len(shares))


def _classes(shares: Sequence[float], sizes: Sequence[int]) -> list[tuple[int, float, int]]:
    """(how many, mean share, size) of adapters that are alike.

    Shares within a percent of each other count as one, which moves a hit rate by less than
    1e-5 and makes a fleet of a million as cheap as one of a thousand.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for share, size in zip(shares, sizes, strict=True):
        group = groups.setdefault((int(100 * log(share)), size), [0, 0.0])
        group[0] += 1
        group[1] += share
    return [(int(n), total / n, size) for (_, size), (n, total) in groups.items()]


def characteristic_time(classes: Sequence[tuple[int, float, int]], capacity: int) -> float:
    """Che's T, in requests: Newton's method from below. `classes` must not all fit.

    The left side of the equation is concave and rises with T, so that every step from a point
    left of the root stays left of it: the iteration cannot overshoot.
    """
    lifetime = 0.0
    for _ in range(200):
        filled = slope = 0.0
        for count, share, size in classes:
            gone = exp(-share * lifetime)
            filled += count * size * (1.0 - gone)
            slope += count * size * share * gone
        step = (capacity - filled) / slope
        lifetime += step
        if step <= 1e-9 * lifetime:
            break
    return lifetime


def _exact(shares: Sequence[float], slots: int) -> HitRate:
    """One or two slots, by the stationary law of the two adapters used last."""
    once = sum(share * share for share in shares)
    if slots == 1:
        return HitRate(once, "exact", 1.0)
    # P(i is second) = sum over j != i of p_j p_i / (1 - p_j).
    odds = [share / (1.0 - share) for share in shares]
    total = sum(odds)
    second = sum(p * p * (total - odd) for p, odd in zip(shares, odds, strict=True))
    return HitRate(once + second, "exact", 2.0)


def simulate(shares: Sequence[float], sizes: Sequence[int], capacity: int) -> HitRate:
    """LRU on a fixed sequence of drawn requests, after a warm-up of a tenth of it."""
    draw = random.Random(_SEED)
    edges = list(accumulate(shares))
    last = len(shares) - 1
    warm_up = _SIMULATED_REQUESTS // 10
    cache: OrderedDict[int, None] = OrderedDict()
    used = hits = residents = 0
    for step in range(-warm_up, _SIMULATED_REQUESTS):
        adapter = min(bisect_right(edges, draw.random()), last)
        if adapter in cache:
            cache.move_to_end(adapter)
            hits += step >= 0
        elif sizes[adapter] <= capacity:
            used += sizes[adapter]
            cache[adapter] = None
            while used > capacity:
                used -= sizes[cache.popitem(last=False)[0]]
        residents += len(cache) if step >= 0 else 0
    return HitRate(hits / _SIMULATED_REQUESTS, "simulated", residents / _SIMULATED_REQUESTS)


def pinned_hit_rate(shares: Sequence[float], slots: int) -> float:
    """With the `slots` most popular adapters pinned for good: what LRU gives away."""
    return sum(sorted(shares, reverse=True)[:slots])


def smallest_capacity(model: CacheModel, most: int, miss: float) -> int:
    """The least capacity, up to `most`, whose miss rate is at most `miss` (else `most`)."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if model.hit_rate(middle).miss <= miss:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True)
class Distinct:
    """Different adapters among the rows of one batch."""

    mean: float
    deviation: float

    @property
    def high(self) -> int:
        """Exceeded in about one batch of forty."""
        return int(self.mean + 2 * self.deviation) + 1


def distinct_in_batch(shares: Sequence[float], batch: int) -> Distinct:
    """Mean and spread of the different adapters among `batch` independent rows."""
    there = [1.0 - (1.0 - share) ** batch for share in shares]
    # Rows compete for places, so the indicators are negatively correlated and this variance
    # is an upper bound: the high end errs to the safe side.
    return Distinct(sum(there), sqrt(sum(p * (1.0 - p) for p in there)))


def distinct_in_time(shares: Sequence[float], requests: float) -> float:
    """Different adapters among a Poisson number of requests with this mean."""
    return sum(-expm1(-share * requests) for share in shares)
