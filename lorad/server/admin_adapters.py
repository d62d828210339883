"""Reading: adapters, their versions with where the bytes are, and the history."""

from __future__ import annotations

from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorad import wire
from lorad.server.admin_context import context
from lorad.server.admin_request import path_name, path_version, query_count, query_flag
from lorad.server.admin_views import adapter_info, event_info, states, version_info
from lorad.server.long_list import json_array

_MAX_EVENTS = 1000


async def list_adapters(request: Request) -> Response:
    ctx = context(request)
    tenant = request.query_params.get("tenant")
    in_memory = query_flag(request, "in_memory")
    resident = states(ctx.engine.stats())
    cursor = ctx.registry.last_event  # read first: what comes later is an event after it
    found = await json_array(
        adapter_info(adapter, resident, ctx.traffic.watch.counts(adapter))
        for adapter in ctx.registry.adapters()
        if tenant in (None, adapter.name.tenant)
        and not (in_memory and resident.keys().isdisjoint(adapter.digests))
    )
    body = b'{"cursor":%d,"adapters":%s}' % (cursor, found)
    return Response(body, media_type="application/json")


async def show_adapter(request: Request) -> Response:
    ctx = context(request)
    adapter = ctx.registry.adapter(path_name(request))
    counts = ctx.traffic.watch.counts(adapter)
    info = adapter_info(adapter, states(ctx.engine.stats()), counts)
    return JSONResponse(info, headers={"etag": f'"{adapter.generation}"'})


async def show_version(request: Request) -> Response:
    ctx = context(request)
    version = ctx.registry.version(path_name(request), path_version(request))
    live = ctx.registry.is_live(version.ref)
    return JSONResponse(version_info(version, states(ctx.engine.stats()), live=live))


async def history(request: Request) -> Response:
    name = path_name(request)
    newest = query_count(request, "limit", 100, _MAX_EVENTS)
    read = partial(context(request).registry.history, name, newest=newest)
    events = await to_thread.run_sync(read)
    found: wire.History = {"name": str(name), "events": [event_info(event) for event in events]}
    return JSONResponse(found)


# A name may hold one `/`, so the longer paths come first.
READ_ROUTES = [
    Route(wire.ADAPTERS, list_adapters),
    Route(f"{wire.ADAPTERS}/{{name:adapter}}/history", history),
    Route(f"{wire.ADAPTERS}/{{name:adapter}}/versions", show_adapter),
    Route(f"{wire.ADAPTERS}/{{name:adapter}}/versions/{{version:label}}", show_version),
    Route(f"{wire.ADAPTERS}/{{name:adapter}}", show_adapter),
]
