"""Adapters on the device: each in a contiguous run of pages, at its true rank.

An adapter in use is never evicted. An idle one stays until its pages are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lorad_kernels import LoraFactors

from lorad.adapters.weights import AdapterWeights
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import AdapterLayout


@dataclass(slots=True)
class ResidentAdapter:
    """One adapter in the slab. `factors[layer][projection][slice]` are absolute offsets."""

    digest: str
    layout: AdapterLayout
    first_page: int
    num_pages: int
    factors: tuple[tuple[tuple[LoraFactors, ...], ...], ...]
    users: int = 0
    pinned: bool = False
    last_used: int = field(default=0)


class AdapterPool:
    """The device tier."""

    def __init__(self, pool: PagePool, slab: Slab) -> None:
        self._pool = pool
        self._slab = slab
        self._resident: dict[str, ResidentAdapter] = {}
        self._clock = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._resident

    def get(self, digest: str) -> ResidentAdapter | None:
        return self._resident.get(digest)

    def resident(self) -> list[ResidentAdapter]:
        return list(self._resident.values())

    def pages_for(self, layout: AdapterLayout) -> int:
        return -(-layout.nbytes // self._slab.page_bytes)

    def could_fit(self, layout: AdapterLayout) -> bool:
        """Whether there would be room with nothing but the pinned adapters in the slab."""
        longest = end = 0
        for first, count in sorted(_run(a) for a in self._resident.values() if a.pinned):
            longest, end = max(longest, first - end), first + count
        return self.pages_for(layout) <= max(longest, self._pool.num_pages - end)

    def upload(self, weights: AdapterWeights) -> ResidentAdapter | None:
        """Copy an adapter into a run of pages, evicting idle ones if that makes room.

        None when it does not fit beside what is in use now.
        """
        count = self.pages_for(weights.layout)
        first = self._find_run(count)
        if first is None:
            return None
        start = first * self._slab.page_elements
        self._slab.data[start : start + weights.data.numel()].copy_(weights.data)
        adapter = ResidentAdapter(
            weights.digest, weights.layout, first, count, _absolute(weights.layout, start)
        )
        self._resident[weights.digest] = adapter
        self._touch(adapter)
        return adapter

    def acquire(self, digest: str) -> ResidentAdapter:
        adapter = self._resident[digest]
        adapter.users += 1
        self._touch(adapter)
        return adapter

    def release(self, digest: str) -> None:
        adapter = self._resident[digest]
        adapter.users -= 1
        self._touch(adapter)

    def pin(self, digest: str, pinned: bool) -> None:
        """A pinned adapter stays on the device until it is unpinned or unloaded."""
        self._resident[digest].pinned = pinned

    def evict(self, digest: str) -> int:
        """Free an idle adapter's pages; returns their number."""
        adapter = self._resident[digest]
        if adapter.users:
            raise RuntimeError(f"adapter {digest} is in use by {adapter.users} requests")
        del self._resident[digest]
        self._pool.free_run(adapter.first_page, adapter.num_pages)
        return adapter.num_pages

    def evict_idle(self) -> str | None:
        """Evict the idle adapter that was used longest ago; its digest, or None if none is."""
        idle = self._idle()
        if not idle:
            return None
        oldest = min(idle, key=lambda adapter: adapter.last_used)
        self.evict(oldest.digest)
        return oldest.digest

    def _find_run(self, count: int) -> int | None:
        first = self._pool.take_run(count)
        if first is None and count > self._pool.longest_run(map(_run, self._idle())):
            return None  # evicting would not help: keep the idle ones
        while first is None and self.evict_idle() is not None:
            first = self._pool.take_run(count)
        return first

    def _idle(self) -> list[ResidentAdapter]:
        return [a for a in self._resident.values() if not a.users and not a.pinned]

    def _touch(self, adapter: ResidentAdapter) -> None:
        self._clock += 1
        adapter.last_used = self._clock


def _run(adapter: ResidentAdapter) -> tuple[int, int]:
    return adapter.first_page, adapter.num_pages


def _absolute(layout: AdapterLayout, start: int) -> tuple[tuple[tuple[LoraFactors, ...], ...], ...]:
    """The layout's offsets, shifted to where the adapter lies in the slab."""
    return tuple(
        tuple(
            tuple(
                LoraFactors(s.rank, s.scaling, start + s.a_offset, start + s.b_offset)
                for s in projection
            )
            for projection in layer
        )
        for layer in layout.slices
    )
