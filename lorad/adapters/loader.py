"""One thread that reads adapters from the store, so that the step loop never touches a disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lorad.adapter_ref import AdapterRef
from lorad.adapters.weights import AdapterWeights
from lorad.errors import LoradError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of one load; exactly one of `weights` and `error` is set."""

    ref: AdapterRef
    seconds: float
    weights: AdapterWeights | None = None
    error: LoradError | None = None


class AdapterLoader:
    """Reads in the order asked. `on_done` is called on the loader's thread."""

    def __init__(
        self,
        read: Callable[[AdapterRef], AdapterWeights],
        on_done: Callable[[LoadResult], None],
    ) -> None:
        self._read = read
        self._on_done = on_done
        self._queue: queue.SimpleQueue[AdapterRef | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorad-loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, ref: AdapterRef) -> None:
        self._queue.put(ref)

    def stop(self) -> None:
        """Finish the load in hand, drop the rest."""
        self._stopping.set()
        self._queue.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while (ref := self._queue.get()) is not None and not self._stopping.is_set():
            self._on_done(self._load(ref))

    def _load(self, ref: AdapterRef) -> LoadResult:
        start = time.monotonic()
        try:
            weights = self._read(ref)
        except LoradError as error:
            return LoadResult(ref, time.monotonic() - start, error=error)
        except Exception as error:
            log.exception("loading %s failed", ref)
            failed = LoradError("adapter.load_failed", f"{ref} could not be loaded: {error}")
            return LoadResult(ref, time.monotonic() - start, error=failed)
        return LoadResult(ref, time.monotonic() - start, weights=weights)
