"""The SQL of every change. Each function runs inside the caller's transaction."""

from __future__ import annotations

import json
import sqlite3
import time

from lorad.registry import rows
from lorad.registry.push import Decision, Incoming, label_number, new_version
from lorad.registry.records import CANARY, LIVE, Action, Canary, Version, Who


def record(
    db: sqlite3.Connection,
    key: int,
    action: Action,
    who: Who,
    reason: str,
    from_version: str | None,
    to_version: str | None,
    *,
    moves_live: bool = False,
    percent: float | None = None,
) -> None:
    """Write the row of the history that belongs to a change."""
    db.execute(
        "INSERT INTO events (adapter_id, at, uid, pid, action, alias, from_version, to_version,"
        " generation, reason, percent) SELECT ?, ?, ?, ?, ?, ?, ?, ?, generation, ?, ?"
        " FROM adapters WHERE id = ?",
        (
            key,
            time.time(),
            who.uid,
            who.pid,
            action,
            LIVE if moves_live else None,
            from_version,
            to_version,
            reason,
            percent,
            key,
        ),
    )


def record_push(db: sqlite3.Connection, incoming: Incoming, decision: Decision) -> None:
    """Write a new version, or bring a failed or retired one back, with its event."""
    key = _adapter_key(db, incoming)
    if decision.outcome == "restored":
        _restore(db, key, incoming, decision.label)
        action = Action.RESTORE
    else:
        _insert(db, key, new_version(incoming, decision.label))
        action = Action.PUSH
    record(db, key, action, incoming.who, incoming.message, None, decision.label)


def move_live(db: sqlite3.Connection, key: int, label: str | None) -> None:
    """Point `live` at a version, or at nothing."""
    db.execute("DELETE FROM aliases WHERE adapter_id = ? AND alias = ?", (key, LIVE))
    if label is not None:
        db.execute(
            "INSERT INTO aliases (adapter_id, alias, version_id, since)"
            " SELECT adapter_id, ?, id, ? FROM versions WHERE adapter_id = ? AND label = ?",
            (LIVE, time.time(), key, label),
        )


def next_generation(db: sqlite3.Connection, key: int) -> int:
    """Count one change of the adapter's aliases; returns the new generation."""
    row = db.execute(
        "UPDATE adapters SET generation = generation + 1 WHERE id = ? RETURNING generation", (key,)
    ).fetchone()
    return int(row["generation"])


def set_canary(
    db: sqlite3.Connection, key: int, label: str, percent: float, auto_rollback: bool
) -> None:
    """A canary of the same version keeps its beginning when only its share changes."""
    db.execute(
        "INSERT INTO aliases (adapter_id, alias, version_id, since, percent, auto_rollback)"
        " SELECT adapter_id, ?, id, ?, ?, ? FROM versions WHERE adapter_id = ? AND label = ?"
        " ON CONFLICT DO UPDATE SET percent = excluded.percent,"
        " auto_rollback = excluded.auto_rollback,"
        " since = iif(version_id = excluded.version_id, since, excluded.since),"
        " version_id = excluded.version_id",
        (CANARY, time.time(), percent, auto_rollback, key, label),
    )


def clear_canary(db: sqlite3.Connection, key: int, canary: Canary, who: Who, reason: str) -> None:
    db.execute("DELETE FROM aliases WHERE adapter_id = ? AND alias = ?", (key, CANARY))
    record(db, key, Action.CANARY_END, who, reason, canary.version, None)


def retire_version(db: sqlite3.Connection, key: int, label: str) -> None:
    db.execute(
        "UPDATE versions SET state = 'retired', failure = '' WHERE adapter_id = ? AND label = ?",
        (key, label),
    )


def set_pinned(db: sqlite3.Connection, key: int, label: str, pinned: bool) -> None:
    db.execute(
        "UPDATE versions SET pinned = ? WHERE adapter_id = ? AND label = ?", (pinned, key, label)
    )


def mark_failed(db: sqlite3.Connection, key: int, label: str, failure: str) -> None:
    """The version's files are gone or altered: it is not served until they are restored."""
    db.execute(
        "UPDATE versions SET state = 'failed', failure = ? WHERE adapter_id = ? AND label = ?",
        (failure, key, label),
    )
    record(db, key, Action.FAIL, Who.daemon(), failure, None, label)


def mark_recovered(db: sqlite3.Connection, key: int, label: str) -> None:
    db.execute(
        "UPDATE versions SET state = 'available', failure = '' WHERE adapter_id = ? AND label = ?",
        (key, label),
    )
    record(db, key, Action.RECOVER, Who.daemon(), "", None, label)


def _adapter_key(db: sqlite3.Connection, incoming: Incoming) -> int:
    base_model, name = incoming.base_model, incoming.name
    db.execute(
        "INSERT OR IGNORE INTO adapters (base_model, tenant, name, created_at) VALUES (?, ?, ?, ?)",
        (base_model, name.tenant, name.name, time.time()),
    )
    return rows.key(db, base_model, name)


def _restore(db: sqlite3.Connection, key: int, incoming: Incoming, label: str) -> None:
    """The sizes are taken anew: equal content may be spaced differently in its JSON."""
    db.execute(
        "UPDATE versions SET state = 'available', failure = '', config_bytes = ?,"
        " weights_bytes = ? WHERE adapter_id = ? AND label = ?",
        (*incoming.sizes, key, label),
    )


def _insert(db: sqlite3.Connection, key: int, version: Version) -> None:
    values = {
        "adapter_id": key,
        "label": version.label,
        "digest": version.ref.digest,
        "state": version.state,
        "config_bytes": version.config_bytes,
        "weights_bytes": version.weights_bytes,
        "max_rank": version.rank,
        "modules": version.modules,
        "targets": json.dumps(version.targets),
        "warnings": json.dumps([(w.code, w.message) for w in version.warnings]),
        "trained_on": version.trained_on,
        "message": version.message,
        "created_at": version.created_at,
        "created_uid": version.created_by.uid,
        "created_pid": version.created_by.pid,
    }
    marks = ", ".join("?" * len(values))
    db.execute(
        f"INSERT INTO versions ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
    )
    db.execute(
        "UPDATE adapters SET next_number = max(next_number, ?) WHERE id = ?",
        (label_number(version.label) + 1, key),
    )
