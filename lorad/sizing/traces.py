"""A recorded trace of requests: who was asked for when, and what a cache would have done."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from lorad.errors import LoradError
from lorad.sizing.cache_model import HitRate
from lorad.sizing.popularity import Popularity, from_weights, read_rows

HOUR = 3600.0


@dataclass(frozen=True)
class Trace:
    """Requests in order of time. `adapters[k]` is an index into `names`."""

    label: str
    times: Sequence[float]  # seconds
    adapters: Sequence[int]
    names: tuple[str, ...]  # most popular first

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def rate(self) -> float:
        """Requests per second; 0 where the trace has no extent in time."""
        return (len(self.times) - 1) / self.seconds if self.seconds > 0 else 0.0

    def popularity(self) -> Popularity:
        """How often each adapter was asked for, in the order of `names`."""
        counts = Counter(self.adapters)
        weights = [counts[i] for i in range(len(self.names))]
        return from_weights(self.label, weights, self.names)

    def unique_in_last(self, seconds: float) -> int:
        """Different adapters in the end of the trace."""
        start = bisect_right(self.times, self.times[-1] - seconds)
        return len(set(self.adapters[start:]))


class TraceModel:
    """LRU replayed on a trace, exactly, for every capacity at once.

    A request is a hit if all that was touched since the adapter's last use, and the adapter
    itself, fit together: its stack distance, in bytes. One pass over the trace finds them all.
    The first request for an adapter is always a miss.
    """

    def __init__(self, trace: Trace, sizes: Sequence[int]) -> None:
        """`sizes[i]` is the size of `trace.names[i]`, in the unit of the capacities."""
        self._requests = len(trace.adapters)
        self._distances = sorted(stack_distances(trace.adapters, sizes))
        self._sizes = sizes

    def hit_rate(self, capacity: int) -> HitRate:
        """The share of the trace's requests that hit with this much room."""
        hits = bisect_right(self._distances, capacity)
        mean = sum(self._sizes) / len(self._sizes)
        resident = min(len(self._sizes), capacity / mean)
        return HitRate(hits / self._requests, "replayed", resident)


def stack_distances(adapters: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """For every request but an adapter's first: the room LRU needs for it to be a hit.

    A Fenwick tree over the positions of the trace holds the size of each adapter at its
    latest use, so that the sum since then is two walks of log2(n) steps.
    """
    length = len(adapters)
    tree = [0] * (length + 1)
    total = 0
    latest: dict[int, int] = {}
    distances = []
    for position, adapter in enumerate(adapters, 1):
        size = sizes[adapter]
        before = latest.get(adapter)
        if before is None:
            total += size
        else:
            older, walk = 0, before
            while walk:
                older += tree[walk]
                walk &= walk - 1
            distances.append(total - older + size)
            while before <= length:
                tree[before] -= size
                before += before & -before
        latest[adapter] = walk = position
        while walk <= length:
            tree[walk] += size
            walk += walk & -walk
    return distances


def read_trace(path: Path) -> Trace:
    """A CSV of `time,adapter` lines, with or without a header; sorted by time.

    Times are seconds, or ISO 8601. Raises `path.not_found` or `usage.invalid`.
    """
    rows = read_rows(path)
    if rows and _seconds(rows[0]) is None:
        rows = rows[1:]  # a header
    requests = []
    for line, row in enumerate(rows, 1):
        seconds = _seconds(row)
        if seconds is None:
            raise LoradError(
                "usage.invalid",
                f"{path}, request {line}: {','.join(row)[:80]!r} is not `time,adapter`",
                hint="time in seconds or ISO 8601, for example `12.5,acme/support`",
            )
        requests.append((seconds, row[1].strip()))
    if len(requests) < 2:
        raise LoradError(
            "usage.invalid", f"{path} has {len(requests)} requests", hint="a trace needs two"
        )
    requests.sort(key=lambda request: request[0])
    names = tuple(name for name, _ in Counter(name for _, name in requests).most_common())
    index = {name: i for i, name in enumerate(names)}
    return Trace(
        label=f"trace:{path.name}",
        times=array("d", (seconds for seconds, _ in requests)),
        adapters=array("l", (index[name] for _, name in requests)),
        names=names,
    )


def _seconds(row: list[str]) -> float | None:
    if len(row) < 2:
        return None
    try:
        seconds = float(row[0])
        return seconds if isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(row[0].strip()).timestamp()
    except ValueError:
        return None
