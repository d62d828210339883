"""Moving the live version of a name, and deleting.

A version is on the device before the pointer moves: if it cannot be loaded, the old one
stays live and nothing has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.engine.messages import AdapterLoaded
from lorad.errors import LoradError
from lorad.registry.catalog import version_failed
from lorad.registry.records import Adapter, Move, Version, Who
from lorad.server.admin_context import AdminContext, context
from lorad.server.admin_gc import collect_garbage, delete_version
from lorad.server.admin_operations import change, operations
from lorad.server.admin_request import (
    dry_run,
    expected_generation,
    path_name,
    path_version,
    query_flag,
    read_fields,
    who,
)
from lorad.server.admin_views import move_result, self_test_info, states
from lorad.server.promote_checks import Check, read_checks
from lorad.server.self_test import SelfTestResult

_CHECKS_LIMIT = 1 << 20  # bytes of a promote's body


async def bring_to_device(
    ctx: AdminContext, version: Version, *, pin: bool = False, trusted: bool = False
) -> AdapterLoaded:
    """Bring it there, its stored bytes checked against the digest; errors name the version.

    The loader checks what it reads, so the files of a version that is in memory alone are read
    here; with `trusted` they are not, since they were right when it came. `pin` keeps it there; a
    version that is pinned already stays so.
    """
    if not version.servable:
        raise version_failed(version)
    if not trusted and _in_memory(ctx, version):
        await to_thread.run_sync(ctx.registry.verify, version.ref)
    return await ctx.engine.load_adapter(version.ref, pin=True if pin or version.pinned else None)


def _in_memory(ctx: AdminContext, version: Version) -> bool:
    known = states(ctx.engine.stats()).get(version.ref.digest)
    return known is not None and known.residency in ("host", "device")


async def ready_to_serve(
    ctx: AdminContext, version: Version, checks: Sequence[Check] = ()
) -> SelfTestResult | None:
    """Load a version and try it, before a name may lead requests to it."""
    await bring_to_device(ctx, version)
    if ctx.self_test is None:
        return None
    result = await ctx.self_test.run(version.ref)
    await ctx.self_test.check(version.ref, checks)
    return result


async def promote(request: Request) -> Response:
    ctx, name = context(request), path_name(request)
    expected = expected_generation(request)
    fields = await read_fields(request, _CHECKS_LIMIT)
    label, reason = fields.label("version"), fields.text("reason")
    checks = read_checks(fields.raw("checks") or [])
    fields.end()
    adapter = ctx.registry.check_generation(name, expected)
    version = ctx.registry.version(name, label or adapter.newest.label)
    if adapter.live == version.label or dry_run(request):
        return _unmoved(adapter, version, dry_run=dry_run(request))
    tested = await ready_to_serve(ctx, version, checks)
    flip = partial(
        ctx.registry.promote,
        name,
        version.label,
        who=who(request),
        reason=reason,
        expected_generation=expected,
    )
    moved = move_result(await to_thread.run_sync(flip), dry_run=False)
    _apply_policy(request, name)
    return JSONResponse({**moved, "self_test": self_test_info(tested), "checks": len(checks)})


def _apply_policy(request: Request, name: AdapterName) -> None:
    """Delete what the keep policy no longer keeps, after the promote has been answered."""
    ctx = context(request)
    keep = ctx.keep()
    if keep == 0:
        return

    async def collect() -> Response:
        return JSONResponse(await collect_garbage(ctx, [name], keep, Who.daemon(), dry_run=False))

    with suppress(LoradError):  # too much runs: the next promote collects
        operations(request).begin("gc", request.url.path[:200], Who.daemon(), collect)


async def rollback(request: Request) -> Response:
    ctx, name = context(request), path_name(request)
    fields = await read_fields(request)
    label, reason = fields.label("to"), fields.text("reason")
    fields.end()
    adapter = ctx.registry.check_generation(name, expected_generation(request))
    version = await _rollback_target(ctx, name, label)
    if adapter.live == version.label or dry_run(request):
        return _unmoved(adapter, version, dry_run=dry_run(request))
    await bring_to_device(ctx, version, trusted=True)
    # The target follows from what is live now, so it holds for this generation only.
    flip = partial(
        ctx.registry.rollback,
        name,
        version.label,
        who=who(request),
        reason=reason,
        expected_generation=adapter.generation,
    )
    return JSONResponse(move_result(await to_thread.run_sync(flip), dry_run=False))


async def retire(request: Request) -> Response:
    ctx, name = context(request), path_name(request)
    fields = await read_fields(request)
    reason = fields.text("reason")
    fields.end()
    expected = expected_generation(request)
    adapter = ctx.registry.check_generation(name, expected)
    if dry_run(request):
        return _unmoved(adapter, None, dry_run=True)
    take_down = partial(
        ctx.registry.retire, name, who=who(request), reason=reason, expected_generation=expected
    )
    return JSONResponse(move_result(await to_thread.run_sync(take_down), dry_run=False))


async def delete_one(request: Request) -> Response:
    ctx, name, label = context(request), path_name(request), path_version(request)
    ctx.registry.check_deletable(name, label)
    if not dry_run(request):
        await delete_version(ctx, name, label, who(request), drain_timeout=ctx.limits.drain_timeout)
    return _deleted(name, [label], dry_run=dry_run(request))


async def delete_adapter(request: Request) -> Response:
    """All versions of a name. With `force`, a live or pinned one too."""
    ctx, name = context(request), path_name(request)
    labels = list(ctx.registry.adapter(name).versions)
    if not query_flag(request, "force"):
        for label in labels:
            ctx.registry.check_deletable(name, label)
    if dry_run(request):
        return _deleted(name, labels, dry_run=True)
    asked_by = who(request)
    await to_thread.run_sync(partial(ctx.registry.retire, name, who=asked_by))
    for label in labels:
        unpin = partial(ctx.registry.set_pinned, name, label, False, who=asked_by)
        await to_thread.run_sync(unpin)
        await delete_version(ctx, name, label, asked_by, drain_timeout=ctx.limits.drain_timeout)
    return _deleted(name, labels, dry_run=False)


async def _rollback_target(ctx: AdminContext, name: AdapterName, label: str | None) -> Version:
    if label is not None:
        return ctx.registry.version(name, label)
    return await to_thread.run_sync(ctx.registry.rollback_target, name)


def _unmoved(adapter: Adapter, target: Version | None, *, dry_run: bool) -> Response:
    """The answer when nothing was done: it was so already, or this is a dry run."""
    label = target.label if target else None
    if target is not None and not target.servable:
        raise version_failed(target)
    changed = adapter.live != label
    move = Move(adapter.name, adapter.live, label, adapter.generation, changed)
    return JSONResponse(move_result(move, dry_run=dry_run))


def _deleted(name: AdapterName, labels: list[str], *, dry_run: bool) -> Response:
    result: wire.DeleteResult = {
        "name": str(name),
        "deleted": labels,
        "changed": True,
        "dry_run": dry_run,
    }
    return JSONResponse(result)


CHANGE_ROUTES = [
    change(f"{wire.ADAPTERS}/{{name:adapter}}:promote", promote),
    change(f"{wire.ADAPTERS}/{{name:adapter}}:rollback", rollback),
    change(f"{wire.ADAPTERS}/{{name:adapter}}:retire", retire),
    change(f"{wire.ADAPTERS}/{{name:adapter}}/versions/{{version:label}}", delete_one, ["DELETE"]),
    change(f"{wire.ADAPTERS}/{{name:adapter}}", delete_adapter, ["DELETE"]),
]
