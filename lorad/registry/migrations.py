"""Schema of the registry database: numbered .sql files, applied once and in order."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from lorad.errors import LoradError

_FOLDER = Path(__file__).parent


def _scripts() -> dict[int, Path]:
    """Schema number -> file: `0001_initial.sql` brings an empty database to schema 1."""
    return {int(file.name[:4]): file for file in sorted(_FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))}


def schema_number(connection: sqlite3.Connection) -> int:
    """0 for a database that was just created."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the database to the newest schema; each step is a transaction of its own.

    Raises `store.unavailable` for a database that a newer lorad has already changed.
    """
    scripts = _scripts()
    current, newest = schema_number(connection), max(scripts)
    if current > newest:
        raise LoradError(
            "store.unavailable",
            f"the registry database has schema {current}; this lorad knows {newest}",
            hint="a newer lorad has used this state directory: run that version",
        )
    for number in range(current + 1, newest + 1):
        script = scripts[number].read_text("utf-8")
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;"
        )
