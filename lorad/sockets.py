"""The admin socket: who may reach it, and that only one daemon owns it.

The socket file is made by us under a umask, never by the HTTP server, which would leave it
open to every user. A lock file beside it, held for the life of the process, decides who may
remove a stale socket file.
"""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from lorad.errors import LoradError

_BACKLOG = 128
_DIAL_SECONDS = 1.0
_MAX_PATH = 107  # bytes of sun_path, less the terminating NUL
_SO_PEERGROUPS = 59  # Linux; the socket module does not name it
_PEERCRED = struct.Struct("3i")
_MAX_GROUPS = 1024


Role = Literal["admin", "read", "none"]


@dataclass(frozen=True, slots=True)
class AdminGroups:
    """Groups whose members may use the admin socket, besides root and the daemon's own user."""

    admin: int | None = None
    read: int | None = None

    @classmethod
    def named(cls, admin: str, read: str) -> AdminGroups:
        """Raises `config.invalid` for a group that does not exist; "" is none."""
        return cls(group_id(admin) if admin else None, group_id(read) if read else None)

    @property
    def of_socket(self) -> int | None:
        """The one group that a file can have. With both, admins must be in the read group too."""
        return self.admin if self.read is None else self.read


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, as the kernel names it."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Read when the connection is made: the credentials of the process that connected."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        pid, uid, gid = _PEERCRED.unpack(raw)
        return cls(pid, uid, gid, _peer_groups(connection))

    def role(self, groups: AdminGroups) -> Role:
        """Root, the daemon's own user and the admin group may do everything."""
        if self.uid in (0, os.geteuid()) or self._is_in(groups.admin):
            return "admin"
        return "read" if self._is_in(groups.read) else "none"

    def _is_in(self, gid: int | None) -> bool:
        return gid is not None and gid in (self.gid, *self.groups)


def _peer_groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # a kernel without it, or a peer in too many groups
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def group_id(name: str) -> int:
    """Raises `config.invalid` for a group that does not exist."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise LoradError(
            "config.invalid",
            f"there is no group {name!r}",
            hint="create it, or leave admin_group unset",
        ) from None


_NOBODY = AdminGroups()


class PassedSocket:
    """A listening UNIX socket that a service manager made: its file and modes are not ours."""

    def __init__(self, listener: socket.socket, groups: AdminGroups = _NOBODY) -> None:
        self.path = Path(os.fsdecode(listener.getsockname()))
        self.groups = groups
        self.socket = listener
        self.socket.setblocking(False)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> PassedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AdminSocket:
    """A bound and listening UNIX socket. Closing it removes the file, if it is still ours."""

    def __init__(self, path: Path, groups: AdminGroups = _NOBODY) -> None:
        """Bind `path`: mode 0600, or 0660 for a group; its directory 0700, or 0750.

        Raises `daemon.already_running` (another process holds the lock), `socket.in_use`
        (something else listens there), `socket.permission` or `config.invalid`.
        """
        self.path = path
        self.groups = groups
        self._gid = groups.of_socket
        _check_length(path)
        try:
            _prepare_directory(path.parent, self._gid)
            self._lock = _take_lock(path)
        except OSError as error:
            raise _permission(f"cannot make the admin socket {path}: {error.strerror}") from None
        try:
            self.socket = self._bind()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise _permission(f"cannot bind {path}: {error.strerror}") from None
            raise

    def _bind(self) -> socket.socket:
        _remove_stale(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # bind() makes the file; the umask leaves no moment in which others can open it.
            mask = os.umask(0o177)
            try:
                listener.bind(str(self.path))
            finally:
                os.umask(mask)
            if self._gid is not None:
                os.chown(self.path, -1, self._gid)
                self.path.chmod(0o660)
            self._identity = _identity(self.path)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        listener.setblocking(False)
        return listener

    def close(self) -> None:
        """Stop listening and give up the path. A second call does nothing."""
        if self._lock < 0:
            return
        self.socket.close()
        with suppress(OSError):
            if _identity(self.path) == self._identity:
                self.path.unlink()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> AdminSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH:
        raise LoradError(
            "config.invalid",
            f"the socket path {path} is longer than {_MAX_PATH} bytes",
            hint="choose a shorter one with --socket",
        )


def _prepare_directory(directory: Path, gid: int | None) -> None:
    """Make the directory, or check that nobody else can replace what is in it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except FileExistsError:
        _check_directory(directory)
        return
    if gid is not None:
        os.chown(directory, -1, gid)
        directory.chmod(0o750)


def _check_directory(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _permission(f"{directory} is not a directory (links are not followed)")
    if found.st_uid != os.geteuid():
        raise _permission(f"{directory} belongs to uid {found.st_uid}, not to this user")
    if found.st_mode & 0o022:
        raise _permission(
            f"{directory} can be written to by other users (mode {stat.S_IMODE(found.st_mode):04o})"
        )


def _take_lock(path: Path) -> int:
    """The lock beside the socket `path`. It ends with the process; the file says whose it is."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path.with_suffix(".lock"), flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise LoradError(
            "daemon.already_running",
            f"another lorad (pid {owner or 'unknown'}) owns {path}",
            hint="`lorad stop` ends it; --socket gives this one another path",
            details={"pid": int(owner) if owner.isdigit() else None},
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody answers on; anything else there is not ours to remove."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise LoradError(
            "socket.in_use",
            f"{path} exists and is not a socket",
            hint="move it away, or choose another path with --socket",
        )
    if _answers(path):
        raise LoradError(
            "socket.in_use",
            f"another process listens on {path}",
            hint="stop it, or choose another path with --socket",
        )
    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_DIAL_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # busy, or not ours to open: somebody is there
            return True
    return True


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _permission(message: str) -> LoradError:
    return LoradError(
        "socket.permission",
        message,
        hint="the socket needs a directory that only the daemon's user can write to: --socket PATH",
    )
