"""The middle tier: packed adapters in host memory, bounded by count and by bytes."""

from __future__ import annotations

from collections import OrderedDict

from lorad.adapters.weights import AdapterWeights


class HostCache:
    """Least recently used goes first. Not thread-safe: the engine thread owns it."""

    def __init__(self, max_adapters: int, max_bytes: int) -> None:
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, AdapterWeights] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> AdapterWeights | None:
        weights = self._entries.get(digest)
        if weights is not None:
            self._entries.move_to_end(digest)
        return weights

    def put(self, weights: AdapterWeights) -> None:
        """Keep the newest even when it alone exceeds the byte bound: it is about to be used."""
        self.drop(weights.digest)
        self._entries[weights.digest] = weights
        self.nbytes += weights.nbytes
        while len(self._entries) > 1 and self._over():
            _, old = self._entries.popitem(last=False)
            self.nbytes -= old.nbytes

    def drop(self, digest: str) -> int:
        """Forget an adapter; returns the bytes given back."""
        weights = self._entries.pop(digest, None)
        if weights is None:
            return 0
        self.nbytes -= weights.nbytes
        return weights.nbytes

    def items(self) -> list[AdapterWeights]:
        return list(self._entries.values())

    def _over(self) -> bool:
        return len(self._entries) > self._max_adapters or self.nbytes > self._max_bytes
