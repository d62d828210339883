"""The version store: `{store}/{base_model}/{tenant}/{adapter}/{version}/`, two files in each.

A version appears by one rename and disappears by one rename, so no reader and no crash ever
meets half of one.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from lorad.adapter_ref import AdapterName, check_version_label
from lorad.errors import LoradError
from lorad.wire import ADAPTER_FILES

# Not a name that `base_folder` can make, and on the same file system as the versions.
_STAGING = ".staging"
_COPY_CHUNK = 1 << 20
_MAX_FOLDER = 255  # bytes in one path component


def base_folder(base_model: str) -> str:
    """One path component for a base model's id; different ids give different components."""
    escaped = quote(base_model, safe="")
    folder = "%2E" + escaped[1:] if escaped.startswith(".") else escaped
    if not folder or len(folder) > _MAX_FOLDER:
        raise LoradError(
            "config.invalid",
            f"the base model's id {base_model[:80]!r} cannot name a directory of the store",
            hint="serve it under a shorter name",
        )
    return folder


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn a failing disk into `store.no_space` or `store.unavailable`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = "store.no_space" if full else "store.unavailable"
        hint = "free space on the disk of the" if full else "look at the rights and disk of the"
        message = f"{what}: {error.strerror or error}"
        raise LoradError(code, message, hint=f"{hint} daemon's state directory") from error


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StagingArea:
    """Private directories on the local disk, in which versions come in."""

    def __init__(self, root: Path) -> None:
        self._staging = root / _STAGING
        with storage_errors(f"cannot make the version store {root}"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._staging.mkdir(exist_ok=True)

    def stage(self) -> Path:
        """A new private directory that `publish` can rename into place."""
        with storage_errors("cannot begin an upload"):
            return Path(tempfile.mkdtemp(dir=self._staging))

    def stage_copy(self, source: Path) -> Path:
        """Stage the two files of a directory that the daemon itself can read."""
        staged = self.stage()
        try:
            for file in ADAPTER_FILES:
                _copy_file(source / file, staged / file)
        except BaseException:
            self.discard(staged)
            raise
        return staged

    def discard(self, staged: Path) -> None:
        """Remove a staged directory; one that has been published or removed is no error."""
        shutil.rmtree(staged, ignore_errors=True)

    def clear_staging(self) -> int:
        """Remove what an earlier process left half done; returns how many directories."""
        with storage_errors("cannot clear the staging area"):
            left = list(self._staging.iterdir())
            for entry in left:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return len(left)


class VersionStore(StagingArea):
    """Files only: what a version means is the registry's business."""

    def __init__(self, root: Path, base_model: str) -> None:
        super().__init__(root)
        self._root = root
        self._base = root / base_folder(base_model)
        with storage_errors(f"cannot make the version store {root}"):
            self._base.mkdir(exist_ok=True)

    def directory(self, name: AdapterName, label: str) -> Path:
        """Where a version lies. The names are checked again here, where they become a path."""
        checked = AdapterName.parse(name.qualified)
        return self._base / checked.tenant / checked.name / check_version_label(label)

    def publish(self, staged: Path, name: AdapterName, label: str) -> None:
        """Give a staged directory its final place, durably. The registry holds its lock."""
        target = self.directory(name, label)
        with storage_errors(f"cannot store {name}@{label}"):
            for file in ADAPTER_FILES:
                (staged / file).chmod(0o400)
                fsync_path(staged / file)
            fsync_path(staged)
            self._move_away(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.rename(target)
            for folder in target.parents:
                fsync_path(folder)
                if folder == self._root:
                    break

    def remove(self, name: AdapterName, label: str) -> None:
        """Remove a version's directory, and its parents when it was the last one in them."""
        target = self.directory(name, label)
        with storage_errors(f"cannot remove {name}@{label}"):
            self._move_away(target)
        with suppress(OSError):  # not empty
            target.parent.rmdir()
            target.parent.parent.rmdir()

    def _move_away(self, target: Path) -> None:
        if not target.is_symlink() and not target.exists():
            return
        trash = Path(tempfile.mkdtemp(dir=self._staging))
        target.rename(trash / "removed")
        fsync_path(target.parent)
        shutil.rmtree(trash, ignore_errors=True)

    def stored(self) -> Iterator[tuple[AdapterName, str]]:
        """Every version directory of this base model, with or without a row in the registry."""
        for folder in self._base.glob("*/*/*"):
            tenant, adapter, label = folder.parts[-3:]
            with suppress(LoradError):  # not a name of ours: somebody else's file
                yield AdapterName.parse(f"{tenant}/{adapter}"), check_version_label(label)

    def fetch(self, name: AdapterName, label: str, sizes: tuple[int, int]) -> Path:
        """The directory of a version, as it is."""
        return self.directory(name, label)

    def forget(self, name: AdapterName, label: str) -> None:
        """Nothing is kept beside the store."""

    def damage(self, name: AdapterName, label: str, sizes: tuple[int, int]) -> str:
        """Why a version cannot be what was stored, by file sizes alone; "" when it can."""
        directory = self.directory(name, label)
        for file, size in zip(ADAPTER_FILES, sizes, strict=True):
            try:
                found = (directory / file).lstat()
            except OSError as error:
                return f"{file} cannot be read: {error.strerror}"
            if not stat.S_ISREG(found.st_mode):
                return f"{file} is not a regular file"
            if found.st_size != size:
                return f"{file} has {found.st_size} bytes, not the {size} that were stored"
        return ""


class Store(Protocol):
    """What the registry asks of the place where versions lie."""

    def stage(self) -> Path: ...
    def stage_copy(self, source: Path) -> Path: ...
    def discard(self, staged: Path) -> None: ...
    def clear_staging(self) -> int: ...
    def publish(self, staged: Path, name: AdapterName, label: str) -> None: ...
    def remove(self, name: AdapterName, label: str) -> None: ...
    def stored(self) -> Iterator[tuple[AdapterName, str]]: ...
    def damage(self, name: AdapterName, label: str, sizes: tuple[int, int]) -> str: ...

    def fetch(self, name: AdapterName, label: str, sizes: tuple[int, int]) -> Path:
        """A local directory with the version's two files."""
        ...

    def forget(self, name: AdapterName, label: str) -> None:
        """Drop a local copy that turned out not to be what was stored."""
        ...


def file_sizes(directory: Path) -> tuple[int, int]:
    """Bytes of the configuration and of the weights."""
    config, weights = (directory / file for file in ADAPTER_FILES)
    return config.stat().st_size, weights.stat().st_size


def _copy_file(source: Path, target: Path) -> None:
    """Copy one regular file; a FIFO or a device neither blocks nor passes."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise LoradError(
            "path.not_found" if missing else "path.permission",
            f"cannot read {source}: {error.strerror}",
            hint="the daemon reads this path with its own rights",
        ) from None
    with os.fdopen(descriptor, "rb") as reader:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LoradError("request.invalid", f"{source} is not a regular file")
        with storage_errors(f"cannot copy {source}"), target.open("xb") as writer:
            shutil.copyfileobj(reader, writer, _COPY_CHUNK)
