"""The history of all adapters as a stream: NDJSON, from a cursor on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lorad import wire
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.server.admin_context import AdminContext, context
from lorad.server.admin_request import query_count, query_flag, query_number
from lorad.server.admin_views import event_info

_MOST = 10_000
_BATCH = 500
_LOOK = 0.1  # seconds between looks at the newest id, which is in memory
_HEARTBEAT = 10.0  # seconds; an empty line, so that a reader that has gone is noticed
_MOST_FOLLOWERS = 8


async def events(request: Request) -> Response:
    """`?after=ID` is the cursor. `?follow=1` goes on with what happens from now on."""
    ctx = context(request)
    after = query_number(request, "after", 0)
    limit = query_count(request, "limit", 1000, _MOST)
    if not query_flag(request, "follow"):
        return _ndjson(_stored(ctx.registry, after, limit))
    if ctx.followers.count >= _MOST_FOLLOWERS:
        raise LoradError(
            "queue.full", f"{_MOST_FOLLOWERS} others follow the events", hint="try again later"
        )
    return _ndjson(_followed(ctx, after))


async def _stored(registry: Registry, after: int, limit: int) -> AsyncIterator[bytes]:
    while limit > 0:
        found = await _read(registry, after, min(limit, _BATCH))
        if not found:
            return
        for event in found:
            yield _line(event)
        limit -= len(found)
        after = found[-1]["id"]


async def _followed(ctx: AdminContext, after: int) -> AsyncIterator[bytes]:
    ctx.followers.count += 1
    said = time.monotonic()
    try:
        while not ctx.stopping():
            if ctx.registry.last_event > after:
                for event in await _read(ctx.registry, after, _BATCH):
                    after = event["id"]
                    yield _line(event)
                said = time.monotonic()
            elif time.monotonic() - said > _HEARTBEAT:
                said = time.monotonic()
                yield b"\n"
            await asyncio.sleep(_LOOK)
    finally:
        ctx.followers.count -= 1


async def _read(registry: Registry, after: int, most: int) -> list[wire.EventInfo]:
    found = await to_thread.run_sync(lambda: registry.events_after(after, most=most))
    return [event_info(event) for event in found]


def _line(event: wire.EventInfo) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _ndjson(lines: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(lines, media_type="application/x-ndjson")


EVENT_ROUTES = [Route(wire.EVENTS, events)]
