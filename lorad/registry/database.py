"""The registry's SQLite file: opened by one process, changed by one transaction at a time."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorad.errors import LoradError
from lorad.registry.migrations import migrate, schema_number
from lorad.registry.store import storage_errors

_FILE = "registry.db"


class Database:
    """One connection behind a lock. The lock on the directory keeps a second daemon out."""

    def __init__(self, state: Path) -> None:
        """Raises `daemon.already_running` when another process has the state directory open."""
        with storage_errors(f"cannot open the state directory {state}"):
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock_directory(self._directory, state)
            with database_errors():
                self._connection = _connect(state / _FILE)
        except BaseException:
            os.close(self._directory)
            raise
        self.lock = threading.RLock()

    @property
    def fresh(self) -> bool:
        """No schema yet: nothing was ever written to it."""
        with self.reading() as db:
            return schema_number(db) == 0

    def migrate(self) -> None:
        with self.reading() as db:
            migrate(db)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self.lock, database_errors():
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block's changes, on disk when it ends, or none of them."""
        with self.lock, database_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Also lets another process in. A second call does nothing."""
        with self.lock:
            if self._directory >= 0:
                self._connection.close()
                os.close(self._directory)
                self._directory = -1


def _lock_directory(descriptor: int, state: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LoradError(
            "daemon.already_running",
            f"another lorad uses the state directory {state}",
            hint="stop it (`lorad stop`), or give this one a state directory of its own",
            details={"state": str(state)},
        ) from None


def _connect(file: Path) -> sqlite3.Connection:
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn a failing database into `store.no_space` or `store.unavailable`."""
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
        raise LoradError(
            "store.no_space" if full else "store.unavailable",
            f"the registry database failed: {error}",
            hint="free space" if full else "look at the daemon's state directory",
        ) from error
