"""Whose turn it is when a load command and new requests want the same pages.

Under constant full load every page that becomes free would go to the next request, and a load
command for an adapter that fits beside fewer requests would wait for ever. So one that has waited
for room as long as any adapter has to may hold back the requests that have not begun: those that
run end, and their pages are the command's. A hold is bounded, and after it requests have at least
as much time as it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST_HOLD = 6.0  # in waits: 30 s at the default wait of 5


class LoadTurn:
    def __init__(self, wait: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`wait` is in seconds: before a hold, and between two."""
        self._wait = wait
        self._clock = clock
        self._blocked: dict[str, float] = {}  # command -> since when there has been no room
        self._holder = ""
        self._began = self._open_until = 0.0

    @property
    def holding(self) -> bool:
        """Whether requests that have not begun are to wait."""
        return bool(self._holder)

    @property
    def longest_wait(self) -> float:
        """Seconds after which a command that nobody is before of gives up."""
        return self._wait * (1 + _LONGEST_HOLD)

    def no_room(self, command_id: str) -> bool:
        """The command was tried and found no room; False when it has been given up."""
        now = self._clock()
        since = self._blocked.setdefault(command_id, now)
        if not self._holder and now - since > self._wait and now >= self._open_until:
            self._holder, self._began = command_id, now
        if self._holder != command_id or now - self._began <= _LONGEST_HOLD * self._wait:
            return True
        self.ended(command_id)
        return False

    def ended(self, command_id: str) -> None:
        """The command has what it wanted, or failed."""
        self._blocked.pop(command_id, None)
        if self._holder == command_id:
            now = self._clock()
            self._open_until = now + max(self._wait, now - self._began)
            self._holder = ""
