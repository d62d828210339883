"""What each route of the admin API takes and gives; the OpenAPI document is made from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lorad import wire
from lorad.adapter_ref import PART
from lorad.errors import ErrorClass

Schema = dict[str, Any]


def _query(name: str, kind: str, text: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": {"type": kind, **limits}}


def _header(name: str, text: str, **limits: Any) -> dict[str, Any]:
    schema = {"type": "string", **limits}
    return {"name": name, "in": "header", "description": text, "schema": schema}


def _limit(most: int) -> dict[str, Any]:
    return _query("limit", "integer", "the most that is listed", minimum=1, maximum=most)


def _body(*required: str, **properties: Schema) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


_TEXT: Schema = {"type": "string", "maxLength": wire.TEXT_LIMIT}
_NAME: Schema = {"type": "string", "pattern": f"^({PART}/)?{PART}$"}
_LABEL: Schema = {"type": ["string", "null"], "pattern": f"^{PART}$"}
_FLAG: Schema = {"type": "boolean", "default": False}
_SECONDS: Schema = {"type": "number", "minimum": 0, "maximum": 86400, "default": 30}
_DRY = _query("dry_run", "boolean", "say what would happen, and change nothing")
_ASYNC = _header("Prefer", "respond-async: answer 202 and an operation at once")
_KEY = _header(
    "Idempotency-Key",
    "make the change once, however often it is asked for",
    pattern="^[!-~]([ -~]{0,126}[!-~])?$",
)
_IF_MATCH = _header(
    "If-Match",
    "the generation that the adapter must still be at",
    pattern=r'^(\*|[0-9]{1,18}|"[0-9]{1,18}")$',
)
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_MESSAGE: Schema = {"type": "object", "required": ["role", "content"]}
_CHECK: Schema = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "must_contain": {
            "anyOf": [_SOME_TEXT, {"type": "array", "minItems": 1, "items": _SOME_TEXT}]
        },
        "tokens": {"type": "array", "minItems": 1, "items": {"type": "integer"}},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 1024, "default": 64},
    },
    "additionalProperties": False,
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "anyOf": [{"required": ["must_contain"]}, {"required": ["tokens"]}],
}
_CANARY: Schema = {
    **_body(
        "percent",
        percent={"type": "number", "minimum": 0, "maximum": 100},
        version=_LABEL,
        auto_rollback=_FLAG,
        reason=_TEXT,
    ),
    "if": {"properties": {"percent": {"const": 0}}},
    "then": {"properties": {"version": {"type": "null"}, "auto_rollback": {"const": False}}},
}
_PATHS: dict[str, Schema] = {
    "name": {**_NAME, "examples": ["acme/support"]},
    "version": {"type": "string", "pattern": f"^{PART}$", "examples": ["v3"]},
    "file": {"type": "string", "enum": list(wire.ADAPTER_FILES)},
    "id": {"type": "string", "pattern": "^[a-z0-9-]{1,64}$"},
}


@dataclass(frozen=True, slots=True)
class Contract:
    """`answer` is a TypedDict of lorad.wire, a media type, or None for no body."""

    summary: str
    answer: Any
    body: Schema | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    status: int = 200
    asynchronous: bool = False
    uploads: bool = False
    changes: bool = True

    def errors(self, path: str) -> list[int]:
        """The statuses of its errors. Everything may meet a peer without rights, and a fault."""
        found = {ErrorClass.PERMISSION, ErrorClass.INTERNAL}
        if "{" in path:
            found |= {ErrorClass.USAGE, ErrorClass.NOT_FOUND}
        if self.body is not None or self.parameters:
            found |= {ErrorClass.USAGE, ErrorClass.NOT_FOUND}
        if self.changes:
            found |= {ErrorClass.CONFLICT, ErrorClass.INVALID_ADAPTER}
            found |= {ErrorClass.NO_CAPACITY, ErrorClass.TIMEOUT}
        return sorted(kind.http_status for kind in found)


def contract_of(method: str, path: str) -> Contract:
    """Of a route, with or without the convertors in its path; KeyError for an unknown one."""
    return CONTRACT[f"{method} {plain_path(path)}"]


def plain_path(path: str) -> str:
    """`/{name:adapter}` -> `/{name}`"""
    return re.sub(r":\w+\}", "}", path)


def path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _PATHS[name]}


def _read(summary: str, answer: Any, *parameters: dict[str, Any]) -> Contract:
    return Contract(summary, answer, parameters=parameters, changes=False)


def _change(
    summary: str, answer: Any, body: Schema | None = None, *parameters: dict[str, Any]
) -> Contract:
    """A change that may be made as an operation."""
    every = (*parameters, _DRY, _ASYNC, _KEY)
    return Contract(summary, answer, body, every, asynchronous=True)


_A, _V = f"{wire.ADAPTERS}/{{name}}", f"{wire.ADAPTERS}/{{name}}/versions/{{version}}"
_U = f"{wire.UPLOADS}/{{id}}"

CONTRACT: dict[str, Contract] = {
    f"GET {wire.HEALTHZ}": _read("whether the daemon answers", "application/json"),
    f"GET {wire.STATUS}": _read("the daemon, its adapters and its engine", wire.StatusInfo),
    f"GET {wire.CONFIG}": _read("the effective settings", wire.ConfigInfo),
    f"GET {wire.METRICS}": _read("Prometheus text", "text/plain"),
    f"GET {wire.STEPS}": _read(
        "the engine's last steps, oldest first", wire.StepList, _limit(10_000)
    ),
    f"GET {wire.OPENAPI}": _read("this document", "application/json"),
    f"POST {wire.SHUTDOWN}": Contract("end the daemon", "application/json", status=202),
    f"POST {wire.DRAIN}": _change(
        "refuse new requests and wait for the running ones",
        wire.DrainResult,
        _body(timeout=_SECONDS),
    ),
    f"POST {wire.RESUME}": _change("take requests again", wire.DrainResult, _body()),
    f"POST {wire.GC}": _change(
        "delete superseded versions",
        wire.GcResult,
        _body(keep={"type": "integer", "minimum": 0, "maximum": 10**6}, name=_NAME),
    ),
    f"GET {wire.EVENTS}": _read(
        "changes of all adapters, one JSON object a line",
        "application/x-ndjson",
        _query("after", "integer", "only those after this id", minimum=0, maximum=10**18 - 1),
        _query("follow", "boolean", "go on with what happens from now on"),
        _limit(10_000),
    ),
    f"GET {wire.OPERATIONS}": _read("operations, newest first", wire.OperationList, _limit(256)),
    f"GET {wire.OPERATIONS}/{{id}}": _read(
        "one operation",
        wire.OperationInfo,
        _query("wait", "number", "seconds to wait for its end", minimum=0, maximum=60),
    ),
    f"POST {wire.UPLOADS}": Contract(
        "begin a push",
        wire.UploadInfo,
        _body("name", name=_NAME, version=_LABEL, message=_TEXT),
        status=201,
    ),
    f"PUT {_U}/files/{{file}}": Contract("upload one file", wire.FileInfo, uploads=True),
    f"POST {_U}:commit": _change("check the adapter and make it a version", wire.PushResult),
    f"DELETE {_U}": Contract("drop an upload", None, status=204),
    f"POST {wire.VLLM_LOAD}": Contract(
        "vLLM's route: push a directory and make it live",
        "text/plain",
        {
            "type": "object",
            "required": ["lora_name", "lora_path"],
            "properties": {
                "lora_name": _NAME,
                "lora_path": {"type": "string", "pattern": "^/", "maxLength": 2000},
                "load_inplace": _FLAG,
            },
        },
    ),
    f"POST {wire.VLLM_UNLOAD}": Contract(
        "vLLM's route: retire a name",
        "text/plain",
        {
            "type": "object",
            "required": ["lora_name"],
            "properties": {"lora_name": _NAME},
        },
    ),
    f"GET {wire.ADAPTERS}": _read(
        "all adapters",
        wire.AdapterList,
        _query("tenant", "string", "only this tenant's"),
        _query("in_memory", "boolean", "only those with a version in memory or asked for"),
    ),
    f"GET {_A}": _read("one adapter and its versions", wire.AdapterInfo),
    f"GET {_A}/versions": _read("the same", wire.AdapterInfo),
    f"GET {_V}": _read("one version", wire.VersionInfo),
    f"GET {_A}/history": _read("changes, newest first", wire.History, _limit(1000)),
    f"POST {_A}:promote": _change(
        "make a version live",
        wire.PromoteResult,
        _body(version=_LABEL, reason=_TEXT, checks={"type": "array", "items": _CHECK}),
        _IF_MATCH,
    ),
    f"POST {_A}:rollback": _change(
        "make an earlier version live", wire.MoveResult, _body(to=_LABEL, reason=_TEXT), _IF_MATCH
    ),
    f"POST {_A}:canary": _change(
        "give a version a share of the name's callers; 0 ends it",
        wire.CanaryResult,
        _CANARY,
        _IF_MATCH,
    ),
    f"POST {_A}:retire": _change(
        "let the bare name answer no more", wire.MoveResult, _body(reason=_TEXT), _IF_MATCH
    ),
    f"DELETE {_V}": _change("delete one version", wire.DeleteResult),
    f"DELETE {_A}": _change(
        "delete an adapter",
        wire.DeleteResult,
        None,
        _query("force", "boolean", "although it is live or pinned"),
    ),
    f"POST {_V}:load": _change("bring onto the device", wire.LoadResult, _body(pin=_FLAG)),
    f"POST {_V}:unload": _change(
        "free its memory", wire.UnloadResult, _body(drain_timeout=_SECONDS, force=_FLAG)
    ),
    f"POST {_V}:pin": _change("keep it loaded", wire.PinResult),
    f"POST {_V}:unpin": _change("let it be evicted", wire.PinResult),
}
