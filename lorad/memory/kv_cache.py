"""Pages for the K and V of sequences, and their second life as a prefix cache.

A block table is a list of page numbers in token order. Full blocks that are proven good are
entered in the prefix cache; a sequence that begins with the same tokens, under the same adapter
and tenant, takes their pages into its own table without a copy. When nobody holds a page any
more it stays as it is until its place is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lorad.memory.eviction import Eviction, PriceQueue
from lorad.memory.page_pool import PagePool
from lorad.memory.prefix_cache import BASE, BlockChain, CachedBlock, PrefixCache
from lorad.memory.slab import Slab

_FIRST = float("-inf")  # the price of what can serve nobody


class KVCache:
    """Block tables over the pool. `kind` and three methods are for the eviction."""

    kind = "prefix"

    def __init__(self, pool: PagePool, slab: Slab, eviction: Eviction) -> None:
        self._pool = pool
        self._slab = slab
        self._eviction = eviction
        self._prefixes = PrefixCache()
        self._tables: dict[int, list[int]] = {}  # by identity: every table that holds pages
        self._idle: PriceQueue[bytes] = PriceQueue()
        # Blocks nobody holds of adapters that are not on the device, per adapter, oldest first.
        self._orphans: dict[str, dict[bytes, None]] = {}
        self._present: set[str] = {BASE}
        self._idle_of: dict[str, dict[bytes, None]] = {}
        eviction.add_source(self)

    @property
    def block_size(self) -> int:
        return self._slab.block_size

    def chain(self, adapter: str | None, salt: str) -> BlockChain:
        return BlockChain(adapter, salt, self.block_size)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # --- block tables -----------------------------------------------------------------------

    def attach(self, table: list[int], chain: BlockChain, tokens: Sequence[int]) -> int:
        """Fill an empty table with the cached blocks that `tokens` begin with.

        Returns the number of tokens they hold: never all, the last is always computed anew
        because its logits are wanted.
        """
        first = not chain.started  # a sequence that tries again is no further use
        chain.started = chain.started or self._eviction.clock()
        for key in chain.keys(tokens, (len(tokens) - 1) // self.block_size):
            block = self._prefixes.find(key)
            if block is None:
                break
            self._pool.share(block.page)
            self._not_idle(block)
            if first:
                block.reuse.touch(chain.started)
            table.append(block.page)
        self._track(table)
        chain.entered = len(table)
        return len(table) * self.block_size

    def first_unknown(self, chain: BlockChain, tokens: Sequence[int]) -> bytes | None:
        """The first block that `attach` would not find; None when it would find all it could."""
        keys = chain.keys(tokens, (len(tokens) - 1) // self.block_size)
        return next((key for key in keys if self._prefixes.find(key) is None), None)

    def unknown(self, chain: BlockChain, tokens: Sequence[int], computed: int) -> set[bytes]:
        """The blocks of the first `computed` tokens that `remember` would enter."""
        keys = chain.keys(tokens, computed // self.block_size)
        return {key for key in keys if self._prefixes.find(key) is None}

    def grow(self, table: list[int], tokens: int) -> bool:
        """Give the table room for `tokens` tokens; False when pages run out (table unchanged)."""
        missing = self.pages_for(tokens) - len(table)
        if missing <= 0:
            return True
        if not self._eviction.free_for_kv(missing):
            return False
        for _ in range(missing):
            page = self._pool.take_page()
            if page is None:  # kv_room said otherwise: the books are wrong
                raise RuntimeError("page pool lost a page")
            self._slab.clear_page(page)
            table.append(page)
        self._track(table)
        return True

    def remember(
        self, table: list[int], chain: BlockChain, tokens: Sequence[int], computed: int
    ) -> None:
        """The K and V of the first `computed` tokens are proven good: others may use them."""
        blocks = computed // self.block_size
        if blocks <= chain.entered:
            return
        keys = chain.keys(tokens, blocks)
        for i in range(chain.entered, blocks):
            block = self._prefixes.add(keys[i], table[i], chain.owner)
            if block is not None:
                # As if used when the sequence began: a block never outlives those before it.
                block.reuse.touch(chain.started)
        chain.entered = blocks

    def release(self, table: list[int]) -> None:
        """Give all pages of the table back, and empty it; remembered blocks stay cached."""
        # The end first: a block is of no use without those before it.
        for page in reversed(table):
            if self._pool.release(page):
                self._keep_or_free(page)
        self._untrack(table)

    def discard(self, table: list[int]) -> None:
        """Like release, but nobody shall find these blocks again: they may hold NaN."""
        for page in table:
            self._prefixes.forget(page)
        self.release(table)

    # --- what happens around it -------------------------------------------------------------

    def adapter_present(self, digest: str, present: bool) -> None:
        """Blocks of an adapter that is not on the device go first: they can serve nobody."""
        if present:
            self._present.add(digest)
            for key in self._orphans.pop(digest, {}):
                self._price(self._block(key))
            return
        self._present.discard(digest)
        if digest in self._idle_of:
            self._orphans[digest] = dict(self._idle_of[digest])
            for key in self._orphans[digest]:
                self._idle.discard(key)

    def pages_moved(self, moves: Mapping[int, int]) -> None:
        """Pages lie elsewhere now: every table that holds one is patched."""
        for table in self._tables.values():
            table[:] = [moves.get(page, page) for page in table]
        self._prefixes.move(moves)

    # --- eviction ---------------------------------------------------------------------------

    def idle_pages(self) -> int:
        return self._pool.cached_pages

    def price(self) -> float | None:
        if self._orphans:
            return _FIRST
        cheapest = self._idle.cheapest()
        return None if cheapest is None else cheapest[0]

    def evict(self) -> None:
        if self._orphans:
            key = next(iter(next(iter(self._orphans.values()))))
        else:
            cheapest = self._idle.cheapest()
            if cheapest is None:
                raise RuntimeError("no cached block is idle")
            key = cheapest[1]
        block = self._block(key)
        self._not_idle(block)
        self._prefixes.forget(block.page)
        self._pool.free_page(block.page)

    # --- inside -----------------------------------------------------------------------------

    def _block(self, key: bytes) -> CachedBlock:
        block = self._prefixes.find(key)
        if block is None:
            raise RuntimeError("an idle block is not in the prefix cache")
        return block

    def _keep_or_free(self, page: int) -> None:
        block = self._prefixes.on_page(page)
        if block is None:
            self._pool.free_page(page)
            return
        self._idle_of.setdefault(block.owner, {})[block.key] = None
        if block.owner in self._present:
            self._price(block)
        else:
            self._orphans.setdefault(block.owner, {})[block.key] = None

    def _price(self, block: CachedBlock) -> None:
        seconds = self.block_size * self._eviction.kv_token_seconds
        self._idle.add(block.key, block.reuse.price(seconds))

    def _not_idle(self, block: CachedBlock) -> None:
        self._idle.discard(block.key)
        for groups in (self._orphans, self._idle_of):
            group = groups.get(block.owner, {})
            group.pop(block.key, None)
            if not group:
                groups.pop(block.owner, None)

    def _track(self, table: list[int]) -> None:
        if table:
            self._tables[id(table)] = table

    def _untrack(self, table: list[int]) -> None:
        self._tables.pop(id(table), None)
        table.clear()
