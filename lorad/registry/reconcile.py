"""What a start clears up: files without a row, rows without their files."""

from __future__ import annotations

import logging
from pathlib import Path

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import adapter_digest
from lorad.errors import LoradError
from lorad.registry import changes, rows
from lorad.registry.database import Database
from lorad.registry.records import Adapter, Version
from lorad.registry.store import VersionStore

log = logging.getLogger("lorad.registry")


def reconcile(database: Database, store: VersionStore, base_model: str) -> None:
    """Make database and store agree after whatever ended the process before.

    Sizes alone are compared here, so that a thousand adapters cost a few milliseconds; the
    digest is checked when a version is loaded.
    """
    with database.reading() as db:
        adapters = rows.all_adapters(db, base_model)
    if removed := store.clear_staging():
        log.info("removed %d unfinished uploads", removed)
    for adapter in adapters:
        _reconcile_adapter(database, store, base_model, adapter)
    _remove_orphans(store, {a.name: set(a.versions) for a in adapters})


def content_failure(directory: Path, digest: str) -> str:
    """Why a directory does not hold the content of a digest; "" when it does."""
    try:
        found = adapter_digest(directory)
    except LoradError as error:
        return error.message
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return "" if found == digest else f"their digest is {found}, not {digest}"


def refuse_lost_database(database: Database, store: VersionStore) -> None:
    """An empty database beside a full store means that the database was lost: delete nothing."""
    if database.fresh and any(store.stored()):
        raise LoradError(
            "store.unavailable",
            "the version store holds adapters, but the registry database was missing",
            hint="restore registry.db from a backup, or move the store away and push again",
        )


def _reconcile_adapter(
    database: Database, store: VersionStore, base_model: str, adapter: Adapter
) -> None:
    for label, version in adapter.versions.items():
        sizes = (version.config_bytes, version.weights_bytes)
        damage = store.damage(adapter.name, label, sizes)
        if version.servable and damage:
            log.error("%s cannot be served: %s", version.ref, damage)
            with database.transaction() as db:
                key = rows.key(db, base_model, adapter.name)
                changes.mark_failed(db, key, label, damage)
        elif not version.servable and not damage and _whole(store, version):
            log.info("%s is whole again", version.ref)
            with database.transaction() as db:
                key = rows.key(db, base_model, adapter.name)
                changes.mark_recovered(db, key, label)


def _whole(store: VersionStore, version: Version) -> bool:
    directory = store.directory(version.ref.name, version.label)
    return not content_failure(directory, version.ref.digest)


def _remove_orphans(store: VersionStore, known: dict[AdapterName, set[str]]) -> None:
    """A push that was killed before its commit, or a delete killed before its last step."""
    for name, label in list(store.stored()):
        if label not in known.get(name, set()):
            log.info("removed the files of %s@%s, which is not registered", name, label)
            store.remove(name, label)
