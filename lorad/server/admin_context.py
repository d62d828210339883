"""What the admin API works on, handed to it once by the daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request

from lorad.adapter_ref import AdapterRef
from lorad.engine.messages import AdapterLoaded, AdapterUnloaded, EngineStats, StepRecord
from lorad.registry.registry import Registry
from lorad.server.self_test import SelfTest
from lorad.server.traffic import Traffic


class AdminEngine(Protocol):
    """The part of the engine that the admin API uses."""

    async def load_adapter(self, ref: AdapterRef, *, pin: bool | None = None) -> AdapterLoaded:
        """Bring it onto the device; loading what is there already moves nothing.

        `pin` says whether it may be evicted from now on; None leaves that as it was.
        """
        ...

    async def unload_adapter(self, ref: AdapterRef, *, drain_timeout: float) -> AdapterUnloaded:
        """Wait for its running requests, then free its device pages and host copy.

        Raises `drain.timeout`, and then nothing has changed.
        """
        ...

    def stats(self) -> EngineStats: ...

    def recent_steps(self, limit: int) -> list[StepRecord]:
        """The last steps, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class AdminLimits:
    """Bounds on what one client of the socket can take; sizes in bytes, times in seconds."""

    max_upload_bytes: int = 4 << 30
    max_uploads: int = 16
    upload_idle: float = 60.0  # between two requests of one upload
    read_timeout: float = 30.0  # for the next piece of a request's body
    drain_timeout: float = 30.0  # unless the request says otherwise


@dataclass
class Followers:
    """How many clients follow the events."""

    count: int = 0


@dataclass(frozen=True)
class AdminContext:
    registry: Registry
    engine: AdminEngine
    traffic: Traffic
    config: Callable[[], Mapping[str, Any]]  # the effective settings, as GET /v1/config shows them
    shutdown: Callable[[], None]
    metrics: Callable[[], bytes]
    limits: AdminLimits
    self_test: SelfTest | None = None  # None: a version is promoted once it is loaded
    stopping: Callable[[], bool] = lambda: False
    # How many of the newest versions of each adapter stay after a promote; 0: all.
    keep: Callable[[], int] = lambda: 0
    followers: Followers = field(default_factory=Followers)
    started_at: float = field(default_factory=time.time)


def context(request: Request) -> AdminContext:
    found: AdminContext = request.app.state.admin
    return found
