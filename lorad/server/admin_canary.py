"""A share of a name's requests for a version that is not live yet."""

from __future__ import annotations

from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.registry.records import Adapter, Canary, CanaryMove
from lorad.server.admin_changes import ready_to_serve
from lorad.server.admin_context import context
from lorad.server.admin_fields import Fields, invalid
from lorad.server.admin_operations import change
from lorad.server.admin_request import dry_run, expected_generation, path_name, read_fields, who
from lorad.server.admin_views import canary_result


async def canary(request: Request) -> Response:
    """Begin one, change its share, or with `percent` 0 end it."""
    name = path_name(request)
    fields = await read_fields(request)
    percent = fields.number("percent", 0, 100)
    if percent == 0:
        return await _end(request, name, fields)
    return await _begin(request, name, fields, percent)


async def _begin(request: Request, name: AdapterName, fields: Fields, percent: float) -> Response:
    ctx, expected = context(request), expected_generation(request)
    label, reason = fields.label("version"), fields.text("reason")
    auto_rollback = fields.flag("auto_rollback")
    fields.end()
    adapter = ctx.registry.check_generation(name, expected)
    version = ctx.registry.canaries.check(name, label or _tried(adapter))
    wanted = Canary(version.label, percent, auto_rollback, 0.0)
    if dry_run(request):
        return _would(adapter, wanted)
    await ready_to_serve(ctx, version)
    begin = partial(
        ctx.registry.canaries.begin,
        name,
        version.label,
        percent,
        who=who(request),
        auto_rollback=auto_rollback,
        reason=reason,
        expected_generation=expected,
    )
    return JSONResponse(canary_result(await to_thread.run_sync(begin), dry_run=False))


async def _end(request: Request, name: AdapterName, fields: Fields) -> Response:
    ctx, expected = context(request), expected_generation(request)
    label, reason = fields.label("version"), fields.text("reason")
    if label is not None or fields.flag("auto_rollback"):
        raise invalid("percent 0 ends the canary: it takes neither version nor auto_rollback")
    fields.end()
    adapter = ctx.registry.check_generation(name, expected)
    if dry_run(request):
        return _would(adapter, None)
    end = partial(
        ctx.registry.canaries.end,
        name,
        who=who(request),
        reason=reason,
        expected_generation=expected,
    )
    return JSONResponse(canary_result(await to_thread.run_sync(end), dry_run=False))


def _tried(adapter: Adapter) -> str:
    """The version that is meant without a label: the present canary, else the newest."""
    return adapter.canary.version if adapter.canary else adapter.newest.label


def _would(adapter: Adapter, wanted: Canary | None) -> Response:
    changed = _essence(adapter.canary) != _essence(wanted)
    move = CanaryMove(adapter.name, adapter.canary, wanted, adapter.generation, changed)
    return JSONResponse(canary_result(move, dry_run=True))


def _essence(canary: Canary | None) -> tuple[object, ...]:
    return (canary.version, canary.percent, canary.auto_rollback) if canary else ()


CANARY_ROUTES = [
    change(f"{wire.ADAPTERS}/{{name:adapter}}:canary", canary),
]
