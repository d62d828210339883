"""The engine's table of adapters for `status` and metrics, kept up to date row by row.

With thousands of adapters in memory a table made anew for each snapshot would cost more than
a step. So a row is made when something about its adapter changed; what changes with every
request, the numbers of running and waiting ones, is filled in for those adapters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lorad.engine.messages import AdapterState


class AdapterStates:
    def __init__(self, look: Callable[[str], AdapterState | None]) -> None:
        """`look` tells an adapter's state now, or None when its bytes are nowhere in memory."""
        self._look = look
        self._rows: dict[str, AdapterState] = {}
        self._changed: set[str] = set()

    def changed(self, digest: str) -> None:
        self._changed.add(digest)

    def snapshot(
        self, running: Mapping[str, int], waiting: Mapping[str, int]
    ) -> tuple[AdapterState, ...]:
        """One row per adapter that is anywhere but only in the store, or is asked for."""
        for digest in self._changed:
            row = self._look(digest)
            if row is None:
                self._rows.pop(digest, None)
            else:
                self._rows[digest] = row
        self._changed.clear()
        rows = dict(self._rows)
        for digest in {*running, *waiting}:
            rows[digest] = replace(
                rows.get(digest) or AdapterState(digest, "disk"),
                running_requests=running.get(digest, 0),
                waiting_requests=waiting.get(digest, 0),
            )
        return tuple(rows.values())
