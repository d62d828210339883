"""The public port: OpenAI's routes and nothing that changes the daemon."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lorad.errors import LoradError
from lorad.model.chat_template import ChatTemplate
from lorad.model.tokenizer import Tokenizer
from lorad.server.auth import ApiKeys
from lorad.server.chat import chat_completions
from lorad.server.completions import completions
from lorad.server.errors import error_response, plain_error
from lorad.server.health import MetricsText, Trouble, health, metrics, version
from lorad.server.limits import Limits
from lorad.server.models import list_models, show_model
from lorad.server.request_context import RequestContext, unforeseen
from lorad.server.serving import GeneratesText, ResolvesModels, Serving

ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/{id:path}", show_model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/health", health),
    Route("/metrics", metrics),
    Route("/version", version),
]


def build_public_app(
    *,
    base_model: str,
    engine: GeneratesText,
    registry: ResolvesModels,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    limits: Limits,
    api_keys: ApiKeys | None = None,
    metrics_text: MetricsText | None = None,
    trouble: Trouble = lambda: None,
) -> ASGIApp:
    """The ASGI application of the public port.

    `base_model` is the id that clients send for the base model. Without any
    `api_keys`, no key is asked for. `metrics_text` gives Prometheus text for /metrics,
    which is a 404 without it. `trouble` says why /health is to answer 503, or None.
    """
    app = Starlette(
        routes=ROUTES,
        exception_handlers={
            LoradError: _on_lorad_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_unforeseen,
        },
    )
    app.router.redirect_slashes = False
    app.state.serving = Serving(
        base_model=base_model,
        engine=engine,
        registry=registry,
        tokenizer=tokenizer,
        chat_template=chat_template,
        limits=limits,
        api_keys=api_keys or ApiKeys({}),
        started_at=int(time.time()),
    )
    app.state.metrics = metrics_text
    app.state.trouble = trouble
    return RequestContext(app)


async def _on_lorad_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, LoradError):
        raise error
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        response = plain_error(405, "method_not_allowed", f"{where}: this route has other methods")
        response.headers.update(error.headers or {})
        return response
    return plain_error(error.status_code, "route.not_found", f"there is no route {where}")


async def _on_unforeseen(_: Request, __: Exception) -> Response:
    """A fault of ours; Starlette raises it again afterwards, for the log."""
    return error_response(unforeseen())


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client left while it was sending: nobody reads this."""
    return Response(status_code=400)
