"""Adapters on the device: each in a contiguous run of pages, at its true rank.

An adapter in use is never evicted. An idle one stays until its pages are worth more to
somebody else. Any may be moved between two steps; its offsets move with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lorad_kernels import LoraFactors

from lorad.adapters.weights import AdapterWeights
from lorad.memory.eviction import Eviction, PriceQueue, Reuse
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.relocation import Relocator
from lorad.memory.slab import Slab
from lorad.memory.upload import Upload, Uploader
from lorad.sizing.adapter_size import AdapterLayout
from lorad.sizing.memory_plan import pages_for

# "moving", "copying" and "arriving" end by themselves: ask again in the next step. Of one that is
# "arriving" the first layer is there.
UploadState = Literal["ready", "arriving", "copying", "moving", "no_room"]

Factors = tuple[tuple[tuple[LoraFactors, ...], ...], ...]

_UPLOAD_BYTES_PER_SECOND = 10e9


@dataclass(slots=True)
class ResidentAdapter:
    """One adapter in the slab."""

    digest: str
    layout: AdapterLayout
    first_page: int
    num_pages: int
    page_elements: int
    upload: Upload
    users: int = 0
    pinned: bool = False
    reuse: Reuse = field(default_factory=Reuse)
    _factors: Factors | None = None

    @property
    def factors(self) -> Factors:
        """`[layer][projection][slice]`, absolute in the slab: the same object until it moves.

        Some hundred objects, which idle adapters do without: the garbage collector holds every
        thread up while it looks at all there are.
        """
        if self._factors is None:
            self._factors = factors_at(self.layout, self.first_page * self.page_elements)
        return self._factors

    def forget_factors(self) -> None:
        self._factors = None


class AdapterPool:
    """The device tier. `kind` and three methods are for the eviction."""

    kind = "adapter"

    def __init__(
        self,
        pool: PagePool,
        slab: Slab,
        eviction: Eviction,
        kv_cache: KVCache,
        *,
        moved_bytes_per_step: int = 32 * 2**20,
    ) -> None:
        self._pool = pool
        self._slab = slab
        self._eviction = eviction
        self._kv = kv_cache
        self._uploader = Uploader(slab.data.device)
        self._resident: dict[str, ResidentAdapter] = {}
        self._at_page: dict[int, ResidentAdapter] = {}
        self._idle: PriceQueue[str] = PriceQueue()
        self._copying: set[str] = set()
        # Seconds to bring an adapter's bytes to host memory: 0 while a copy is there.
        self.fetch_seconds: Callable[[str, int], float] = lambda digest, nbytes: 0.0
        self.on_evicted: Callable[[str], None] = lambda digest: None
        self.relocator = Relocator(
            pool,
            slab,
            max(1, moved_bytes_per_step // slab.page_bytes),
            on_pages_moved=kv_cache.pages_moved,
            on_run_moved=self._run_moved,
            before_moving=self._uploader.join,
        )
        eviction.add_source(self)

    def __contains__(self, digest: str) -> bool:
        return digest in self._resident

    def get(self, digest: str) -> ResidentAdapter | None:
        return self._resident.get(digest)

    def resident(self) -> list[ResidentAdapter]:
        return list(self._resident.values())

    def any_copying(self) -> bool:
        self._copying = {d for d in self._copying if self.state(d) in ("copying", "arriving")}
        return bool(self._copying)

    def pages_for(self, layout: AdapterLayout) -> int:
        return pages_for(layout.nbytes, self._slab.page_bytes)

    def could_fit(self, layout: AdapterLayout) -> bool:
        """Whether there would be room with nothing but the pinned adapters in the slab."""
        pinned = sum(adapter.num_pages for adapter in self._resident.values() if adapter.pinned)
        return pinned + self.pages_for(layout) <= self._pool.adapter_limit

    def state(self, digest: str) -> UploadState | None:
        """Of an adapter that has its pages: "ready", "arriving" or "copying". None for another."""
        adapter = self._resident.get(digest)
        if adapter is None:
            return None
        if adapter.upload.done:
            return "ready"
        return "arriving" if adapter.upload.begun else "copying"

    def upload(self, weights: AdapterWeights) -> UploadState:
        """Copy an adapter into a run of pages, for which others may be moved or evicted.

        "no_room", and nothing has changed, when it does not fit beside what is in use now.
        """
        count = self.pages_for(weights.layout)
        if not self._free_pages(weights.digest, count):
            return "no_room"
        first = self.relocator.make_run(weights.digest, count)
        if first is None:
            return "moving"
        self._enter(weights, first, count)
        return self.state(weights.digest) or "no_room"

    def acquire(self, digest: str, *, again: bool = False) -> ResidentAdapter:
        """Keep it on the device; `again` for a request that has been counted as a use before."""
        adapter = self._resident[digest]
        adapter.users += 1
        if not again:
            adapter.reuse.touch(self._eviction.clock())
        self._idle.discard(digest)
        return adapter

    def release(self, digest: str) -> None:
        adapter = self._resident[digest]
        adapter.users -= 1
        if not adapter.users:
            adapter.forget_factors()
        self._price(adapter)

    def pin(self, digest: str, pinned: bool) -> None:
        """A pinned adapter stays on the device until it is unpinned or unloaded."""
        self._resident[digest].pinned = pinned
        self._idle.discard(digest)
        self._price(self._resident[digest])

    def remove(self, digest: str) -> int:
        """Free an idle adapter's pages; returns their number."""
        adapter = self._resident[digest]
        if adapter.users:
            raise RuntimeError(f"adapter {digest} is in use by {adapter.users} requests")
        if not adapter.upload.done:
            self._uploader.join()
        del self._resident[digest]
        del self._at_page[adapter.first_page]
        self._idle.discard(digest)
        self._pool.free_run(adapter.first_page, adapter.num_pages)
        self._kv.adapter_present(digest, False)
        return adapter.num_pages

    # --- eviction ---------------------------------------------------------------------------

    def idle_pages(self) -> int:
        return sum(self._resident[digest].num_pages for digest in self._idle)

    def price(self) -> float | None:
        cheapest = self._idle.cheapest()
        return None if cheapest is None else cheapest[0]

    def evict(self) -> None:
        cheapest = self._idle.cheapest()
        if cheapest is None:
            raise RuntimeError("no adapter is idle")
        self.remove(cheapest[1])
        self.on_evicted(cheapest[1])

    # --- inside -----------------------------------------------------------------------------

    def _free_pages(self, digest: str, count: int) -> bool:
        wanted = self.relocator.pages_wanted(digest, count)
        if wanted < count:  # its window is half cleared: what is in it needs a place outside
            return self._eviction.free_for_move(wanted)
        return self._eviction.free_for_adapter(count)

    def _enter(self, weights: AdapterWeights, first: int, count: int) -> None:
        start = first * self._slab.page_elements
        target = self._slab.data[start : start + weights.data.numel()]
        adapter = ResidentAdapter(
            weights.digest,
            weights.layout,
            first,
            count,
            self._slab.page_elements,
            self._uploader.start(target, weights.data, weights.layout),
        )
        self._resident[weights.digest] = self._at_page[first] = adapter
        self._copying.add(weights.digest)
        adapter.reuse.touch(self._eviction.clock())
        self._price(adapter)
        self._kv.adapter_present(weights.digest, True)

    def _price(self, adapter: ResidentAdapter) -> None:
        if adapter.users or adapter.pinned:
            return
        nbytes = adapter.layout.nbytes
        seconds = self.fetch_seconds(adapter.digest, nbytes) + nbytes / _UPLOAD_BYTES_PER_SECOND
        self._idle.add(adapter.digest, adapter.reuse.price(seconds / adapter.num_pages))

    def _run_moved(self, source: int, target: int) -> None:
        adapter = self._at_page.pop(source)
        self._at_page[target] = adapter
        adapter.first_page = target
        adapter.forget_factors()


def factors_at(layout: AdapterLayout, start: int) -> Factors:
    """The layout's offsets for an adapter that begins at element `start` of the slab."""
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
