"""Where each adapter is (store, host cache, device) and how it gets to the next tier.

Runs on the engine thread. Reading from the store happens on the loader's thread; its result
comes back as a message and enters here through `finish_load`. What has been read waits outside
the host cache until it is on the device, so that the cache may refuse it without harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from typing import Literal

from lorad.adapter_ref import AdapterRef
from lorad.adapters.host_cache import HostCache
from lorad.adapters.loader import LoadResult
from lorad.adapters.weights import AdapterWeights
from lorad.engine.adapter_states import AdapterStates
from lorad.engine.messages import AdapterState, Histogram, LoadReason, Residency
from lorad.memory.adapter_pool import AdapterPool, ResidentAdapter
from lorad.memory.relocation import Relocator

# "loading" ends by itself. "no_room": not beside what is in use now. "too_large": not beside the
# pinned adapters alone.
Readiness = Literal["ready", "loading", "no_room", "too_large"]

_ERRORS_KEPT = 100
_FETCH_WEIGHT = 0.1  # of the newest load in the running mean


class AdapterTiers:
    def __init__(
        self,
        pool: AdapterPool,
        host: HostCache,
        start_load: Callable[[AdapterRef], None],
        cancel_load: Callable[[str], bool] = lambda digest: False,
        *,
        prefetch: int = 8,
    ) -> None:
        """`prefetch` bounds the adapters read ahead for requests that cannot run yet."""
        self._pool = pool
        self._host = host
        self._start_load = start_load
        self._cancel_load = cancel_load
        self._prefetch = prefetch
        self._loading: set[str] = set()
        self._arrived: dict[str, AdapterWeights] = {}  # read, not yet on the device
        self._errors: dict[str, str] = {}
        self._states = AdapterStates(self._state)
        self._fetch_seconds = 0.0
        self.loads: Counter[LoadReason] = Counter()
        self.lookups: Counter[str] = Counter()  # tier in which a request found its adapter
        self.host_evictions = 0
        self.cancelled_loads = 0
        self.load_seconds = Histogram()
        pool.fetch_seconds = lambda digest, _: 0.0 if digest in host else self._fetch_seconds
        pool.on_evicted = self._states.changed

    # --- what there is ----------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        return self._host.nbytes + sum(weights.nbytes for weights in self._arrived.values())

    @property
    def busy(self) -> bool:
        """Whether an adapter is on its way, and will get further by itself."""
        return bool(self._loading) or self._pool.relocator.busy or self._pool.any_copying()

    @property
    def relocator(self) -> Relocator:
        return self._pool.relocator

    def get(self, digest: str) -> ResidentAdapter | None:
        return self._pool.get(digest)

    def is_loading(self, digest: str) -> bool:
        return digest in self._loading

    def states(self, running: dict[str, int], waiting: dict[str, int]) -> tuple[AdapterState, ...]:
        return self._states.snapshot(running, waiting)

    # --- upwards ----------------------------------------------------------------------------

    def count_request(self, ref: AdapterRef) -> None:
        """A request for this adapter has come: where was it found?"""
        self._host.count_request(ref.digest)
        self.lookups[self._tier(ref.digest)] += 1

    def prepare(self, ref: AdapterRef, reason: LoadReason = "request") -> Readiness:
        """Bring an adapter one step nearer to the device; "ready" when it is there.

        For a request its first layer is enough: its prefill waits for the others as it goes.
        """
        state = self._pool.state(ref.digest)
        if state is None:
            weights = self._arrived.get(ref.digest) or self._host.get(ref.digest)
            if weights is None:
                self._load(ref, reason)
                return "loading"
            state = self._pool.upload(weights)
            if state == "no_room" and not self._pool.could_fit(weights.layout):
                return "too_large"
            self._states.changed(ref.digest)
            if state in ("ready", "arriving", "copying"):
                self._keep_on_host(ref.digest)
        if state == "arriving" and reason == "request":
            return "ready"
        if state in ("ready", "no_room"):
            return state
        return "loading"

    def prefetch(self, ref: AdapterRef) -> bool:
        """Read an adapter into host memory ahead of its turn; False when enough are under way."""
        digest = ref.digest
        if self._tier(digest) != "store" or digest in self._loading:
            return True
        if len(self._loading) + len(self._arrived) >= self._prefetch:
            return False
        self._load(ref, "prefetch")
        return True

    def finish_load(self, result: LoadResult) -> None:
        """A load ended: its bytes are in host memory, or it failed and may be tried again."""
        digest = result.ref.digest
        self._loading.discard(digest)
        self._errors.pop(digest, None)
        self._states.changed(digest)
        if result.weights is not None:
            self._arrived[digest] = result.weights
            self._time(result.seconds)
        elif result.error is not None:
            self._keep_error(digest, result.error.message)

    def keep_only(self, wanted: Container[str]) -> None:
        """Nobody waits for the others any more: read them not, or keep them for later."""
        for digest in [d for d in self._loading if d not in wanted]:
            if self._cancel_load(digest):
                self._loading.discard(digest)
                self._states.changed(digest)
                self.cancelled_loads += 1
        for digest in [d for d in self._arrived if d not in wanted]:
            self._keep_on_host(digest)

    @property
    def under_way(self) -> bool:
        """Whether `keep_only` could find anything to do."""
        return bool(self._loading or self._arrived)

    # --- in use, and downwards ----------------------------------------------------------------

    def begin_step(self) -> None:
        self._pool.relocator.begin_step()

    def give_up_window(self) -> bool:
        """Whether pages that were being cleared for an adapter are free again."""
        return self._pool.relocator.cancel()

    def acquire(self, digest: str, *, again: bool) -> ResidentAdapter:
        return self._pool.acquire(digest, again=again)

    def release(self, digest: str) -> None:
        self._pool.release(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        self._pool.pin(digest, pinned)
        self._states.changed(digest)

    def drop(self, digest: str) -> tuple[int, int]:
        """Forget an idle adapter; returns the bytes freed on the device and in host memory."""
        resident = self._pool.get(digest)
        device_bytes = 0
        if resident is not None:
            device_bytes = resident.layout.nbytes
            self._pool.remove(digest)
        arrived = self._arrived.pop(digest, None)
        self._states.changed(digest)
        return device_bytes, self._host.drop(digest) + (arrived.nbytes if arrived else 0)

    # --- inside -----------------------------------------------------------------------------

    def _load(self, ref: AdapterRef, reason: LoadReason) -> None:
        if ref.digest not in self._loading:
            self._loading.add(ref.digest)
            self._states.changed(ref.digest)
            self.loads[reason] += 1
            self._start_load(ref)

    def _keep_on_host(self, digest: str) -> None:
        weights = self._arrived.pop(digest, None)
        if weights is None:
            return
        for left in self._host.put(weights):
            self.host_evictions += left != digest
            self._states.changed(left)
        self._states.changed(digest)

    def _time(self, seconds: float) -> None:
        self.load_seconds.add(seconds)
        weight = _FETCH_WEIGHT if self._fetch_seconds else 1.0
        self._fetch_seconds += weight * (seconds - self._fetch_seconds)

    def _keep_error(self, digest: str, message: str) -> None:
        while len(self._errors) >= _ERRORS_KEPT:
            oldest = next(iter(self._errors))
            del self._errors[oldest]
            self._states.changed(oldest)
        self._errors[digest] = message

    def _tier(self, digest: str) -> Literal["device", "host", "store"]:
        if digest in self._pool:
            return "device"
        return "host" if digest in self._arrived or digest in self._host else "store"

    def _state(self, digest: str) -> AdapterState | None:
        resident = self._pool.get(digest)
        cached = self._arrived.get(digest) or self._host.peek(digest)
        layout = resident.layout if resident else cached.layout if cached else None
        residency = self._residency(digest)
        if residency == "disk":
            return None
        return AdapterState(
            digest=digest,
            residency=residency,
            rank=layout.max_rank if layout else 0,
            device_pages=resident.num_pages if resident else 0,
            device_bytes=resident.layout.nbytes if resident else 0,
            host_bytes=cached.nbytes if cached else 0,
            pinned=bool(resident and resident.pinned),
            error=self._errors.get(digest, ""),
        )

    def _residency(self, digest: str) -> Residency:
        tier = self._tier(digest)
        if tier != "store":
            return tier
        if digest in self._loading:
            return "loading"
        return "failed" if digest in self._errors else "disk"
