"""What a start clears up: files without a row, rows without their files."""

from __future__ import annotations

import logging

from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry import changes, rows
from lorad.registry.database import Database
from lorad.registry.integrity import damage, damage_by_size
from lorad.registry.records import Adapter, Version
from lorad.registry.store import Store

log = logging.getLogger("lorad.registry")


def reconcile(database: Database, store: Store, base_model: str) -> None:
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


def refuse_lost_database(database: Database, store: Store) -> None:
    """An empty database beside a full store means that the database was lost: delete nothing."""
    if database.fresh and any(store.stored()):
        raise LoradError(
            "store.unavailable",
            "the version store holds adapters, but the registry database was missing",
            hint="restore registry.db from a backup, or move the store away and push again",
        )


def _reconcile_adapter(database: Database, store: Store, base_model: str, adapter: Adapter) -> None:
    for label, version in adapter.versions.items():
        lost = damage_by_size(store, version)
        if version.servable and lost:
            log.error("%s cannot be served: %s", version.ref, lost)
            with database.transaction() as db:
                key = rows.key(db, base_model, adapter.name)
                changes.mark_failed(db, key, label, lost)
        elif not version.servable and not lost and _whole(store, version):
            log.info("%s is whole again", version.ref)
            with database.transaction() as db:
                key = rows.key(db, base_model, adapter.name)
                changes.mark_recovered(db, key, label)


def _whole(store: Store, version: Version) -> bool:
    try:
        return not damage(store, version)
    except LoradError:
        return False


def _remove_orphans(store: Store, known: dict[AdapterName, set[str]]) -> None:
    """A push that was killed before its commit, or a delete killed before its last step."""
    for name, label in list(store.stored()):
        if label not in known.get(name, set()):
            log.info("removed the files of %s@%s, which is not registered", name, label)
            store.remove(name, label)
