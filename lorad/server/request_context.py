"""One request's id and the headers that its answer carries, whatever the answer is."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorad.adapter_ref import AdapterRef
from lorad.errors import LoradError
from lorad.wire import BASE_WORD

log = logging.getLogger(__name__)

_HEADERS = "lorad.headers"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELD_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_FIELDS_TOLD = 32


def adapter_label(adapter: AdapterRef | None) -> str:
    """`tenant/name@v3`, or `base`: the version that answers."""
    return BASE_WORD if adapter is None else str(adapter)


def tell_adapter(request: Request, adapter: AdapterRef | None) -> None:
    """From here on the answer names the version, also when it is an error or a stream."""
    request.scope[_HEADERS]["x-lorad-adapter"] = adapter_label(adapter)


def tell_ignored(request: Request, names: Iterable[str]) -> None:
    """Fields without effect. Names that do not fit a header are left out."""
    fit = [name for name in names if _FIELD_NAME.fullmatch(name)][:_MAX_FIELDS_TOLD]
    if fit:
        request.scope[_HEADERS]["x-lorad-ignored-fields"] = ", ".join(fit)


def request_id(scope: Scope) -> str:
    value: str = scope[_HEADERS]["x-request-id"]
    return value


class RequestContext:
    """The outermost layer: sets the headers, and logs an unforeseen exception with the id.

    A client's own `x-request-id` is kept when it is short and plain, so that one id can be
    followed through a gateway.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_HEADERS] = {"x-request-id": _chosen_id(scope)}
        complete = False

        async def send_with_headers(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(scope[_HEADERS])
            await send(message)
            if message["type"] == "http.response.body":
                complete = not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            log.exception("request %s failed", request_id(scope))
            if not complete:
                raise


def unforeseen() -> LoradError:
    """What a client is told of a fault of ours: the log has the rest, under the request id."""
    return LoradError(
        "daemon.error", "the server failed on this request", hint="the log has the details"
    )


def _chosen_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
