"""The admin API: HTTP and JSON on a UNIX socket. Routes by topic are in the files beside this."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import wraps
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorad import __version__, wire
from lorad.errors import LoradError
from lorad.registry.records import VersionState
from lorad.registry.registry import Registry
from lorad.server.admin_adapters import READ_ROUTES
from lorad.server.admin_canary import CANARY_ROUTES
from lorad.server.admin_changes import CHANGE_ROUTES
from lorad.server.admin_context import AdminContext, AdminEngine, AdminLimits, context
from lorad.server.admin_contract import contract_of
from lorad.server.admin_drain import DRAIN_ROUTES
from lorad.server.admin_events import EVENT_ROUTES
from lorad.server.admin_fields import invalid
from lorad.server.admin_gate import Gate, on_http_error, on_lorad_error
from lorad.server.admin_gc import GC_ROUTES
from lorad.server.admin_openapi import OPENAPI_ROUTES
from lorad.server.admin_operations import OPERATION_ROUTES
from lorad.server.admin_request import query_count
from lorad.server.admin_residency import RESIDENCY_ROUTES
from lorad.server.admin_uploads import UPLOAD_ROUTES
from lorad.server.admin_views import engine_info, step_info, store_info, tier_counts, ttft_info
from lorad.server.admin_vllm import VLLM_ROUTES
from lorad.server.operations import Operations
from lorad.server.self_test import SelfTest
from lorad.server.traffic import Traffic
from lorad.server.uploads import Uploads
from lorad.sockets import AdminGroups

_MAX_STEPS = 10_000
_FINISH = 10.0  # seconds that operations may go on when the daemon ends


def build_admin_app(
    registry: Registry,
    engine: AdminEngine,
    traffic: Traffic,
    *,
    config: Callable[[], Mapping[str, Any]],
    shutdown: Callable[[], None],
    metrics: Callable[[], bytes] = generate_latest,
    limits: AdminLimits | None = None,
    self_test: SelfTest | None = None,
    stopping: Callable[[], bool] = lambda: False,
    keep: Callable[[], int] = lambda: 0,
    groups: AdminGroups | None = None,
) -> Starlette:
    """The ASGI app of the admin socket; serve it by `admin_transport.admin_server_config`.

    `config` is shown by GET /v1/config, so it must hold no secret; it and `keep` are asked each
    time. `shutdown` begins the end of the daemon and returns at once; `stopping` tells that the
    end has begun. Peers must be root, the daemon's user or in one of `groups`.
    """
    limits = limits or AdminLimits()
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(Gate, groups=groups or AdminGroups())],
        exception_handlers={LoradError: on_lorad_error, HTTPException: on_http_error},
        lifespan=_sweeping,
    )
    app.router.redirect_slashes = False
    app.state.admin = AdminContext(
        registry, engine, traffic, config, shutdown, metrics, limits, self_test, stopping, keep
    )
    app.state.uploads = Uploads(registry, limits)
    app.state.operations = Operations()
    return app


@asynccontextmanager
async def _sweeping(app: Starlette) -> AsyncIterator[None]:
    sweeper = asyncio.create_task(app.state.uploads.sweep())
    try:
        yield
    finally:
        await app.state.operations.finish(_FINISH)
        sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await sweeper


async def healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def status(request: Request) -> Response:
    ctx = context(request)
    adapters, stats = ctx.registry.adapters(), ctx.engine.stats()
    versions = [version for adapter in adapters for version in adapter.versions.values()]
    info: wire.StatusInfo = {
        "daemon_version": __version__,
        "api_version": wire.API_VERSION,
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "started_at": ctx.started_at,
        "base_model": ctx.registry.base_model,
        "adapters": len(adapters),
        "live_adapters": sum(adapter.live is not None for adapter in adapters),
        "canaries": sum(adapter.canary is not None for adapter in adapters),
        "draining": ctx.traffic.draining,
        "role": request.state.role,
        "store": store_info(ctx.registry.state),
        "ttft": ttft_info(ctx.traffic.first_tokens),
        "failed_versions": sum(version.state is VersionState.FAILED for version in versions),
        "tiers": tier_counts(stats.adapters),
        "engine": engine_info(stats),
    }
    return JSONResponse(info)


async def show_config(request: Request) -> Response:
    info: wire.ConfigInfo = {"config": dict(context(request).config())}
    return JSONResponse(info)


async def show_metrics(request: Request) -> Response:
    return Response(context(request).metrics(), media_type=CONTENT_TYPE_LATEST)


async def steps(request: Request) -> Response:
    records = context(request).engine.recent_steps(query_count(request, "limit", 100, _MAX_STEPS))
    found: wire.StepList = {"steps": [step_info(record) for record in records]}
    return JSONResponse(found)


async def stop(request: Request) -> Response:
    """Answered before the daemon begins to end."""
    context(request).shutdown()
    return JSONResponse({"status": "stopping"}, status_code=202)


DAEMON_ROUTES = [
    Route(wire.HEALTHZ, healthz),
    Route(wire.STATUS, status),
    Route(wire.CONFIG, show_config),
    Route(wire.METRICS, show_metrics),
    Route(wire.STEPS, steps),
    Route(wire.SHUTDOWN, stop, methods=["POST"]),
]


def knows_its_query(route: Route) -> Route:
    """The route, refusing parameters that it does not have: `?dryrun=1` must change nothing."""
    endpoint, methods = route.endpoint, sorted((route.methods or set()) - {"HEAD"})
    parameters = [p for method in methods for p in contract_of(method, route.path).parameters]
    known = {parameter["name"] for parameter in parameters if parameter["in"] == "query"}

    @wraps(endpoint)
    async def run(request: Request) -> Response:
        if unknown := sorted(set(request.query_params) - known):
            raise invalid(
                f"unknown parameters: {', '.join(map(repr, unknown[:5]))}"[:300],
                f"known here: {', '.join(sorted(known)) or 'none'}",
            )
        answer: Response = await endpoint(request)
        return answer

    return Route(route.path, run, methods=methods)


# The specific paths come first: a name takes whatever is left of one.
_ROUTES = [
    *DAEMON_ROUTES,
    *OPENAPI_ROUTES,
    *OPERATION_ROUTES,
    *EVENT_ROUTES,
    *GC_ROUTES,
    *DRAIN_ROUTES,
    *UPLOAD_ROUTES,
    *VLLM_ROUTES,
    *RESIDENCY_ROUTES,
    *CANARY_ROUTES,
    *CHANGE_ROUTES,
    *READ_ROUTES,
]
ROUTES = [knows_its_query(route) for route in _ROUTES]
