"""vLLM's two routes, with its bodies and its answers, on the admin socket.

Loading a name pushes the directory as its next version and makes that live; unloading
retires the name. What was pushed stays in the registry, with its history.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.server.admin_changes import ready_to_serve
from lorad.server.admin_context import AdminContext, context
from lorad.server.admin_fields import Fields, invalid
from lorad.server.admin_request import read_json, who

_REASON = "vLLM route"


async def load_lora_adapter(request: Request) -> Response:
    """`lora_name`, `lora_path`, `load_inplace`. Other fields of vLLM's body change nothing."""
    ctx, fields = context(request), Fields(await read_json(request))
    name = AdapterName.parse(fields.required_text("lora_name"))
    path = Path(fields.required_text("lora_path"))
    _check_free(ctx, name, in_place=fields.flag("load_inplace"))
    if not path.is_absolute():
        raise invalid(
            f"lora_path {str(path)[:200]!r} is not absolute",
            "give a directory of the daemon's machine; nothing is downloaded",
        )
    asked_by = who(request)
    push = partial(ctx.registry.push, path, name, who=asked_by, message=_REASON)
    version = (await to_thread.run_sync(push)).version
    await ready_to_serve(ctx, version)
    flip = partial(ctx.registry.promote, name, version.label, who=asked_by, reason=_REASON)
    await to_thread.run_sync(flip)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """`lora_name`. New requests for it are refused at once; running ones end as usual."""
    ctx, fields = context(request), Fields(await read_json(request))
    name = AdapterName.parse(fields.required_text("lora_name"))
    version = ctx.registry.live_version(name)
    if version is None:
        raise LoradError("adapter.not_found", f"the lora adapter {str(name)!r} is not loaded")
    take_down = partial(ctx.registry.retire, name, who=who(request), reason=_REASON)
    await to_thread.run_sync(take_down)
    # Still in use after the wait: its memory is given back when it is evicted.
    with suppress(LoradError):
        await ctx.engine.unload_adapter(version.ref, drain_timeout=ctx.limits.drain_timeout)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_free(ctx: AdminContext, name: AdapterName, *, in_place: bool) -> None:
    if ctx.registry.live_version(name) is not None and not in_place:
        raise invalid(
            f"the lora adapter {str(name)!r} has already been loaded",
            "set load_inplace to true to make this directory its next version",
        )


VLLM_ROUTES = [
    Route(wire.VLLM_LOAD, load_lora_adapter, methods=["POST"]),
    Route(wire.VLLM_UNLOAD, unload_lora_adapter, methods=["POST"]),
]
