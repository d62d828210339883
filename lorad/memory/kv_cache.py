"""Pages for the K and V of sequences: a block table grows by whole pages."""

from __future__ import annotations

from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab


class KVCache:
    """Hands pages to block tables (lists of page numbers, in token order)."""

    def __init__(self, pool: PagePool, slab: Slab) -> None:
        self._pool = pool
        self._slab = slab

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._slab.block_size)

    def grow(self, block_table: list[int], tokens: int) -> bool:
        """Give the table room for `tokens` tokens; False when pages run out (table unchanged)."""
        missing = self.pages_for(tokens) - len(block_table)
        if missing > self._pool.free_pages:
            return False
        for _ in range(missing):
            page = self._pool.take_page()
            if page is None:  # free_pages said otherwise: the books are wrong
                raise RuntimeError("page pool lost a page")
            self._slab.clear_page(page)
            block_table.append(page)
        return True

    def release(self, block_table: list[int]) -> None:
        """Give all pages of the table back, and empty it."""
        for page in block_table:
            self._pool.free_page(page)
        block_table.clear()
