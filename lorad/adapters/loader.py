"""One thread that reads adapters from the store, so that the step loop never touches a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lorad.adapter_ref import AdapterRef
from lorad.adapters.weights import AdapterWeights
from lorad.errors import LoradError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of one load; exactly one of `weights` and `error` is set.

    `seconds` is the reading alone, `queued` the wait for the loads asked before.
    """

    ref: AdapterRef
    seconds: float
    weights: AdapterWeights | None = None
    error: LoradError | None = None
    queued: float = 0.0


class AdapterLoader:
    """Reads in the order asked. `on_done` is called on the loader's thread."""

    def __init__(
        self,
        read: Callable[[AdapterRef], AdapterWeights],
        on_done: Callable[[LoadResult], None],
    ) -> None:
        self._read = read
        self._on_done = on_done
        self._wanted: deque[tuple[AdapterRef, float]] = deque()  # and when it was asked for
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lorad-loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, ref: AdapterRef) -> None:
        """Read this version after all that was asked before."""
        with self._changed:
            self._wanted.append((ref, time.monotonic()))
            self._changed.notify()

    def cancel(self, digest: str) -> bool:
        """Read it no more; False when its reading has begun, and `on_done` will tell."""
        with self._changed:
            left = [asked for asked in self._wanted if asked[0].digest != digest]
            cancelled = len(left) < len(self._wanted)
            self._wanted = deque(left)
            return cancelled

    def stop(self) -> None:
        """Finish the load in hand, drop the rest."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while (asked := self._next()) is not None:
            self._on_done(self._load(*asked))

    def _next(self) -> tuple[AdapterRef, float] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._stopping)
            if self._stopping:
                return None
            return self._wanted.popleft()

    def _load(self, ref: AdapterRef, asked_at: float) -> LoadResult:
        start = time.monotonic()
        queued = start - asked_at
        try:
            weights = self._read(ref)
        except LoradError as error:
            return LoadResult(ref, time.monotonic() - start, error=error, queued=queued)
        except Exception as error:
            log.exception("loading %s failed", ref)
            failed = LoradError("adapter.load_failed", f"{ref} could not be loaded: {error}")
            return LoadResult(ref, time.monotonic() - start, error=failed, queued=queued)
        return LoadResult(ref, time.monotonic() - start, weights=weights, queued=queued)
