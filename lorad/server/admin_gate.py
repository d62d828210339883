"""In front of every admin route: who may pass, the request id, errors as JSON, the log line."""

from __future__ import annotations

import json
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorad.errors import LoradError
from lorad.sockets import AdminGroups, Peer, Role
from lorad.wire import API_HEADER, API_VERSION, REQUEST_ID_HEADER

log = logging.getLogger("lorad.admin")
_READING = ("GET", "HEAD")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Gate:
    """ASGI middleware. Peers without a role get 403 for everything, readers for a change."""

    def __init__(self, app: ASGIApp, groups: AdminGroups) -> None:
        self.app = app
        self.groups = groups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope["state"]["request_id"] = request_id
        peer: Peer | None = scope["state"].get("peer")
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                headers[API_HEADER] = str(API_VERSION)
            await send(message)

        try:
            role = peer.role(self.groups) if peer else "none"
            scope["state"]["role"] = role
            if role == "none" or (role == "read" and scope["method"] not in _READING):
                error = _forbidden(peer, role)
                await error_response(error, request_id, close=True)(scope, receive, tagged)
            else:
                await self.app(scope, receive, tagged)
        except Exception:
            log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if status:  # the answer has begun: all that is left is to break it off
                raise
            await error_response(internal_error(request_id), request_id)(scope, receive, tagged)
        _log_change(scope, peer, status, request_id)


def error_response(error: LoradError, request_id: str, *, close: bool = False) -> Response:
    """The error envelope. `close` when the request's body was not read to its end."""
    headers = {"connection": "close"} if close else None
    body = {"error": error.to_dict(request_id)}
    return JSONResponse(body, status_code=error.kind.http_status, headers=headers)


async def on_lorad_error(request: Request, error: Exception) -> Response:
    """A refused change ends its connection too: the rest of its body may be on the way."""
    if not isinstance(error, LoradError):
        raise error
    return error_response(
        error, request.state.request_id, close=request.method not in ("GET", "HEAD")
    )


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such route, or not with this method."""
    if not isinstance(error, HTTPException):
        raise error
    where = repr(request.url.path[:200])
    allowed = _methods(request) if error.status_code == 405 else ""
    if allowed:
        code, message = "route.method_not_allowed", f"{where} takes {allowed}, not {request.method}"
    else:
        code, message = "route.not_found", f"there is no {request.method} {where}"
    unknown = LoradError(code, message, hint="the routes are listed in docs/admin-api.md")
    response = error_response(unknown, request.state.request_id, close=True)
    if allowed:
        response.headers["allow"] = allowed
    return response


def _methods(request: Request) -> str:
    """What the path takes: the methods of all routes that are written as the first that fits."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route.path for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    same = [route.methods or set() for route in routes if route.path == fitting[0]]
    return ", ".join(sorted(set().union(*same)))


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def _forbidden(peer: Peer | None, role: Role) -> LoradError:
    who = f"uid {peer.uid}" if peer else "a peer without credentials"
    what = "may read, but change nothing" if role == "read" else "may not use the admin socket"
    return LoradError(
        "socket.permission",
        f"{who} {what}",
        hint="run it as the daemon's user or as root, or join its admin_group",
    )


def internal_error(request_id: str) -> LoradError:
    return LoradError(
        "daemon.error",
        "the daemon failed while it handled this request",
        hint=f"its log has the reason under request id {request_id}",
    )


def _log_change(scope: Scope, peer: Peer | None, status: int, request_id: str) -> None:
    """One line for each change and each refusal; json.dumps keeps a path on one line."""
    if scope["method"] in ("GET", "HEAD") and status < 400:
        return
    uid, pid = (peer.uid, peer.pid) if peer else (None, None)
    path = json.dumps(scope["path"][:200])
    log.info("%s %s %d uid=%s pid=%s id=%s", scope["method"], path, status, uid, pid, request_id)
