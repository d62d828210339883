"""The registry: which adapters, versions and live pointers there are, and every change to them.

Reads come from an immutable catalog in memory. A change is one SQL transaction together with
its row in the history, and then the swap of the catalog; both happen under one lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import PeftAdapter, adapter_digest
from lorad.errors import LoradError
from lorad.registry import changes, rows
from lorad.registry.catalog import Catalog, version_failed
from lorad.registry.database import Database
from lorad.registry.integrity import damage
from lorad.registry.push import Incoming, decide, new_version
from lorad.registry.reconcile import reconcile, refuse_lost_database
from lorad.registry.records import (
    Action,
    Adapter,
    Event,
    LiveAdapter,
    Move,
    Pushed,
    Version,
    Who,
)
from lorad.registry.store import VersionStore, file_sizes
from lorad.registry.timeline import previous_live
from lorad.wire import ROUTE_WORDS

CheckAdapter = Callable[[Path], PeftAdapter]


class Registry:
    """Adapters of one base model; thread-safe; opened once, by the daemon.

    Every method that changes something takes `who` asked for it, and raises before anything
    has changed or not at all.
    """

    def __init__(
        self, database: Database, store: VersionStore, base_model: str, check: CheckAdapter
    ) -> None:
        self.base_model = base_model
        self._database = database
        self._store = store
        self._check = check
        with database.reading() as db:
            adapters = rows.all_adapters(db, base_model)
        self._catalog = Catalog({adapter.name: adapter for adapter in adapters})

    @classmethod
    def open(
        cls, state: Path, base_model: str, check: CheckAdapter, *, store: Path | None = None
    ) -> Registry:
        """Open or create the registry in `state`; the version store is `state/store` by default.

        `check` reads an adapter directory against the base model and raises LoradError for
        one that would be served wrong. What an earlier process left half done is cleared up.
        Raises `daemon.already_running`, `store.unavailable`, `store.no_space`.
        """
        database = Database(state)
        try:
            files = VersionStore(store or state / "store", base_model)
            refuse_lost_database(database, files)
            database.migrate()
            reconcile(database, files, base_model)
            return cls(database, files, base_model, check)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        self._database.close()

    # --- reading: no SQL, except the history -------------------------------------------------

    def resolve(self, model: str) -> AdapterRef:
        """What a request's model field means now; see Catalog.resolve for the errors."""
        return self._catalog.resolve(model)

    def live_adapters(self) -> list[LiveAdapter]:
        return self._catalog.live()

    def adapters(self) -> list[Adapter]:
        return sorted(self._catalog, key=lambda adapter: adapter.name)

    def adapter(self, name: AdapterName) -> Adapter:
        """Raises `adapter.not_found`."""
        return self._catalog.adapter(name)

    def version(self, name: AdapterName, label: str) -> Version:
        """Raises `adapter.not_found` or `version.not_found`."""
        return self._catalog.version(name, label)

    def is_live(self, ref: AdapterRef) -> bool:
        return self._catalog.is_live(ref)

    def live_version(self, name: AdapterName) -> Version | None:
        """The version a bare name stands for, servable or not; None when there is none."""
        return self._catalog.live_version(name)

    def pinned(self) -> list[AdapterRef]:
        """What the daemon loads when it starts, and keeps loaded."""
        versions = (version for adapter in self._catalog for version in adapter.versions.values())
        return [version.ref for version in versions if version.pinned and version.servable]

    def directory(self, ref: AdapterRef) -> Path:
        """Where the two files of a version are."""
        return self._store.directory(ref.name, ref.version)

    def history(self, name: AdapterName, *, newest: int = 100) -> list[Event]:
        """The last changes of an adapter, newest first; also of one that was deleted."""
        with self._database.reading() as db:
            return rows.events(db, self._key(name), newest=newest)

    def rollback_target(self, name: AdapterName) -> Version:
        """The version that was live before; `rollback.no_previous` when there is none."""
        with self._database.reading() as db:
            adapter = self._catalog.adapter(name)
            servable = {label for label, v in adapter.versions.items() if v.servable}
            label = previous_live(rows.live_moves(db, self._key(name)), servable)
        if label is None:
            raise LoradError(
                "rollback.no_previous",
                f"no earlier live version of {str(name)!r} can be served",
                hint=f"name one: --to LABEL, of {', '.join(list(adapter.versions)[-10:])}",
                details={"adapter": str(name)},
            )
        return adapter.versions[label]

    # --- pushing -----------------------------------------------------------------------------

    def check_name(self, name: AdapterName) -> None:
        """Refuse, with `name.reserved`, a name that something else already means."""
        base = self.base_model.lower()
        if base in (str(name), name.qualified):
            reason = "it is the base model's id"
        elif name.name in ROUTE_WORDS:
            reason = "it is a word of the admin API's paths"
        else:
            return
        raise LoradError(
            "name.reserved",
            f"no adapter can be called {str(name)!r}: {reason}",
            hint="choose another name",
            details={"name": str(name)},
        )

    def stage(self) -> Path:
        """A private directory to put the two files into, for `commit` or `discard`."""
        return self._store.stage()

    def discard(self, staged: Path) -> None:
        self._store.discard(staged)

    def push(
        self,
        directory: Path,
        name: AdapterName,
        *,
        who: Who,
        label: str | None = None,
        message: str = "",
        dry_run: bool = False,
    ) -> Pushed:
        """Push a directory that this process can read. The arguments and errors of `commit`."""
        self.check_name(name)
        try:
            staged = self._store.stage_copy(directory)
        except LoradError:
            self._check(directory)  # knows better what such a directory lacks
            raise
        return self.commit(staged, name, who=who, label=label, message=message, dry_run=dry_run)

    def commit(
        self,
        staged: Path,
        name: AdapterName,
        *,
        who: Who,
        label: str | None = None,
        message: str = "",
        dry_run: bool = False,
    ) -> Pushed:
        """Turn a staged directory into a version; the staged directory is gone afterwards.

        The same content gives the same version again (`unchanged`). Raises what `check` finds
        wrong with the adapter, and `version.exists` when the label or the content belongs to
        another version. Reads every byte: not for an event loop.
        """
        try:
            self.check_name(name)
            checked = self._check(staged)
            incoming = Incoming(
                base_model=self.base_model,
                name=name,
                label=label,
                digest=adapter_digest(staged),
                checked=checked,
                sizes=file_sizes(staged),
                who=who,
                message=message,
            )
            with self._database.lock:
                return self._take_in(staged, incoming, dry_run)
        finally:
            self._store.discard(staged)

    def _take_in(self, staged: Path, incoming: Incoming, dry_run: bool) -> Pushed:
        with self._database.reading() as db:
            decision = decide(db, incoming)
        name, label = incoming.name, decision.label
        if decision.outcome == "unchanged":
            return Pushed("unchanged", self.version(name, label))
        if dry_run:
            return Pushed(decision.outcome, new_version(incoming, label))
        try:
            with self._database.transaction() as db:
                changes.record_push(db, incoming, decision)
                self._store.publish(staged, name, label)
        except BaseException:
            with suppress(LoradError):  # what is left, the next start removes
                self._store.remove(name, label)
            raise
        self._refresh(name)
        return Pushed(decision.outcome, self.version(name, label))

    # --- moving the live pointer -------------------------------------------------------------

    def promote(
        self,
        name: AdapterName,
        label: str,
        *,
        who: Who,
        reason: str = "",
        expected_generation: int | None = None,
    ) -> Move:
        """Make a version live. `generation.changed` when the pointer moved meanwhile."""
        return self._move(Action.PROMOTE, name, label, who, reason, expected_generation)

    def rollback(
        self,
        name: AdapterName,
        label: str,
        *,
        who: Who,
        reason: str = "",
        expected_generation: int | None = None,
    ) -> Move:
        """Like promote, but the versions that were live since are taken back."""
        return self._move(Action.ROLLBACK, name, label, who, reason, expected_generation)

    def retire(
        self,
        name: AdapterName,
        *,
        who: Who,
        reason: str = "",
        expected_generation: int | None = None,
    ) -> Move:
        """Let the bare name answer no more; the versions stay and can be promoted again."""
        return self._move(Action.RETIRE, name, None, who, reason, expected_generation)

    def check_generation(self, name: AdapterName, expected: int | None) -> Adapter:
        """Raises `generation.changed` when `expected` is given and is not the present one."""
        adapter = self._catalog.adapter(name)
        if expected is not None and expected != adapter.generation:
            raise LoradError(
                "generation.changed",
                f"{str(name)!r} is at generation {adapter.generation}, not {expected}: "
                f"its live version is now {adapter.live or 'none'}",
                hint="look at it again (`loractl show`), then decide again",
                details={"generation": adapter.generation, "live": adapter.live},
            )
        return adapter

    def _move(
        self,
        action: Action,
        name: AdapterName,
        label: str | None,
        who: Who,
        reason: str,
        expected: int | None,
    ) -> Move:
        with self._database.lock:
            adapter = self.check_generation(name, expected)
            if label is not None and not (version := self.version(name, label)).servable:
                raise version_failed(version)
            if adapter.live == label:
                return Move(name, label, label, adapter.generation, changed=False)
            with self._database.transaction() as db:
                generation = changes.move_live(db, self._key(name), adapter, label)
                changes.record(
                    db, self._key(name), action, who, reason, adapter.live, label, moves_live=True
                )
            self._refresh(name)
            return Move(name, adapter.live, label, generation, changed=True)

    # --- the other changes -------------------------------------------------------------------

    def check_deletable(self, name: AdapterName, label: str) -> Version:
        """Raises `version.live` or `version.pinned` for a version that something refers to."""
        version = self.version(name, label)
        if self.is_live(version.ref):
            raise LoradError(
                "version.live",
                f"{version.ref} is the live version of {str(name)!r}",
                hint="promote another version first",
                details={"adapter": str(name), "version": label},
            )
        if version.pinned:
            raise LoradError(
                "version.pinned",
                f"{version.ref} is pinned",
                hint=f"`loractl unpin {name}@{label}` first",
                details={"adapter": str(name), "version": label},
            )
        return version

    def delete(self, name: AdapterName, label: str, *, who: Who, reason: str = "") -> Version:
        """Delete one version and its files; the label is never given to other content."""
        with self._database.lock:
            version = self.check_deletable(name, label)
            with self._database.transaction() as db:
                changes.retire_version(db, self._key(name), label)
                changes.record(db, self._key(name), Action.DELETE, who, reason, label, None)
            self._refresh(name)
            self._store.remove(name, label)
            return version

    def set_pinned(self, name: AdapterName, label: str, pinned: bool, *, who: Who) -> bool:
        """Remember that a version is to stay loaded; returns whether that changed anything."""
        with self._database.lock:
            version = self.version(name, label)
            if version.pinned == pinned:
                return False
            if pinned and not version.servable:
                raise version_failed(version)
            with self._database.transaction() as db:
                changes.set_pinned(db, self._key(name), label, pinned)
                action = Action.PIN if pinned else Action.UNPIN
                changes.record(db, self._key(name), action, who, "", None, label)
            self._refresh(name)
            return True

    def verify(self, ref: AdapterRef) -> Path:
        """Read a version's files whole and return its directory if they have its digest.

        Otherwise the version is marked failed, and `store.digest_mismatch` is raised; or
        `store.unavailable`, when they cannot be read just now. Reads every byte: for the
        thread that loads.
        """
        failure = damage(self._store, self.version(ref.name, ref.version))
        if failure:
            self._mark_failed(ref, failure)
            raise LoradError(
                "store.digest_mismatch",
                f"the stored files of {ref} are not what was pushed: {failure}",
                hint="push the same content again to restore it, or roll back",
                details={"adapter": str(ref.name), "version": ref.version},
            )
        return self.directory(ref)

    def _mark_failed(self, ref: AdapterRef, failure: str) -> None:
        with self._database.lock:
            version = self.version(ref.name, ref.version)
            if version.ref != ref or not version.servable:
                return
            with self._database.transaction() as db:
                changes.mark_failed(db, self._key(ref.name), ref.version, failure)
            self._refresh(ref.name)

    def _key(self, name: AdapterName) -> int:
        with self._database.reading() as db:
            return rows.key(db, self.base_model, name)

    def _refresh(self, name: AdapterName) -> None:
        """Take the adapter's new rows into the catalog; runs under the lock."""
        with self._database.reading() as db:
            adapter = rows.one_adapter(db, self._key(name))
        self._catalog = self._catalog.replaced(adapter)
