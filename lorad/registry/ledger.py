"""The database and the catalog that mirrors it, changed together under one lock."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lorad.adapter_ref import AdapterName
from lorad.registry import rows
from lorad.registry.catalog import Catalog
from lorad.registry.database import Database


class Ledger:
    """What the parts of the registry share. `catalog` may be read without the lock."""

    def __init__(self, database: Database, base_model: str) -> None:
        self.base_model = base_model
        self._database = database
        with database.reading() as db:
            adapters = rows.all_adapters(db, base_model)
            self.last_event = rows.last_event(db)
        self.catalog = Catalog({adapter.name: adapter for adapter in adapters})

    @property
    def lock(self) -> threading.RLock:
        return self._database.lock

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._database.reading()

    @contextmanager
    def changing(self, name: AdapterName) -> Iterator[sqlite3.Connection]:
        """One transaction on one adapter; the catalog follows when it has been committed."""
        with self._database.lock:
            with self._database.transaction() as db:
                yield db
            self._refresh(name)

    def key(self, name: AdapterName) -> int:
        """Raises `adapter.not_found`."""
        with self._database.reading() as db:
            return rows.key(db, self.base_model, name)

    def close(self) -> None:
        self._database.close()

    def _refresh(self, name: AdapterName) -> None:
        with self._database.reading() as db:
            adapter = rows.one_adapter(db, rows.key(db, self.base_model, name))
            self.last_event = rows.last_event(db)
        self.catalog = self.catalog.replaced(adapter)
