"""The two files of an adapter directory, opened so that nothing else can be read by them.

Both are opened relative to the directory's own descriptor, without following a symbolic link
and without blocking on a pipe, and looked at only after that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorad.adapters.peft_config import MAX_CONFIG_BYTES
from lorad.adapters.safetensors_header import LENGTH_BYTES, corrupt, header_length
from lorad.errors import LoradError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_LISTED = 1000  # a directory with more files is not searched for hints


class ByteSource(Protocol):
    """A file that can be read in pieces: one on disk, or one on the hub."""

    @property
    def size(self) -> int: ...

    def read_at(self, start: int, count: int) -> bytes:
        """Exactly `count` bytes; raises `adapter.weights_corrupt` when there are fewer."""
        ...


@dataclass(frozen=True, slots=True)
class LocalFile:
    """An open file; `size` is what it had when it was opened."""

    descriptor: int
    size: int

    def read_at(self, start: int, count: int) -> bytes:
        chunks = []
        while count:
            chunk = os.pread(self.descriptor, count, start)
            if not chunk:
                raise corrupt(f"the file ended {count} bytes early: it is being written")
            chunks.append(chunk)
            start, count = start + len(chunk), count - len(chunk)
        return b"".join(chunks)


@contextmanager
def open_adapter_file(directory: Path, name: str) -> Iterator[LocalFile]:
    """Open `name` inside `directory` for reading; a regular file, or an error.

    Raises `path.not_found`, `path.permission`, `adapter.config_missing`,
    `adapter.weights_missing` or `adapter.unsafe_format`.
    """
    with _directory(directory) as folder:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            raise _missing(directory, folder, name) from None
        except PermissionError:
            raise _unreadable(directory / name) from None
        except OSError as error:  # ELOOP: a symbolic link; ENXIO: a socket
            raise _not_a_file(name, error.strerror) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _not_a_file(name, "a directory, pipe or device")
            yield LocalFile(descriptor, status.st_size)
        finally:
            os.close(descriptor)


@contextmanager
def _directory(directory: Path) -> Iterator[int]:
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LoradError(
            "path.not_found",
            f"there is no directory {directory}",
            hint=f"give the directory that holds {CONFIG_FILE} and {WEIGHTS_FILE}",
            details={"path": str(directory)},
        ) from None
    except PermissionError:
        raise _unreadable(directory) from None
    except (NotADirectoryError, OSError, ValueError) as error:
        raise LoradError(
            "path.not_found",
            f"{directory} is not a directory that can be read ({error})",
            hint=f"give the directory that holds {CONFIG_FILE} and {WEIGHTS_FILE}",
            details={"path": str(directory)},
        ) from None
    try:
        yield folder
    finally:
        os.close(folder)


def _unreadable(path: Path) -> LoradError:
    return LoradError(
        "path.permission",
        f"{path} cannot be read: permission denied",
        hint="give this user read access to the directory and its files",
        details={"path": str(path)},
    )


def _not_a_file(name: str, what: str | None) -> LoradError:
    return LoradError(
        "adapter.unsafe_format",
        f"{name} is not a regular file ({what})",
        hint="links are not followed; copy the directory with `cp -rL` first",
        details={"file": name},
    )


def _missing(directory: Path, folder: int, name: str) -> LoradError:
    if name == CONFIG_FILE:
        return LoradError(
            "adapter.config_missing",
            f"{directory} has no {CONFIG_FILE}",
            hint="give the directory that PEFT's save_pretrained wrote",
            details={"path": str(directory)},
        )
    others = _other_weight_files(folder)
    pickles = [other for other in others if other.endswith(_PICKLE_ENDINGS)]
    if pickles:
        return LoradError(
            "adapter.unsafe_format",
            f"the weights are in {pickles[0]}, a pickle, which can run code when it is opened",
            hint="convert it to safetensors: load it with PEFT where you trust it, and save again",
            details={"files": pickles},
        )
    found = f" (there is {', '.join(others)})" if others else ""
    return LoradError(
        "adapter.weights_missing",
        f"{directory} has no {WEIGHTS_FILE}{found}",
        hint="give the directory that PEFT's save_pretrained wrote",
        details={"path": str(directory), "files": others},
    )


def _other_weight_files(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for _, entry in zip(range(_MAX_LISTED), entries, strict=False)]
    endings = (*_PICKLE_ENDINGS, ".safetensors", ".safetensors.index.json", ".gguf")
    return sorted(name[:100] for name in names if name.endswith(endings))[:10]


def read_config_file(directory: Path) -> bytes:
    """adapter_config.json, at most 1 MiB of it."""
    with open_adapter_file(directory, CONFIG_FILE) as file:
        return read_config_bytes(file)


def read_config_bytes(source: ByteSource) -> bytes:
    """The whole file, if it is no larger than a config can be; raises `adapter.too_large`."""
    if source.size > MAX_CONFIG_BYTES:
        raise LoradError(
            "adapter.too_large",
            f"{CONFIG_FILE} has {source.size} bytes; at most {MAX_CONFIG_BYTES} are read",
            hint="it must be the file PEFT's save_pretrained writes",
            details={"bytes": source.size, "limit": MAX_CONFIG_BYTES},
        )
    return source.read_at(0, source.size)


def read_header_bytes(source: ByteSource) -> bytes:
    """The header's JSON alone; raises `adapter.weights_corrupt` or `adapter.too_large`."""
    length = header_length(source.read_at(0, min(LENGTH_BYTES, source.size)), source.size)
    return source.read_at(LENGTH_BYTES, length)
