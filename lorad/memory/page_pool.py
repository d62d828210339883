"""Which pages of the slab are taken, and by whom. Bookkeeping only: no tensors, no policy.

KV blocks come one page at a time from the top; an adapter needs a contiguous run and takes the
best-fitting hole from the bottom. So the two grow towards each other, and either may use what
the other leaves (S-LoRA's unified paging, Sheng et al., arXiv:2311.03285, with runs instead of
single vectors).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_FREE = 0
_KV = 1
_ADAPTER = 2
_HOLE = re.compile(rb"\0+")


class PagePool:
    """Equal pages, numbered 0 to `num_pages - 1`."""

    def __init__(self, num_pages: int) -> None:
        self._owner = bytearray(num_pages)
        self.kv_pages = 0
        self.adapter_pages = 0

    @property
    def num_pages(self) -> int:
        return len(self._owner)

    @property
    def free_pages(self) -> int:
        return self.num_pages - self.kv_pages - self.adapter_pages

    def take_page(self) -> int | None:
        """The highest free page, for K and V; None when all are taken."""
        page = self._owner.rfind(_FREE)
        if page < 0:
            return None
        self._owner[page] = _KV
        self.kv_pages += 1
        return page

    def free_page(self, page: int) -> None:
        self._expect(page, _KV)
        self._owner[page] = _FREE
        self.kv_pages -= 1

    def take_run(self, length: int) -> int | None:
        """First page of the smallest hole that holds `length` pages; None when none does."""
        fitting = [hole for hole in _holes(self._owner) if hole[1] >= length]
        if not fitting:
            return None
        start, _ = min(fitting, key=lambda hole: (hole[1], hole[0]))
        self._owner[start : start + length] = bytes([_ADAPTER]) * length
        self.adapter_pages += length
        return start

    def free_run(self, start: int, length: int) -> None:
        for page in range(start, start + length):
            self._expect(page, _ADAPTER)
        self._owner[start : start + length] = bytes(length)
        self.adapter_pages -= length

    def longest_run(self, also_free: Iterable[tuple[int, int]] = ()) -> int:
        """Length of the longest hole, were the runs `also_free` (start, length) free as well."""
        owner = bytearray(self._owner)
        for start, length in also_free:
            owner[start : start + length] = bytes(length)
        return max((length for _, length in _holes(owner)), default=0)

    def _expect(self, page: int, owner: int) -> None:
        if self._owner[page] != owner:
            raise RuntimeError(f"page {page} is not owned by whom gives it back")


def _holes(owner: bytearray) -> Iterator[tuple[int, int]]:
    """(first page, length) of every maximal free run, from the bottom."""
    return ((hole.start(), hole.end() - hole.start()) for hole in _HOLE.finditer(owner))
