"""Errors as OpenAI's clients expect them: the public port's half of lorad/errors.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from lorad.errors import ErrorClass, LoradError

_DEFAULT_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class PublicError:
    """The status and the words of one error on the public port."""

    status: int
    type: str
    code: str


_INVALID = "invalid_request_error"
_MODEL_NOT_FOUND = PublicError(404, _INVALID, "model_not_found")

# Codes for which OpenAI has a word of its own, or a status that its clients act on.
_BY_CODE: dict[str, PublicError] = {
    "adapter.not_found": _MODEL_NOT_FOUND,
    "version.not_found": _MODEL_NOT_FOUND,
    "name.invalid": _MODEL_NOT_FOUND,
    "name.reserved": _MODEL_NOT_FOUND,
    "request.context_length": PublicError(400, _INVALID, "context_length_exceeded"),
    "request.too_large": PublicError(413, _INVALID, "request.too_large"),
    "auth.invalid_key": PublicError(401, _INVALID, "invalid_api_key"),
    "queue.full": PublicError(429, "rate_limit_error", "rate_limit_exceeded"),
}

# A conflict is never 409 here: OpenAI's clients take 409 for a lock and try again.
_BY_CLASS: dict[ErrorClass, tuple[int, str]] = {
    ErrorClass.USAGE: (400, _INVALID),
    ErrorClass.PERMISSION: (403, "permission_error"),
    ErrorClass.NOT_FOUND: (404, _INVALID),
    ErrorClass.NOT_ALLOWED: (405, _INVALID),
    ErrorClass.NO_CAPACITY: (503, "server_error"),
    ErrorClass.UNREACHABLE: (503, "server_error"),
    ErrorClass.TIMEOUT: (504, "server_error"),
}

# Failures that the same request would meet again.
_LASTING = (ErrorClass.INVALID_ADAPTER, ErrorClass.CONFLICT, ErrorClass.NEGATIVE)


def public_error(error: LoradError) -> PublicError:
    known = _BY_CODE.get(error.code)
    if known is not None:
        return known
    status, kind = _BY_CLASS.get(error.kind, (500, "server_error"))
    return PublicError(status, kind, error.code)


def error_body(error: LoradError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`; the hint is part of the message."""
    public = public_error(error)
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return _body(message, public.type, public.code, error.details.get("param"))


def error_response(error: LoradError) -> JSONResponse:
    public = public_error(error)
    return JSONResponse(error_body(error), public.status, headers=_headers(error, public))


def plain_error(status: int, code: str, message: str) -> JSONResponse:
    """An error of the HTTP layer itself, such as an unknown route."""
    return JSONResponse(_body(message, _INVALID, code, None), status)


def _body(message: str, kind: str, code: str, param: Any) -> dict[str, Any]:
    shown = param if param is None else _encodable(str(param))
    return {"error": {"message": _encodable(message), "type": kind, "param": shown, "code": code}}


def _encodable(text: str) -> str:
    """Errors quote what a client sent, half a surrogate pair included."""
    return text.encode(errors="replace").decode()


def _headers(error: LoradError, public: PublicError) -> dict[str, str]:
    if public.status in (429, 503):
        return _retry_headers(error)
    if public.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.kind in _LASTING:
        return {"x-should-retry": "false"}
    return {}


def _retry_headers(error: LoradError) -> dict[str, str]:
    wait = error.details.get("retry_after_ms")
    milliseconds = max(1, round(wait)) if isinstance(wait, int | float) else _DEFAULT_RETRY_MS
    return {
        "retry-after-ms": str(milliseconds),
        "retry-after": str(math.ceil(milliseconds / 1000)),
    }
