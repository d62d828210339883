"""Which versions are in memory: load, unload, pin, unpin. None of these changes a name."""

from __future__ import annotations

from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.registry.catalog import version_failed
from lorad.registry.records import Version
from lorad.server.admin_changes import bring_to_device
from lorad.server.admin_context import AdminContext, context
from lorad.server.admin_operations import change
from lorad.server.admin_request import dry_run, path_name, path_version, read_fields, who
from lorad.server.admin_views import states


async def load(request: Request) -> Response:
    ctx, name, label = context(request), path_name(request), path_version(request)
    fields = await read_fields(request)
    pin = fields.flag("pin")
    fields.end()
    version = ctx.registry.version(name, label)
    changed = _tier(ctx, version) != "device" or (pin and not version.pinned)
    if dry_run(request):
        return _loaded(version, 0, 0, 0.0, changed=changed, dry_run=True)
    loaded = await bring_to_device(ctx, version, pin=pin)
    if pin:
        await _set_pinned(request, name, label, True)
    return _loaded(
        version, loaded.pages, loaded.bytes, loaded.seconds, changed=changed, dry_run=False
    )


async def unload(request: Request) -> Response:
    """Free its memory. A request that still names it loads it again: this is no delete."""
    ctx, name, label = context(request), path_name(request), path_version(request)
    fields = await read_fields(request)
    force = fields.flag("force")
    drain = fields.seconds("drain_timeout", ctx.limits.drain_timeout)
    fields.end()
    version = ctx.registry.version(name, label)
    if not force:
        _refuse_in_use(ctx, version)
    changed = _tier(ctx, version) != "disk"
    if dry_run(request):
        return _unloaded(version, 0, 0, 0, changed=changed, dry_run=True)
    done = await ctx.engine.unload_adapter(version.ref, drain_timeout=drain)
    if version.pinned:
        await _set_pinned(request, name, label, False)
    return _unloaded(
        version,
        done.freed_device_bytes,
        done.freed_host_bytes,
        done.drained_requests,
        changed=changed,
        dry_run=False,
    )


async def pin(request: Request) -> Response:
    """Keep it loaded, also after a restart."""
    ctx, name, label = context(request), path_name(request), path_version(request)
    version = ctx.registry.version(name, label)
    if not version.servable:
        raise version_failed(version)
    if not dry_run(request):
        await bring_to_device(ctx, version, pin=True)
        await _set_pinned(request, name, label, True)
    return _pinned(version, True, dry_run=dry_run(request))


async def unpin(request: Request) -> Response:
    """It stays loaded for now, and may be evicted like any other."""
    ctx, name, label = context(request), path_name(request), path_version(request)
    version = ctx.registry.version(name, label)
    if not dry_run(request) and version.pinned:
        if version.servable and _tier(ctx, version) != "disk":
            await ctx.engine.load_adapter(version.ref, pin=False)
        await _set_pinned(request, name, label, False)
    return _pinned(version, False, dry_run=dry_run(request))


def _tier(ctx: AdminContext, version: Version) -> str:
    state = states(ctx.engine.stats()).get(version.ref.digest)
    return state.residency if state else "disk"


async def _set_pinned(request: Request, name: AdapterName, label: str, pinned: bool) -> None:
    registry = context(request).registry
    await to_thread.run_sync(partial(registry.set_pinned, name, label, pinned, who=who(request)))


def _refuse_in_use(ctx: AdminContext, version: Version) -> None:
    ctx.registry.check_unreferenced(
        version, why=": its next request would load it again", or_else=", or use --force"
    )


def _loaded(
    version: Version, pages: int, size: int, seconds: float, *, changed: bool, dry_run: bool
) -> Response:
    result: wire.LoadResult = {
        "name": str(version.ref.name),
        "version": version.label,
        "pages": pages,
        "bytes": size,
        "seconds": seconds,
        "changed": changed,
        "dry_run": dry_run,
    }
    return JSONResponse(result)


def _unloaded(
    version: Version, device: int, host: int, drained: int, *, changed: bool, dry_run: bool
) -> Response:
    result: wire.UnloadResult = {
        "name": str(version.ref.name),
        "version": version.label,
        "freed_device_bytes": device,
        "freed_host_bytes": host,
        "drained_requests": drained,
        "changed": changed,
        "dry_run": dry_run,
    }
    return JSONResponse(result)


def _pinned(version: Version, pinned: bool, *, dry_run: bool) -> Response:
    result: wire.PinResult = {
        "name": str(version.ref.name),
        "version": version.label,
        "pinned": pinned,
        "changed": version.pinned != pinned,
        "dry_run": dry_run,
    }
    return JSONResponse(result)


_VERSION = f"{wire.ADAPTERS}/{{name:adapter}}/versions/{{version:label}}"

RESIDENCY_ROUTES = [
    change(f"{_VERSION}:load", load),
    change(f"{_VERSION}:unload", unload),
    change(f"{_VERSION}:pin", pin),
    change(f"{_VERSION}:unpin", unpin),
]
