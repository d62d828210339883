"""Changes that outlive the request that asked for them, and answers that can be asked for again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from lorad.errors import LoradError
from lorad.registry.records import Who

log = logging.getLogger("lorad.admin")

_KEPT = 256  # ended operations
_KEPT_SECONDS = 3600.0
_MOST_RUNNING = 64


@dataclass
class Operation:
    """One change on its way. `response` is what a request that waited would have got."""

    id: str
    action: str  # "promote", "delete", ...
    target: str  # the path that was asked
    who: Who
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    response: Response | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        if self.response is None:
            return "running"
        return "succeeded" if self.response.status_code < 400 else "failed"


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with an Idempotency-Key; `content` tells whether a second one is the same."""

    uid: int
    key: str
    content: bytes

    @classmethod
    def of(cls, uid: int, key: str, *parts: bytes) -> KeyedRequest:
        hashed = hashlib.sha256(b"".join(len(p).to_bytes(8) + p for p in parts))
        return cls(uid, key, hashed.digest())


class Operations:
    """Used on the event loop alone. Remembers the last that ended, not beyond a restart."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, Operation] = OrderedDict()
        self._keyed: dict[tuple[int, str], tuple[bytes, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        action: str,
        target: str,
        who: Who,
        work: Callable[[], Awaitable[Response]],
        keyed: KeyedRequest | None = None,
    ) -> Operation:
        """Raises `queue.full` when too many run."""
        self._forget_old()
        if len(self._tasks) >= _MOST_RUNNING:
            raise LoradError(
                "queue.full", f"{len(self._tasks)} operations run already", hint="wait for one"
            )
        operation = Operation(f"op-{secrets.token_hex(8)}", action, target, who)
        self._all[operation.id] = operation
        if keyed:
            self._keyed[keyed.uid, keyed.key] = (keyed.content, operation.id)
        task = asyncio.create_task(_run(operation, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    def repeated(self, request: KeyedRequest) -> Operation | None:
        """The operation that this very request began; raises `idempotency.conflict`."""
        content, operation_id = self._keyed.get((request.uid, request.key), (b"", ""))
        if not operation_id or operation_id not in self._all:
            return None
        if content != request.content:
            raise LoradError(
                "idempotency.conflict",
                f"the Idempotency-Key {request.key!r} was used for another request",
                hint="take a new key for each change",
                details={"operation": operation_id},
            )
        return self._all[operation_id]

    def find(self, operation_id: str) -> Operation:
        """Raises `operation.not_found`."""
        if operation_id not in self._all:
            raise LoradError(
                "operation.not_found",
                f"there is no operation {operation_id[:64]!r}",
                hint="a daemon remembers its last operations for an hour, until it restarts",
            )
        return self._all[operation_id]

    def newest(self, limit: int) -> list[Operation]:
        return list(reversed(self._all.values()))[:limit]

    async def finish(self, seconds: float) -> None:
        """Wait for what runs; what takes longer is given up."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _forget_old(self) -> None:
        oldest = time.time() - _KEPT_SECONDS
        ended = [o for o in self._all.values() if o.ended_at is not None]
        for place, operation in enumerate(ended):
            if place < len(ended) - _KEPT or (operation.ended_at or 0.0) < oldest:
                del self._all[operation.id]
        self._keyed = {k: known for k, known in self._keyed.items() if known[1] in self._all}


async def _run(operation: Operation, work: Callable[[], Awaitable[Response]]) -> None:
    try:
        operation.response = await work()
    finally:
        operation.ended_at = time.time()
        operation.done.set()
        seconds = operation.ended_at - operation.started_at
        log.info("%s %s %s in %.2f s", operation.id, operation.action, operation.state, seconds)


def body_of(response: Response) -> Any:
    """The JSON that a response holds; None when it has no body."""
    return json.loads(bytes(response.body)) if response.body else None
