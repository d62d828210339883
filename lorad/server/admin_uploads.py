"""Pushing a version: create an upload, put the two files, commit."""

from __future__ import annotations

from functools import partial

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorad import wire
from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry.records import Pushed
from lorad.server.admin_context import context
from lorad.server.admin_fields import invalid
from lorad.server.admin_operations import change
from lorad.server.admin_request import body_chunks, dry_run, read_fields, who
from lorad.server.admin_views import states, version_info
from lorad.server.uploads import Upload, Uploads, write_file


def uploads(request: Request) -> Uploads:
    found: Uploads = request.app.state.uploads
    return found


async def create(request: Request) -> Response:
    fields = await read_fields(request)
    name = AdapterName.parse(fields.required_text("name"))
    label, message = fields.label("version"), fields.text("message")
    fields.end()
    upload = await uploads(request).create(who(request).uid, name, label, message)
    info: wire.UploadInfo = {
        "id": upload.id,
        "files": list(wire.ADAPTER_FILES),
        "max_bytes": context(request).limits.max_upload_bytes,
    }
    return JSONResponse(info, status_code=201)


async def put_file(request: Request) -> Response:
    file = request.path_params["file"]
    upload = _take(request)
    try:
        uploads(request).check_file(file, _content_length(request))
        info = await write_file(upload.directory / file, body_chunks(request))
    except ClientDisconnect:
        await uploads(request).discard(upload)
        return Response(status_code=400)  # nobody is there to read it
    except BaseException:
        await uploads(request).discard(upload)
        raise
    uploads(request).give_back(upload)
    return JSONResponse(info)


async def commit(request: Request) -> Response:
    """Check the adapter and make it a version; the upload is over, whatever comes out."""
    fields = await read_fields(request)
    fields.end()
    upload = _take(request)
    try:
        _check_complete(upload)
    except LoradError:
        uploads(request).give_back(upload)
        raise
    uploads(request).forget(upload)
    take_in = partial(
        context(request).registry.commit,
        upload.directory,
        upload.name,
        who=who(request),
        label=upload.label,
        message=upload.message,
        dry_run=dry_run(request),
    )
    pushed = await to_thread.run_sync(take_in)
    return JSONResponse(push_result(request, pushed, dry_run=dry_run(request)))


async def discard(request: Request) -> Response:
    await uploads(request).discard(_take(request))
    return Response(status_code=204)


def push_result(request: Request, pushed: Pushed, *, dry_run: bool) -> wire.PushResult:
    ctx, version = context(request), pushed.version
    live = ctx.registry.is_live(version.ref)
    return {
        "name": str(version.ref.name),
        "outcome": pushed.outcome,
        "changed": pushed.outcome != "unchanged",
        "dry_run": dry_run,
        "version": version_info(version, states(ctx.engine.stats()), live=live),
    }


def _take(request: Request) -> Upload:
    return uploads(request).take(request.path_params["id"], who(request).uid)


def _content_length(request: Request) -> int:
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        raise invalid("the request has no Content-Length", "send the file's size, not in chunks")
    return int(length)


def _check_complete(upload: Upload) -> None:
    missing = [file for file in wire.ADAPTER_FILES if not (upload.directory / file).is_file()]
    if missing:
        raise LoradError(
            "upload.incomplete",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not uploaded yet",
            hint="PUT each file, then commit",
            details={"missing": missing},
        )


UPLOAD_ROUTES = [
    Route(wire.UPLOADS, create, methods=["POST"]),
    Route(f"{wire.UPLOADS}/{{id:label}}/files/{{file}}", put_file, methods=["PUT"]),
    change(f"{wire.UPLOADS}/{{id:label}}:commit", commit),
    Route(f"{wire.UPLOADS}/{{id:label}}", discard, methods=["DELETE"]),
]
