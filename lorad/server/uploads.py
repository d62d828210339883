"""Uploads that are under way: a staging directory each, removed when nobody goes on with it."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import anyio
from anyio import to_thread

from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.registry.store import storage_errors
from lorad.server.admin_context import AdminLimits
from lorad.wire import ADAPTER_FILES, CONFIG_FILE, CONFIG_LIMIT, FileInfo

_WRITE_BYTES = 1 << 20  # gathered before a thread writes and hashes them


@dataclass
class Upload:
    """One push on its way in; `busy` while a request works on it."""

    id: str
    uid: int
    name: AdapterName
    label: str | None
    message: str
    directory: Path
    touched: float = field(default_factory=time.monotonic)
    busy: bool = False


class Uploads:
    """Used on the event loop alone; only writing and removing files happens in threads."""

    def __init__(self, registry: Registry, limits: AdminLimits) -> None:
        self._registry = registry
        self._limits = limits
        self._open: dict[str, Upload] = {}

    async def create(self, uid: int, name: AdapterName, label: str | None, message: str) -> Upload:
        """Raises `name.reserved`, `queue.full` or `store.*`."""
        self._registry.check_name(name)
        await self.discard_idle()
        if len(self._open) >= self._limits.max_uploads:
            raise LoradError(
                "queue.full",
                f"{len(self._open)} uploads are under way, which is the limit",
                hint="try again when one has ended",
            )
        directory = await to_thread.run_sync(self._registry.stage)
        upload = Upload(secrets.token_hex(16), uid, name, label, message, directory)
        self._open[upload.id] = upload
        return upload

    def take(self, upload_id: str, uid: int) -> Upload:
        """An upload for one request; the request gives it back, or discards it."""
        upload = self._open.get(upload_id)
        if upload is None or upload.uid != uid:
            raise LoradError(
                "upload.not_found",
                f"there is no upload {upload_id[:64]!r}",
                hint=f"an upload ends after {self._limits.upload_idle:g} seconds without a request",
            )
        if upload.busy:
            raise LoradError("upload.incomplete", "another request is working on this upload")
        upload.busy = True
        return upload

    def give_back(self, upload: Upload) -> None:
        upload.busy = False
        upload.touched = time.monotonic()

    def forget(self, upload: Upload) -> None:
        """Its directory is no longer ours: the registry took it, or it is being removed."""
        self._open.pop(upload.id, None)

    async def discard(self, upload: Upload) -> None:
        self.forget(upload)
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._registry.discard, upload.directory)

    async def discard_idle(self, limit: float | None = None) -> None:
        """Remove the uploads that no request has touched for `upload_idle` seconds."""
        oldest = time.monotonic() - (self._limits.upload_idle if limit is None else limit)
        idle = [u for u in self._open.values() if not u.busy and u.touched <= oldest]
        for upload in idle:
            await self.discard(upload)

    async def sweep(self) -> None:
        """Discard idle uploads for as long as the daemon runs, and all of them at its end."""
        try:
            while True:
                await anyio.sleep(self._limits.upload_idle / 2)
                await self.discard_idle()
        finally:
            with anyio.CancelScope(shield=True):
                await self.discard_idle(limit=0)

    def check_file(self, file: str, length: int) -> None:
        """Raises `request.invalid` or `request.too_large` before a byte is read."""
        if file not in ADAPTER_FILES:
            raise LoradError(
                "request.invalid",
                f"{file[:80]!r} is not a file of an adapter",
                hint=f"upload {' and '.join(ADAPTER_FILES)}",
            )
        limit = CONFIG_LIMIT if file == CONFIG_FILE else self._limits.max_upload_bytes
        if length > limit:
            raise LoradError(
                "request.too_large",
                f"{file} has {length} bytes; the limit is {limit}",
                details={"bytes": length, "limit": limit},
            )


async def write_file(target: Path, chunks: AsyncIterator[bytes]) -> FileInfo:
    """Write a body to disk, a MiB at a time, in threads; returns its size and sha256."""
    digest = hashlib.sha256()
    size = 0

    def write(piece: bytes) -> None:
        with storage_errors("cannot write the upload"):
            file.write(piece)
        digest.update(piece)

    file = await to_thread.run_sync(_create, target)
    try:
        async for piece in _gathered(chunks):
            size += len(piece)
            await to_thread.run_sync(write, piece)
    finally:
        file.close()  # unbuffered: nothing is left to write
    return {"file": target.name, "bytes": size, "sha256": digest.hexdigest()}


def _create(target: Path) -> BinaryIO:
    with storage_errors("cannot write the upload"):
        return target.open("wb", buffering=0)


async def _gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    piece = bytearray()
    async for chunk in chunks:
        piece += chunk
        if len(piece) >= _WRITE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
