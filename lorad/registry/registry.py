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
from lorad.registry.canaries import Canaries
from lorad.registry.catalog import version_failed
from lorad.registry.database import Database
from lorad.registry.integrity import damage
from lorad.registry.ledger import Ledger
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
from lorad.registry.retention import superseded
from lorad.registry.store import Store, VersionStore, file_sizes
from lorad.registry.timeline import previous_live
from lorad.wire import BASE_WORD, ROUTE_WORDS

CheckAdapter = Callable[[Path], PeftAdapter]


class Registry:
    """Adapters of one base model; thread-safe; opened once, by the daemon.

    Every method that changes something takes `who` asked for it, and raises before anything
    has changed or not at all.
    """

    def __init__(self, ledger: Ledger, store: Store, check: CheckAdapter, state: Path) -> None:
        self.state = state
        self.base_model = ledger.base_model
        self.canaries = Canaries(ledger)
        self._ledger = ledger
        self._store = store
        self._check = check

    @classmethod
    def open(
        cls,
        state: Path,
        base_model: str,
        check: CheckAdapter,
        *,
        store: str = "",
        cache_bytes: int = 16 << 30,
    ) -> Registry:
        """Open or create the registry in `state`.

        `store` is where the versions lie: a directory (`state/store` by default) or
        `s3://bucket/prefix`, of which up to `cache_bytes` are kept on the local disk.

        `check` reads an adapter directory against the base model and raises LoradError for
        one that would be served wrong. What an earlier process left half done is cleared up.
        Raises `daemon.already_running`, `store.unavailable`, `store.no_space`.
        """
        database = Database(state)
        try:
            files = _open_store(store, state, base_model, cache_bytes)
            refuse_lost_database(database, files)
            database.migrate()
            reconcile(database, files, base_model)
            return cls(Ledger(database, base_model), files, check, state)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        self._ledger.close()

    # --- reading: no SQL, except the history -------------------------------------------------

    def resolve(self, model: str, sticky: str | None = None) -> AdapterRef:
        """What a request's model field means now for the caller whom `sticky` names.

        See Catalog.resolve for the share of a canary and for the errors.
        """
        return self._ledger.catalog.resolve(model, sticky)

    def live_adapters(self) -> list[LiveAdapter]:
        return self._ledger.catalog.live()

    def adapters(self) -> list[Adapter]:
        return sorted(self._ledger.catalog, key=lambda adapter: adapter.name)

    def find(self, name: AdapterName) -> Adapter | None:
        return self._ledger.catalog.find(name)

    def adapter(self, name: AdapterName) -> Adapter:
        """Raises `adapter.not_found`."""
        return self._ledger.catalog.adapter(name)

    def version(self, name: AdapterName, label: str) -> Version:
        """Raises `adapter.not_found` or `version.not_found`."""
        return self._ledger.catalog.version(name, label)

    def is_live(self, ref: AdapterRef) -> bool:
        return self._ledger.catalog.is_live(ref)

    def is_canary(self, ref: AdapterRef) -> bool:
        return self._ledger.catalog.is_canary(ref)

    def live_version(self, name: AdapterName) -> Version | None:
        """The version a bare name stands for, servable or not; None when there is none."""
        return self._ledger.catalog.live_version(name)

    def pinned(self) -> list[AdapterRef]:
        """What the daemon loads when it starts, and keeps loaded."""
        versions = (
            version for adapter in self._ledger.catalog for version in adapter.versions.values()
        )
        return [version.ref for version in versions if version.pinned and version.servable]

    def directory(self, ref: AdapterRef) -> Path:
        """A local directory with the two files of a version."""
        version = self.version(ref.name, ref.version)
        sizes = (version.config_bytes, version.weights_bytes)
        return self._store.fetch(ref.name, ref.version, sizes)

    def history(self, name: AdapterName, *, newest: int = 100) -> list[Event]:
        """The last changes of an adapter, newest first; also of one that was deleted."""
        with self._ledger.reading() as db:
            return rows.events(db, self._ledger.key(name), newest=newest)

    @property
    def last_event(self) -> int:
        """Id of the newest event; it grows with every change. No SQL."""
        return self._ledger.last_event

    def events_after(self, cursor: int, *, most: int) -> list[Event]:
        """The changes of all adapters after the event `cursor`, oldest first."""
        with self._ledger.reading() as db:
            return rows.events_after(db, self.base_model, cursor, most)

    def rollback_target(self, name: AdapterName) -> Version:
        """The version that was live before; `rollback.no_previous` when there is none."""
        adapter = self._ledger.catalog.adapter(name)
        label = self._previous_live(adapter)
        if label is None:
            raise LoradError(
                "rollback.no_previous",
                f"no earlier live version of {str(name)!r} can be served",
                hint=f"name one: --to LABEL, of {', '.join(list(adapter.versions)[-10:])}",
                details={"adapter": str(name)},
            )
        return adapter.versions[label]

    def superseded(self, name: AdapterName, *, keep: int) -> list[str]:
        """The versions that a garbage collection would delete; see retention.superseded."""
        adapter = self._ledger.catalog.adapter(name)
        return superseded(adapter, keep, self._previous_live(adapter))

    def _previous_live(self, adapter: Adapter) -> str | None:
        servable = {label for label, version in adapter.versions.items() if version.servable}
        with self._ledger.reading() as db:
            return previous_live(rows.live_moves(db, self._ledger.key(adapter.name)), servable)

    # --- pushing -----------------------------------------------------------------------------

    def check_name(self, name: AdapterName) -> None:
        """Refuse, with `name.reserved`, a name that something else already means."""
        base = self.base_model.lower()
        if base in (str(name), name.qualified):
            reason = "it is the base model's id"
        elif str(name) == BASE_WORD:
            reason = "it stands for the base model in headers, metrics and `loractl top`"
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
            with self._ledger.lock:
                return self._take_in(staged, incoming, dry_run)
        finally:
            self._store.discard(staged)

    def _take_in(self, staged: Path, incoming: Incoming, dry_run: bool) -> Pushed:
        with self._ledger.reading() as db:
            decision = decide(db, incoming)
        name, label = incoming.name, decision.label
        if decision.outcome == "unchanged":
            return Pushed("unchanged", self.version(name, label))
        if dry_run:
            return Pushed(decision.outcome, new_version(incoming, label))
        try:
            with self._ledger.changing(name) as db:
                changes.record_push(db, incoming, decision)
                self._store.publish(staged, name, label)
        except BaseException:
            with suppress(LoradError):  # what is left, the next start removes
                self._store.remove(name, label)
            raise
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
        return self._ledger.catalog.at_generation(name, expected)

    def _move(
        self,
        action: Action,
        name: AdapterName,
        label: str | None,
        who: Who,
        reason: str,
        expected: int | None,
    ) -> Move:
        """Every move of `live` ends a canary: it was compared with what was live before."""
        with self._ledger.lock:
            adapter = self.check_generation(name, expected)
            if label is not None and not (version := self.version(name, label)).servable:
                raise version_failed(version)
            if adapter.live == label:
                return Move(name, label, label, adapter.generation, changed=False)
            with self._ledger.changing(name) as db:
                key = self._ledger.key(name)
                if adapter.canary:
                    changes.clear_canary(db, key, adapter.canary, who, action.value)
                changes.move_live(db, key, label)
                generation = changes.next_generation(db, key)
                changes.record(db, key, action, who, reason, adapter.live, label, moves_live=True)
            return Move(name, adapter.live, label, generation, changed=True)

    # --- the other changes -------------------------------------------------------------------

    def check_deletable(self, name: AdapterName, label: str) -> Version:
        """Raises `version.live`, `.canary` or `.pinned` for one that something refers to."""
        version = self.version(name, label)
        self.check_unreferenced(version)
        return version

    def check_unreferenced(self, version: Version, *, why: str = "", or_else: str = "") -> None:
        """The same; `why` follows what refers to it, `or_else` the hint how to end that."""
        ref, name = version.ref, str(version.ref.name)
        if self.is_live(ref):
            code, what = "version.live", f"the live version of {name!r}{why}"
            hint = "promote another version first"
        elif self.is_canary(ref):
            code, what = "version.canary", f"the canary of {name!r}{why}"
            hint = f"`loractl canary {name} --off` first"
        elif version.pinned:
            code, what, hint = (
                "version.pinned",
                "pinned",
                f"`loractl unpin {name}@{ref.version}` first",
            )
        else:
            return
        details = {"adapter": name, "version": ref.version}
        raise LoradError(code, f"{ref} is {what}", hint=hint + or_else, details=details)

    def delete(self, name: AdapterName, label: str, *, who: Who, reason: str = "") -> Version:
        """Delete one version and its files; the label is never given to other content."""
        with self._ledger.lock:
            version = self.check_deletable(name, label)
            with self._ledger.changing(name) as db:
                key = self._ledger.key(name)
                changes.retire_version(db, key, label)
                changes.record(db, key, Action.DELETE, who, reason, label, None)
            self._store.remove(name, label)
            return version

    def set_pinned(self, name: AdapterName, label: str, pinned: bool, *, who: Who) -> bool:
        """Remember that a version is to stay loaded; returns whether that changed anything."""
        with self._ledger.lock:
            version = self.version(name, label)
            if version.pinned == pinned:
                return False
            if pinned and not version.servable:
                raise version_failed(version)
            with self._ledger.changing(name) as db:
                key = self._ledger.key(name)
                changes.set_pinned(db, key, label, pinned)
                action = Action.PIN if pinned else Action.UNPIN
                changes.record(db, key, action, who, "", None, label)
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
                f"{ref} is not what was pushed: {failure}",
                hint="push the same content again to restore it, or roll back",
                details={"adapter": str(ref.name), "version": ref.version},
            )
        return self.directory(ref)

    def _mark_failed(self, ref: AdapterRef, failure: str) -> None:
        with self._ledger.lock:
            version = self.version(ref.name, ref.version)
            if version.ref != ref or not version.servable:
                return
            with self._ledger.changing(ref.name) as db:
                changes.mark_failed(db, self._ledger.key(ref.name), ref.version, failure)


def _open_store(store: str, state: Path, base_model: str, cache_bytes: int) -> Store:
    if not store.startswith("s3://"):
        return VersionStore(Path(store).expanduser() if store else state / "store", base_model)
    from lorad.registry.bucket import BucketStore

    return BucketStore(store, base_model, state / "bucket", cache_bytes)
