"""Rows to records and back: the only file with SQL for reading."""

from __future__ import annotations

import json
import sqlite3

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.registry.catalog import no_adapter
from lorad.registry.records import (
    CANARY,
    LIVE,
    Action,
    Adapter,
    Canary,
    Event,
    Version,
    VersionState,
    Warned,
    Who,
)


def adapter_id(db: sqlite3.Connection, base_model: str, name: AdapterName) -> int | None:
    row = db.execute(
        "SELECT id FROM adapters WHERE base_model = ? AND tenant = ? AND name = ?",
        (base_model, name.tenant, name.name),
    ).fetchone()
    return None if row is None else int(row["id"])


def key(db: sqlite3.Connection, base_model: str, name: AdapterName) -> int:
    """Raises `adapter.not_found`."""
    found = adapter_id(db, base_model, name)
    if found is None:
        raise no_adapter(str(name))
    return found


def all_adapters(db: sqlite3.Connection, base_model: str) -> list[Adapter]:
    """Every adapter of a base model that has a version, in four queries."""
    versions: dict[int, list[sqlite3.Row]] = {}
    for row in db.execute(f"{_VERSIONS} AND a.base_model = ? ORDER BY v.id", (base_model,)):
        versions.setdefault(row["adapter_id"], []).append(row)
    live = {row["adapter_id"]: row for row in db.execute(_ALIAS, (LIVE,))}
    canary = {row["adapter_id"]: row for row in db.execute(_ALIAS, (CANARY,))}
    rows = db.execute("SELECT * FROM adapters WHERE base_model = ?", (base_model,))
    return [
        _adapter(r, versions[r["id"]], live.get(r["id"]), canary.get(r["id"]))
        for r in rows
        if r["id"] in versions
    ]


def one_adapter(db: sqlite3.Connection, key: int) -> Adapter:
    row = db.execute("SELECT * FROM adapters WHERE id = ?", (key,)).fetchone()
    versions = db.execute(f"{_VERSIONS} AND a.id = ? ORDER BY v.id", (key,)).fetchall()
    live, canary = (
        db.execute(f"{_ALIAS} AND l.adapter_id = ?", (alias, key)).fetchone()
        for alias in (LIVE, CANARY)
    )
    return _adapter(row, versions, live, canary)


def version_by(
    db: sqlite3.Connection, key: int, *, label: str | None = None, digest: str | None = None
) -> sqlite3.Row | None:
    """A version of one adapter by label or by digest, retired ones too."""
    column, value = ("label", label) if label is not None else ("digest", digest)
    found: sqlite3.Row | None = db.execute(
        f"SELECT label, digest, state FROM versions WHERE adapter_id = ? AND {column} = ?",
        (key, value),
    ).fetchone()
    return found


def events(db: sqlite3.Connection, key: int, *, newest: int) -> list[Event]:
    """The last changes of one adapter, newest first."""
    rows = db.execute(f"{_EVENTS} WHERE e.adapter_id = ? ORDER BY e.id DESC LIMIT ?", (key, newest))
    return [_event(row) for row in rows]


def events_after(db: sqlite3.Connection, base_model: str, after: int, most: int) -> list[Event]:
    """Changes of every adapter of a base model, oldest first."""
    rows = db.execute(
        f"{_EVENTS} WHERE a.base_model = ? AND e.id > ? ORDER BY e.id LIMIT ?",
        (base_model, after, most),
    )
    return [_event(row) for row in rows]


def last_event(db: sqlite3.Connection) -> int:
    """Id of the newest event, 0 before the first."""
    return int(db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0])


def live_moves(db: sqlite3.Connection, key: int) -> list[Event]:
    """Every move of the live alias, oldest first."""
    rows = db.execute(
        f"{_EVENTS} WHERE e.adapter_id = ? AND e.alias = ? ORDER BY e.id", (key, LIVE)
    )
    return [_event(row) for row in rows]


_VERSIONS = """
SELECT v.*, a.tenant, a.name FROM versions v JOIN adapters a ON a.id = v.adapter_id
WHERE v.state != 'retired'"""

_EVENTS = """
SELECT e.*, a.tenant, a.name FROM events e JOIN adapters a ON a.id = e.adapter_id"""

_ALIAS = """
SELECT l.adapter_id, l.since, l.percent, l.auto_rollback, v.label
FROM aliases l JOIN versions v ON v.id = l.version_id
WHERE l.alias = ?"""


def _adapter(
    row: sqlite3.Row,
    versions: list[sqlite3.Row],
    live: sqlite3.Row | None,
    canary: sqlite3.Row | None,
) -> Adapter:
    return Adapter(
        name=AdapterName(row["tenant"], row["name"]),
        generation=row["generation"],
        created_at=row["created_at"],
        versions={v["label"]: _version(v) for v in versions},
        live=live["label"] if live else None,
        live_since=live["since"] if live else None,
        canary=_canary(canary) if canary else None,
    )


def _canary(row: sqlite3.Row) -> Canary:
    return Canary(row["label"], row["percent"], bool(row["auto_rollback"]), row["since"])


def _version(row: sqlite3.Row) -> Version:
    return Version(
        ref=AdapterRef(AdapterName(row["tenant"], row["name"]), row["label"], row["digest"]),
        state=VersionState(row["state"]),
        failure=row["failure"],
        pinned=bool(row["pinned"]),
        config_bytes=row["config_bytes"],
        weights_bytes=row["weights_bytes"],
        rank=row["max_rank"],
        modules=row["modules"],
        targets=tuple(json.loads(row["targets"])),
        warnings=tuple(Warned(*pair) for pair in json.loads(row["warnings"])),
        trained_on=row["trained_on"],
        message=row["message"],
        created_at=row["created_at"],
        created_by=Who(row["created_uid"], row["created_pid"]),
    )


def _event(row: sqlite3.Row) -> Event:
    return Event(
        id=row["id"],
        name=AdapterName(row["tenant"], row["name"]),
        at=row["at"],
        who=Who(row["uid"], row["pid"]),
        action=Action(row["action"]),
        from_version=row["from_version"],
        to_version=row["to_version"],
        generation=row["generation"],
        reason=row["reason"],
        percent=row["percent"],
    )
