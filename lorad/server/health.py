"""Routes for those who look after the daemon: health, metrics, version."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad import __version__
from lorad.errors import LoradError
from lorad.server.serving import serving_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricsText = Callable[[], str | bytes]  # in Prometheus' text format
Trouble = Callable[[], str | None]  # why no request can be served now, or None


async def health(request: Request) -> JSONResponse:
    """200, or 503 with the reason while the daemon stops or its engine is dead."""
    trouble: Trouble = request.app.state.trouble
    reason = trouble()
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": reason}, 503)


async def metrics(request: Request) -> Response:
    """With API keys set, only for the default tenant: the labels name every tenant's adapters."""
    text: MetricsText | None = request.app.state.metrics
    if text is None:
        raise LoradError("route.not_found", "metrics are not served here")
    serving_of(request).api_keys.check_operator(request)
    return Response(text(), media_type=METRICS_TYPE)


async def version(_: Request) -> JSONResponse:
    return JSONResponse({"version": __version__})
