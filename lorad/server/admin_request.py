"""Reading admin requests: who asks, the JSON body, the query, the generation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request

from lorad.adapter_ref import AdapterName, check_version_label
from lorad.errors import LoradError
from lorad.registry.records import Who
from lorad.server.admin_context import context
from lorad.server.admin_fields import Fields, invalid
from lorad.server.fields import parse_object
from lorad.wire import ROUTE_WORDS

_BODY_LIMIT = 64 << 10
_TRUE, _FALSE = ("1", "true"), ("0", "false")


class _AdapterConvertor(StringConvertor):
    """`name` or `tenant/name` in a path; not `name:verb`, nor what lies below a name."""

    regex = rf"[^/:]+(?:/(?!(?:{'|'.join(ROUTE_WORDS)})$)[^/:]+)?"


class _LabelConvertor(StringConvertor):
    """A version or an id in a path, without a `:verb` after it."""

    regex = "[^/:]+"


register_url_convertor("adapter", _AdapterConvertor())
register_url_convertor("label", _LabelConvertor())


def who(request: Request) -> Who:
    """The peer of the connection, as the kernel named it."""
    peer = request.state.peer
    return Who(peer.uid, peer.pid)


def path_name(request: Request) -> AdapterName:
    return AdapterName.parse(request.path_params["name"])


def path_version(request: Request) -> str:
    return check_version_label(request.path_params["version"])


def query_flag(request: Request, key: str) -> bool:
    value = request.query_params.get(key, "0").lower()
    if value not in _TRUE + _FALSE:
        raise invalid(f"{key}={value[:20]!r} is neither 1 nor 0")
    return value in _TRUE


def query_count(request: Request, key: str, default: int, most: int) -> int:
    text = request.query_params.get(key, str(default))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise invalid(f"{key}={text[:20]!r} is not a number from 1 to {most}")
    return int(text)


def query_number(request: Request, key: str, default: int) -> int:
    """A whole number, 0 or above."""
    text = request.query_params.get(key, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise invalid(f"{key}={text[:20]!r} is not a whole number")
    return int(text)


def query_seconds(request: Request, key: str, default: float, most: float) -> float:
    """Seconds, with or without an `s` after them; more than `most` is taken as that."""
    text = request.query_params.get(key, str(default)).removesuffix("s")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise invalid(f"{key}={text[:20]!r} is not a number of seconds")
    return min(seconds, most)


def dry_run(request: Request) -> bool:
    return query_flag(request, "dry_run")


def expected_generation(request: Request) -> int | None:
    """The `If-Match` header: a generation, bare or quoted like the ETag it came from."""
    given = request.headers.get("if-match", "*").strip()
    if given == "*":
        return None
    number = given.strip('"')
    if not number.isdecimal():
        raise invalid(
            f"If-Match: {given[:40]} is not a generation",
            "send the number that GET /v1/adapters/NAME gave as `generation`",
        )
    return int(number)


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """The request's body as it comes in; `request.invalid` when it stops coming."""
    timeout = context(request).limits.read_timeout
    chunks = request.stream()
    while True:
        with anyio.move_on_after(timeout) as waiting:
            chunk = await anext(chunks, b"")
        if waiting.cancelled_caught:
            raise invalid(f"no byte of the body came for {timeout:g} seconds")
        if not chunk:
            return
        yield chunk


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; `request.too_large`, or `request.invalid` when it takes too long."""
    body = bytearray()
    deadline = anyio.current_time() + context(request).limits.read_timeout
    async for chunk in body_chunks(request):
        body += chunk
        if len(body) > limit:
            raise LoradError("request.too_large", f"the body is larger than {limit} bytes")
        if anyio.current_time() > deadline:
            raise invalid("the body came too slowly")
    return bytes(body)


async def read_json(request: Request, limit: int = _BODY_LIMIT) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes; no body at all is an empty one."""
    body = await read_body(request, limit)
    if not body:
        return {}
    found = parse_object(body)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        why = "the body has half of a surrogate pair, which is not a character"
        raise invalid(why, "texts must be UTF-8") from None
    return found


async def read_fields(request: Request, limit: int = _BODY_LIMIT) -> Fields:
    return Fields(await read_json(request, limit))
