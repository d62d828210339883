"""GET /v1/models: the base model and every adapter that the caller may use.

Whether an adapter is in memory does not change the list: routers read the ids from here.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad.adapter_ref import AdapterRef
from lorad.server.long_list import json_array
from lorad.server.serving import LiveAdapter, Serving, serving_of


async def list_models(request: Request) -> Response:
    serving = serving_of(request)
    visible = _visible(serving, serving.api_keys.tenant(request))
    adapters = sorted(visible, key=lambda adapter: adapter.name)
    entries = (_adapter(serving, str(a.name), a) for a in adapters)
    data = await json_array(chain([_base(serving)], entries))
    return Response(b'{"object":"list","data":%s}' % data, media_type="application/json")


async def show_model(request: Request) -> JSONResponse:
    """The id may name a version: `tenant/name@v3`."""
    serving = serving_of(request)
    tenant = serving.api_keys.tenant(request)
    model = request.path_params["id"]
    ref = serving.resolve(model, tenant)
    if ref is None:
        return JSONResponse(_base(serving))
    return JSONResponse(_adapter(serving, model, ref))


def _visible(serving: Serving, tenant: str | None) -> list[LiveAdapter]:
    return [
        adapter
        for adapter in serving.registry.live_adapters()
        if serving.api_keys.allow(tenant, adapter.name)
    ]


def _base(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.base_model,
        "object": "model",
        "created": serving.started_at,
        "owned_by": "lorad",
        "parent": None,
        "max_model_len": serving.limits.max_model_len,
    }


def _adapter(serving: Serving, model: str, adapter: LiveAdapter | AdapterRef) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": _created(serving, adapter),
        "owned_by": adapter.name.tenant,
        "parent": serving.base_model,
        "max_model_len": serving.limits.max_model_len,
        "version": adapter.version,
    }


def _created(serving: Serving, adapter: LiveAdapter | AdapterRef) -> int:
    """When the adapter was created; 0 for one that has no live version."""
    if not isinstance(adapter, AdapterRef):
        return int(adapter.created_at)
    live = serving.registry.live_adapters()
    return next((int(a.created_at) for a in live if a.name == adapter.name), 0)
