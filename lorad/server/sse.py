"""A server-sent event stream that starts only when there is something to say."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorad.errors import LoradError
from lorad.server.disconnect import until_disconnect
from lorad.server.errors import error_body
from lorad.server.request_context import request_id, unforeseen

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class EventStream(Response):
    """Sends each dict of `chunks` as an event, then `[DONE]`.

    An error before the first chunk is raised, so that it becomes a plain HTTP error. Later the
    status has been sent: then the error is the stream's last event. When the client leaves,
    `chunks` is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await _send_body(send, event(first))
            await self._send_rest(scope, send, chunks)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rest(
        self, scope: Scope, send: Send, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> None:
        try:
            async for chunk in chunks:
                await _send_body(send, event(chunk))
            await _send_body(send, _DONE)
        except LoradError as error:
            await _send_body(send, event(error_body(error)))
        except Exception:
            log.exception("request %s failed in mid-stream", request_id(scope))
            await _send_body(send, event(error_body(unforeseen())))


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
