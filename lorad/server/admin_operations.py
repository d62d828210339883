"""Routes that may take long: run at once, as an operation to be asked for, or once per key.

`Prefer: respond-async` gives 202 and an operation's id instead of the answer. A repeated
`Idempotency-Key` gives the first answer again instead of a second change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from lorad import wire
from lorad.errors import LoradError
from lorad.server.admin_fields import invalid
from lorad.server.admin_gate import error_response, internal_error
from lorad.server.admin_request import query_count, query_seconds, read_body, who
from lorad.server.admin_views import who_info
from lorad.server.operations import KeyedRequest, Operation, Operations, body_of

log = logging.getLogger("lorad.admin")

Endpoint = Callable[[Request], Awaitable[Response]]

_BODY_LIMIT = 1 << 20
_MOST_LISTED = 256
_LONGEST_WAIT = 60.0
_KEY_CHARS = 128


def operations(request: Request) -> Operations:
    found: Operations = request.app.state.operations
    return found


def change(path: str, endpoint: Endpoint, methods: Sequence[str] = ("POST",)) -> Route:
    """The route of a change that may be made as an operation."""

    @wraps(endpoint)
    async def run(request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        if key is None and not _wants_operation(request):
            return await endpoint(request)
        operation, repeated = await _operation(request, endpoint, key)
        if _wants_operation(request):
            return _accepted(operation)
        await operation.done.wait()
        return _answer(operation, repeated=repeated)

    return Route(path, run, methods=list(methods))


async def list_operations(request: Request) -> Response:
    newest = operations(request).newest(query_count(request, "limit", 50, _MOST_LISTED))
    found: wire.OperationList = {"operations": [operation_info(o) for o in newest]}
    return JSONResponse(found)


async def show_operation(request: Request) -> Response:
    """With `?wait=SECONDS` the answer comes when it has ended, or after that time."""
    operation = operations(request).find(request.path_params["id"])
    wait = query_seconds(request, "wait", 0.0, _LONGEST_WAIT)
    if wait:
        with suppress(TimeoutError):
            await asyncio.wait_for(operation.done.wait(), wait)
    return JSONResponse(operation_info(operation))


def operation_info(operation: Operation) -> wire.OperationInfo:
    body: Any = body_of(operation.response) if operation.response else None
    failed = operation.state == "failed"
    return {
        "id": operation.id,
        "action": operation.action,
        "target": operation.target,
        "state": operation.state,
        "who": who_info(operation.who),
        "started_at": operation.started_at,
        "ended_at": operation.ended_at,
        "result": None if failed else body,
        "error": body["error"] if failed else None,
    }


async def _operation(
    request: Request, endpoint: Endpoint, key: str | None
) -> tuple[Operation, bool]:
    """The operation of this request, and whether an earlier one had begun it."""
    body = await read_body(request, _BODY_LIMIT)
    keyed = _keyed(request, key, body) if key is not None else None
    known = operations(request).repeated(keyed) if keyed else None
    if known:
        return known, True
    work = partial(_run, endpoint, _replayed(request, body))
    path = request.url.path
    action = path.rpartition(":")[2] if ":" in path else request.method.lower()
    return operations(request).begin(action, path[:200], who(request), work, keyed), False


def _wants_operation(request: Request) -> bool:
    return "respond-async" in request.headers.get("prefer", "")


def _keyed(request: Request, key: str, body: bytes) -> KeyedRequest:
    if not (0 < len(key) <= _KEY_CHARS and key.isascii() and key.isprintable()):
        raise invalid(f"Idempotency-Key must be 1 to {_KEY_CHARS} printable ASCII characters")
    condition = request.headers.get("if-match", "")
    parts = (request.method, request.url.path, request.url.query, condition)
    return KeyedRequest.of(who(request).uid, key, *(part.encode() for part in parts), body)


def _replayed(request: Request, body: bytes) -> Request:
    """The request with its body read already: it can go on when the client has gone."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


async def _run(endpoint: Endpoint, request: Request) -> Response:
    try:
        return await endpoint(request)
    except LoradError as error:
        return error_response(error, request.state.request_id)
    except Exception:
        log.exception("operation %s failed", request.state.request_id)
        return error_response(internal_error(request.state.request_id), request.state.request_id)


def _accepted(operation: Operation) -> Response:
    info: wire.OperationAccepted = {"operation": operation_info(operation)}
    headers = {
        "location": wire.operation_path(operation.id),
        "preference-applied": "respond-async",
    }
    return JSONResponse(info, status_code=202, headers=headers)


def _answer(operation: Operation, *, repeated: bool) -> Response:
    """A new response of the same bytes: a response object is sent once."""
    kept = operation.response
    if kept is None:  # given up at the daemon's end
        raise LoradError("daemon.stopping", "the daemon is stopping")
    headers = {"lorad-operation": operation.id}
    if repeated:
        headers["idempotent-replayed"] = "true"
    return Response(bytes(kept.body), kept.status_code, headers, media_type=kept.media_type)


OPERATION_ROUTES = [
    Route(wire.OPERATIONS, list_operations),
    Route(f"{wire.OPERATIONS}/{{id:label}}", show_operation),
]
