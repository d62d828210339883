"""Reads a request's JSON body, no larger than allowed."""

from __future__ import annotations

from typing import Any

import anyio
from starlette.requests import Request

from lorad.errors import LoradError
from lorad.server.fields import parse_object

# A larger body is parsed outside the event loop, which other streams need.
_PARSE_IN_THREAD = 64 << 10
# How much of a body that is refused is still read: a client that is not listened to while it
# sends meets a broken connection instead of the answer.
_DRAINED = 64 << 20


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body's JSON object; `request.invalid`, `request.too_large`, or ClientDisconnect."""
    _check_content_type(request.headers.get("content-type", ""))
    raw = await _read(request, max_bytes)
    if len(raw) < _PARSE_IN_THREAD:
        return parse_object(raw)
    return await anyio.to_thread.run_sync(parse_object, raw)


def _check_content_type(value: str) -> None:
    kind = value.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise LoradError(
            "request.invalid",
            f"the body's content type is {kind[:60]!r}",
            hint="send Content-Type: application/json",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes + _DRAINED:
            break
        else:
            chunks.clear()
    if size > max_bytes:
        raise LoradError(
            "request.too_large",
            f"the body has more than {max_bytes} bytes",
            hint="send a shorter prompt, or fewer in one request",
        )
    return b"".join(chunks)
