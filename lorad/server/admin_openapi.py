"""The OpenAPI document of the admin API, made from the routes and the types of lorad/wire.py.

`python -m lorad.server.admin_openapi` prints it; docs/openapi-admin.json is that output.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Sequence
from http import HTTPStatus
from typing import (
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorad import __version__, wire
from lorad.server.admin_contract import Contract, contract_of, path_parameter, plain_path

Schema = dict[str, Any]

_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "hint", "details", "request_id"],
            "properties": {
                **{key: {"type": "string"} for key in ("code", "message", "hint", "request_id")},
                "details": {"type": "object"},
            },
        }
    },
}


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The document for these routes; KeyError for a route that the contract does not know."""
    schemas: dict[str, Schema] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = plain_path(route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            contract = contract_of(method, path)
            paths.setdefault(path, {})[method.lower()] = _operation(path, contract, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lorad admin API",
            "version": str(wire.API_VERSION),
            "description": "HTTP over the daemon's UNIX socket. See docs/admin-api.md.",
            "x-lorad-version": __version__,
        },
        "servers": [{"url": "http://lorad", "description": "the host name is ignored"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def _operation(path: str, contract: Contract, schemas: dict[str, Schema]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": contract.summary,
        "parameters": [*map(path_parameter, re.findall(r"\{(\w+)\}", path)), *contract.parameters],
        "responses": {
            str(contract.status): _answer(contract, schemas),
            **{str(status): _error(status) for status in contract.errors(path)},
        },
    }
    if contract.asynchronous:
        accepted = _schema(wire.OperationAccepted, schemas)
        content = _json(accepted)
        found["responses"]["202"] = {"description": "taken on as an operation", "content": content}
    if contract.body is not None:
        required = "required" in contract.body
        found["requestBody"] = {"required": required, "content": _json(contract.body)}
    elif contract.uploads:
        binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        found["requestBody"] = {"content": binary}
    return found


def _error(status: int) -> Schema:
    return {
        "description": HTTPStatus(status).phrase,
        "content": _json({"$ref": "#/components/schemas/Error"}),
    }


def _answer(contract: Contract, schemas: dict[str, Schema]) -> dict[str, Any]:
    if contract.answer is None:
        return {"description": "done"}
    if isinstance(contract.answer, str):
        kind = "object" if contract.answer == "application/json" else "string"
        text = {contract.answer: {"schema": {"type": kind}}}
        return {"description": contract.summary, "content": text}
    return {"description": contract.summary, "content": _json(_schema(contract.answer, schemas))}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _schema(kind: Any, schemas: dict[str, Schema]) -> Schema:
    """The JSON schema of a type; TypedDicts go into `schemas` and are referred to."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        return _reference(kind, schemas)
    if origin in (NotRequired, Required):
        return _schema(arguments[0], schemas)
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], schemas)}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, schemas) for argument in arguments]}
    return _SIMPLE[kind]


def _reference(kind: Any, schemas: dict[str, Schema]) -> Schema:
    if kind.__name__ not in schemas:
        schemas[kind.__name__] = {}  # known from here on, should it hold itself
        hints = get_type_hints(kind, vars(wire), include_extras=True)
        required = [key for key, hint in hints.items() if get_origin(hint) is not NotRequired]
        schemas[kind.__name__] = {
            "type": "object",
            "required": required,
            "properties": {key: _schema(hint, schemas) for key, hint in hints.items()},
        }
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


async def show_openapi(request: Request) -> Response:
    return JSONResponse(
        openapi([route for route in request.app.routes if isinstance(route, Route)])
    )


OPENAPI_ROUTES = [Route(wire.OPENAPI, show_openapi)]


def main() -> None:
    """Print the document."""
    from lorad.server.admin import ROUTES

    print(json.dumps(openapi(ROUTES), indent=1))


if __name__ == "__main__":
    main()
