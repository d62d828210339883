"""Which pages of the slab are taken, and by whom. Bookkeeping only: no tensors, no policy.

KV blocks come one page at a time from the top; an adapter needs a contiguous run and takes the
best-fitting hole from the bottom. So the two grow towards each other, and either may use what
the other leaves (S-LoRA's unified paging, Sheng et al., arXiv:2311.03285, with runs instead of
single vectors).

A KV page has a reference for every block table it is in. At zero it is `cached`: nobody reads
it, its content may be found again by the prefix cache, and it is free for the asking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_FREE = 0
_KV = 1
_ADAPTER = 2
_RESERVED = 3  # free, in a window that is being cleared for an adapter
_HOLE = re.compile(b"\x00+")


class PagePool:
    """Equal pages, numbered 0 to `num_pages - 1`.

    K and V leave `adapter_floor` pages to adapters, however many sequences run; adapters take
    no more than `adapter_ceiling`, however few do.
    """

    def __init__(
        self, num_pages: int, *, adapter_floor: int = 0, adapter_ceiling: int | None = None
    ) -> None:
        self._owner = bytearray(num_pages)
        self._references = [0] * num_pages
        self._runs: dict[int, int] = {}  # first page -> length, of adapters
        self._window = range(0)
        self._kv_limit = num_pages - adapter_floor
        self._adapter_limit = num_pages if adapter_ceiling is None else adapter_ceiling
        self.kv_pages = 0  # in block tables
        self.cached_pages = 0  # K and V that no table holds
        self.adapter_pages = 0
        self.reserved_pages = 0

    # --- how much there is ------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return len(self._owner)

    @property
    def free_pages(self) -> int:
        taken = self.kv_pages + self.cached_pages + self.adapter_pages + self.reserved_pages
        return self.num_pages - taken

    @property
    def kv_room(self) -> int:
        """Free pages that K and V may take."""
        below_limit = self._kv_limit - self.kv_pages - self.cached_pages
        return max(0, min(self.free_pages, below_limit))

    @property
    def adapter_room(self) -> int:
        """Free pages that adapters may take, in however many holes."""
        below_limit = self._adapter_limit - self.adapter_pages - self.reserved_pages
        return max(0, min(self.free_pages, below_limit))

    @property
    def promised_pages(self) -> int:
        """Cached pages in the reserved window: given up, they are that adapter's."""
        return sum(self._owner[p] == _KV and not self._references[p] for p in self._window)

    @property
    def kv_limit(self) -> int:
        return self._kv_limit

    @property
    def adapter_limit(self) -> int:
        return self._adapter_limit

    def longest_run(self) -> int:
        return max((length for _, length in self.holes()), default=0)

    def holes(self) -> Iterator[tuple[int, int]]:
        """(first page, length) of every maximal free run, from the bottom."""
        for match in _HOLE.finditer(self._owner):
            yield match.start(), match.end() - match.start()

    def runs(self) -> list[tuple[int, int]]:
        """(first page, length) of every adapter, from the bottom."""
        return sorted(self._runs.items())

    def owners(self) -> bytes:
        """A copy of the map: 0 free, 1 K and V, 2 adapter, 3 reserved."""
        return bytes(self._owner)

    def kv_pages_in(self, pages: range) -> list[int]:
        owner = self._owner
        return [page for page in pages if owner[page] == _KV]

    # --- K and V ----------------------------------------------------------------------------

    def take_page(self) -> int | None:
        """The highest free page, with one reference; None when K and V may have no more."""
        if self.kv_room <= 0:
            return None
        page = self._owner.rfind(_FREE)
        self._owner[page] = _KV
        self._references[page] = 1
        self.kv_pages += 1
        return page

    def references(self, page: int) -> int:
        return self._references[page]

    def share(self, page: int) -> None:
        """One more block table holds the page; a cached one is in use again."""
        self._expect(page, _KV)
        if not self._references[page]:
            self.cached_pages -= 1
            self.kv_pages += 1
        self._references[page] += 1

    def release(self, page: int) -> bool:
        """One block table less; True when it was the last, and the page is cached now."""
        self._expect(page, _KV)
        if not self._references[page]:
            raise RuntimeError(f"page {page} is in no block table")
        self._references[page] -= 1
        if self._references[page]:
            return False
        self.kv_pages -= 1
        self.cached_pages += 1
        return True

    def free_page(self, page: int) -> None:
        """Give up a cached page."""
        self._expect(page, _KV)
        if self._references[page]:
            raise RuntimeError(f"page {page} is in {self._references[page]} block tables")
        self.cached_pages -= 1
        self._vacate(page)

    # --- adapters ---------------------------------------------------------------------------

    def take_run(self, length: int) -> int | None:
        """First page of the smallest hole that holds `length` pages; None when none does."""
        if length > self.adapter_room:
            return None
        fitting = [hole for hole in self.holes() if hole[1] >= length]
        if not fitting:
            return None
        start, _ = min(fitting, key=lambda hole: (hole[1], hole[0]))
        self._occupy(start, length)
        return start

    def free_run(self, start: int, length: int) -> None:
        if self._runs.get(start) != length:
            raise RuntimeError(f"no adapter has the {length} pages from {start}")
        del self._runs[start]
        self._owner[start : start + length] = bytes(length)
        self.adapter_pages -= length

    def reserve(self, window: range) -> None:
        """Keep a window without adapters for one: its free pages go to nobody else, and its
        K and V pages join them as they are moved out or given up."""
        if self._window:
            raise RuntimeError("another window is reserved")
        self._window = window
        for page in window:
            if self._owner[page] == _FREE:
                self._owner[page] = _RESERVED
                self.reserved_pages += 1

    @property
    def window(self) -> range:
        """What is reserved now; empty when nothing is."""
        return self._window

    def settle(self) -> int:
        """The reserved window, free of K and V by now, becomes a run; its first page."""
        start, length = self._window.start, len(self._window)
        self.cancel_window()
        self._occupy(start, length)
        return start

    def cancel_window(self) -> None:
        for page in self._window:
            if self._owner[page] == _RESERVED:
                self._owner[page] = _FREE
                self.reserved_pages -= 1
        self._window = range(0)

    # --- moving -----------------------------------------------------------------------------

    def take_target(self) -> int | None:
        """The highest free page, for a page of K and V that `move_page` moves there at once."""
        page = self._owner.rfind(_FREE)
        return None if page < 0 else page

    def move_page(self, source: int, target: int) -> None:
        """A page of K and V has been copied: its references are `target`'s now."""
        self._expect(source, _KV)
        self._expect(target, _FREE)
        self._owner[target] = _KV
        self._references[target] = self._references[source]
        self._references[source] = 0
        self._vacate(source)

    def move_run(self, source: int, target: int) -> None:
        """An adapter moves down into free pages next to it; the two may overlap."""
        length = self._runs[source]
        if any(self._owner[target:source]):
            raise RuntimeError(f"pages {target} to {source} are not free")
        del self._runs[source]
        self._owner[source : source + length] = bytes(length)
        self.adapter_pages -= length
        self._occupy(target, length)

    # --- inside -----------------------------------------------------------------------------

    def _occupy(self, start: int, length: int) -> None:
        if any(self._owner[start : start + length]):
            raise RuntimeError(f"pages {start} to {start + length} are not free")
        self._owner[start : start + length] = bytes([_ADAPTER]) * length
        self._runs[start] = length
        self.adapter_pages += length

    def _vacate(self, page: int) -> None:
        if page in self._window:
            self._owner[page] = _RESERVED
            self.reserved_pages += 1
        else:
            self._owner[page] = _FREE

    def _expect(self, page: int, owner: int) -> None:
        if self._owner[page] != owner:
            raise RuntimeError(f"page {page} is not what it is taken for")
