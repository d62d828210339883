"""Full blocks of K and V that may be used again, found by what they were computed from.

A block is known by a hash over everything its content depends on: the adapter's digest (or the
base model), the tenant's salt, and all tokens up to its end, as a chain over the blocks before
it. SHA-256: nobody can make two prompts collide. The salt keeps tenants from learning, by the
time of an answer, what others have asked.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lorad.memory.eviction import Reuse

BASE = "base"


class BlockChain:
    """The keys of one sequence's full blocks, computed as far as they were asked for.

    `started` and `entered` belong to the block table that the sequence has now: when it was
    begun, and how many of its blocks the cache has seen.
    """

    def __init__(self, adapter: str | None, salt: str, block_size: int) -> None:
        self.owner = adapter or BASE
        self._block_size = block_size
        self._root = hashlib.sha256(f"{len(self.owner)}:{self.owner}:{salt}".encode()).digest()
        self._keys: list[bytes] = []
        self.started = 0.0
        self.entered = 0

    def keys(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Keys of the first `blocks` blocks of `tokens`, which only ever grow."""
        size = self._block_size
        for i in range(len(self._keys), blocks):
            parent = self._keys[-1] if self._keys else self._root
            content = array("q", tokens[i * size : (i + 1) * size]).tobytes()
            self._keys.append(hashlib.sha256(parent + content).digest())
        return self._keys[:blocks]


@dataclass(slots=True)
class CachedBlock:
    key: bytes
    page: int
    owner: str  # the adapter's digest, or BASE
    reuse: Reuse = field(default_factory=Reuse)


class PrefixCache:
    """Key -> block, page -> block. Knows nothing of who reads a page, or whether anybody does."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_page: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: bytes) -> CachedBlock | None:
        return self._by_key.get(key)

    def on_page(self, page: int) -> CachedBlock | None:
        return self._by_page.get(page)

    def add(self, key: bytes, page: int, owner: str) -> CachedBlock | None:
        """None when the content, or the page, is known already."""
        if key in self._by_key or page in self._by_page:
            return None
        block = self._by_key[key] = self._by_page[page] = CachedBlock(key, page, owner)
        return block

    def forget(self, page: int) -> CachedBlock | None:
        block = self._by_page.pop(page, None)
        if block is not None:
            del self._by_key[block.key]
        return block

    def move(self, moves: Mapping[int, int]) -> None:
        moved = [(target, self._by_page.pop(source, None)) for source, target in moves.items()]
        for target, block in moved:
            if block is not None:
                block.page = target
                self._by_page[target] = block
