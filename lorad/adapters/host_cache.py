"""The middle tier: packed adapters in host memory, bounded by count and by bytes.

Recency decides who is asked to leave, frequency whether it must: a newcomer takes a place only
from one that is not wanted more often than itself (TinyLFU, Einziger et al., ACM Transactions
on Storage 13(4), 2017), and one that keeps its place is not asked again before all others. So
a scan over all adapters leaves the popular ones where they are.
"""

from __future__ import annotations

from collections import OrderedDict

from lorad.adapters.weights import AdapterWeights

_SAMPLE = 16  # requests counted per place in the cache before all counts are halved


class RequestCounts:
    """How often each adapter was asked for lately. Holds at most a few entries per place."""

    def __init__(self, places: int) -> None:
        self._limit = max(1, places) * _SAMPLE
        self._counts: dict[str, int] = {}
        self._total = 0

    def __getitem__(self, digest: str) -> int:
        return self._counts.get(digest, 0)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, digest: str) -> None:
        self._counts[digest] = self._counts.get(digest, 0) + 1
        self._total += 1
        if self._total >= self._limit:
            self._counts = {key: n // 2 for key, n in self._counts.items() if n > 1}
            self._total = sum(self._counts.values())


class HostCache:
    """Not thread-safe: the engine thread owns it."""

    def __init__(self, max_adapters: int, max_bytes: int) -> None:
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._requests = RequestCounts(max_adapters)
        self.nbytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def count_request(self, digest: str) -> None:
        """An adapter was asked for, here or not."""
        self._requests.add(digest)

    def get(self, digest: str) -> AdapterWeights | None:
        weights = self._entries.get(digest)
        if weights is not None:
            self._entries.move_to_end(digest)
        return weights

    def peek(self, digest: str) -> AdapterWeights | None:
        """Like get, but no use of it."""
        return self._entries.get(digest)

    def put(self, weights: AdapterWeights) -> list[str]:
        """Keep an adapter if it is worth a place; returns who is not in the cache any more.

        That may be `weights` itself.
        """
        self.drop(weights.digest)
        leaving = self._would_leave(weights)
        if leaving is None:
            return [weights.digest]
        for digest in leaving:
            self.drop(digest)
        self._entries[weights.digest] = weights
        self.nbytes += weights.nbytes
        return leaving

    def drop(self, digest: str) -> int:
        """Forget an adapter; returns the bytes given back."""
        weights = self._entries.pop(digest, None)
        if weights is None:
            return 0
        self.nbytes -= weights.nbytes
        return weights.nbytes

    def items(self) -> list[AdapterWeights]:
        return list(self._entries.values())

    def _would_leave(self, weights: AdapterWeights) -> list[str] | None:
        """Whose places it would take, or None if one of them is wanted more often."""
        count, nbytes = len(self._entries) + 1, self.nbytes + weights.nbytes
        leaving: list[str] = []
        for digest, entry in self._entries.items():  # used longest ago first
            if count <= self._max_adapters and nbytes <= self._max_bytes:
                break
            if self._requests[digest] > self._requests[weights.digest]:
                self._entries.move_to_end(digest)
                return None
            leaving.append(digest)
            count, nbytes = count - 1, nbytes - entry.nbytes
        fits = count <= self._max_adapters and nbytes <= self._max_bytes
        return leaving if fits else None
