"""Deleting the versions that nothing refers to, beyond the newest few of each adapter."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry.records import Who
from lorad.server.admin_context import AdminContext, context
from lorad.server.admin_operations import change
from lorad.server.admin_request import dry_run, read_fields, who

_MOST_KEPT = 1_000_000
_BUSY = ("drain.timeout", "version.live", "version.canary", "version.pinned", "version.not_found")


async def collect(request: Request) -> Response:
    """`keep` newest versions of each adapter, or of `name`; without it, the daemon's policy."""
    ctx = context(request)
    fields = await read_fields(request)
    named = fields.text("name")
    if not ctx.keep() and not fields.has("keep"):  # deleting is never a default
        raise LoradError(
            "request.invalid",
            "how many versions are to stay? registry.keep is not set on this daemon",
            hint="loractl gc --keep N",
        )
    keep = int(fields.number("keep", 0, _MOST_KEPT, ctx.keep()))
    fields.end()
    if named:
        names = [ctx.registry.adapter(AdapterName.parse(named)).name]
    else:
        names = [adapter.name for adapter in ctx.registry.adapters()]
    return JSONResponse(
        await collect_garbage(ctx, names, keep, who(request), dry_run=dry_run(request))
    )


async def collect_garbage(
    ctx: AdminContext, names: Iterable[AdapterName], keep: int, asked_by: Who, *, dry_run: bool
) -> wire.GcResult:
    """A version that is in use is passed over; the next collection takes it."""
    result: wire.GcResult = {
        "keep": keep,
        "deleted": [],
        "skipped": [],
        "freed_bytes": 0,
        "changed": False,
        "dry_run": dry_run,
    }
    for name in names:
        for label in await to_thread.run_sync(partial(ctx.registry.superseded, name, keep=keep)):
            version = ctx.registry.version(name, label)
            try:
                if not dry_run:
                    await delete_version(ctx, name, label, asked_by, drain_timeout=0.0)
            except LoradError as error:
                if error.code not in _BUSY:
                    raise
                result["skipped"].append({"ref": f"{name}@{label}", "why": error.message})
                continue
            result["deleted"].append(f"{name}@{label}")
            result["freed_bytes"] += version.config_bytes + version.weights_bytes
            result["changed"] = True
    return result


async def delete_version(
    ctx: AdminContext, name: AdapterName, label: str, asked_by: Who, *, drain_timeout: float
) -> None:
    """Requests that run on the version end first; then memory, then disk."""
    ref = ctx.registry.check_deletable(name, label).ref
    await ctx.engine.unload_adapter(ref, drain_timeout=drain_timeout)
    await to_thread.run_sync(partial(ctx.registry.delete, name, label, who=asked_by))


GC_ROUTES = [change(wire.GC, collect)]
