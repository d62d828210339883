"""Where each adapter is (store, host cache, device) and how it gets to the next tier.

Runs on the engine thread. Reading from the store happens on the loader's thread; its result
comes back as a message and enters here through `finish_load`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from lorad.adapter_ref import AdapterRef
from lorad.adapters.host_cache import HostCache
from lorad.adapters.loader import LoadResult
from lorad.engine.messages import AdapterState, Residency
from lorad.memory.adapter_pool import AdapterPool, ResidentAdapter

# "no_room": not beside what is in use now. "too_large": not beside the pinned adapters alone.
Readiness = Literal["ready", "loading", "no_room", "too_large"]


class AdapterTiers:
    def __init__(
        self, pool: AdapterPool, host: HostCache, start_load: Callable[[AdapterRef], None]
    ) -> None:
        self._pool = pool
        self._host = host
        self._start_load = start_load
        self._loading: set[str] = set()
        self._errors: dict[str, str] = {}

    @property
    def host_bytes(self) -> int:
        return self._host.nbytes

    @property
    def any_loading(self) -> bool:
        return bool(self._loading)

    def prepare(self, ref: AdapterRef) -> Readiness:
        """Bring an adapter one step nearer to the device; "ready" when it is there."""
        if ref.digest in self._pool:
            return "ready"
        weights = self._host.get(ref.digest)
        if weights is not None:
            if self._pool.upload(weights):
                return "ready"
            return "no_room" if self._pool.could_fit(weights.layout) else "too_large"
        if ref.digest not in self._loading:
            self._loading.add(ref.digest)
            self._start_load(ref)
        return "loading"

    def finish_load(self, result: LoadResult) -> None:
        """A load ended: its bytes are in host memory, or it failed and may be tried again."""
        digest = result.ref.digest
        self._loading.discard(digest)
        self._errors.pop(digest, None)
        if result.weights is not None:
            self._host.put(result.weights)
        elif result.error is not None:
            self._errors = {**dict(list(self._errors.items())[-99:]), digest: result.error.message}

    def acquire(self, digest: str) -> ResidentAdapter:
        return self._pool.acquire(digest)

    def release(self, digest: str) -> None:
        self._pool.release(digest)

    def get(self, digest: str) -> ResidentAdapter | None:
        return self._pool.get(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        self._pool.pin(digest, pinned)

    def is_loading(self, digest: str) -> bool:
        return digest in self._loading

    def evict_idle(self) -> bool:
        return self._pool.evict_idle() is not None

    def drop(self, digest: str) -> tuple[int, int]:
        """Forget an idle adapter; returns the bytes freed on the device and in host memory."""
        resident = self._pool.get(digest)
        device_bytes = 0
        if resident is not None:
            device_bytes = resident.layout.nbytes
            self._pool.evict(digest)
        return device_bytes, self._host.drop(digest)

    def states(self, running: dict[str, int], waiting: dict[str, int]) -> tuple[AdapterState, ...]:
        """One row per adapter that is anywhere but only in the store, or is waited for."""
        host = {weights.digest: weights for weights in self._host.items()}
        device = {adapter.digest: adapter for adapter in self._pool.resident()}
        known = {**host, **device, **dict.fromkeys([*self._loading, *self._errors, *waiting])}
        states = []
        for digest in known:
            resident, cached = device.get(digest), host.get(digest)
            layout = resident.layout if resident else cached.layout if cached else None
            states.append(
                AdapterState(
                    digest=digest,
                    residency=self._residency(digest, resident is not None, cached is not None),
                    rank=layout.max_rank if layout else 0,
                    device_pages=resident.num_pages if resident else 0,
                    device_bytes=layout.nbytes if resident and layout else 0,
                    host_bytes=cached.nbytes if cached else 0,
                    running_requests=running.get(digest, 0),
                    waiting_requests=waiting.get(digest, 0),
                    pinned=bool(resident and resident.pinned),
                    error=self._errors.get(digest, ""),
                )
            )
        return tuple(states)

    def _residency(self, digest: str, on_device: bool, in_host: bool) -> Residency:
        if on_device:
            return "device"
        if in_host:
            return "host"
        if digest in self._loading:
            return "loading"
        return "failed" if digest in self._errors else "disk"
