"""Taking the daemon out of service for a while, and back, without ending it."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad import wire
from lorad.errors import LoradError
from lorad.server.admin_context import AdminContext, context
from lorad.server.admin_operations import change
from lorad.server.admin_request import dry_run, read_fields

_LOOK = 0.05


async def drain(request: Request) -> Response:
    """Refuse new requests, and answer when the running ones have ended."""
    ctx = context(request)
    fields = await read_fields(request)
    timeout = fields.seconds("timeout", ctx.limits.drain_timeout)
    fields.end()
    changed = not ctx.traffic.draining
    if dry_run(request):
        return _answer(ctx, changed=changed, dry_run=True)
    ctx.traffic.draining = True
    deadline = time.monotonic() + timeout
    while _busy(ctx) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK)
    if busy := _busy(ctx):
        raise LoradError(
            "drain.timeout",
            f"{busy} requests still run after {timeout:g} s; new ones are refused",
            hint="wait longer (drain again), or `loractl resume`",
            details={"running": busy},
        )
    return _answer(ctx, changed=changed, dry_run=False)


async def resume(request: Request) -> Response:
    ctx = context(request)
    fields = await read_fields(request)
    fields.end()
    changed = ctx.traffic.draining
    if not dry_run(request):
        ctx.traffic.draining = False
    return _answer(ctx, changed=changed, dry_run=dry_run(request))


def _busy(ctx: AdminContext) -> int:
    stats = ctx.engine.stats()
    return stats.running + stats.waiting


def _answer(ctx: AdminContext, *, changed: bool, dry_run: bool) -> Response:
    result: wire.DrainResult = {
        "draining": ctx.traffic.draining,
        "running": _busy(ctx),
        "changed": changed,
        "dry_run": dry_run,
    }
    return JSONResponse(result)


DRAIN_ROUTES = [change(wire.DRAIN, drain), change(wire.RESUME, resume)]
