"""A version that takes a share of a name's requests before it is promoted."""

from __future__ import annotations

from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry import changes
from lorad.registry.catalog import version_failed
from lorad.registry.ledger import Ledger
from lorad.registry.records import Action, Adapter, Canary, CanaryMove, Version, Who


class Canaries:
    """Begins and ends canaries; the registry's other changes of `live` end them too."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def check(self, name: AdapterName, label: str) -> Version:
        """The version, if it can be a canary; `canary.no_live`, `version.live` or `.failed`."""
        adapter = self._ledger.catalog.adapter(name)
        version = self._ledger.catalog.version(name, label)
        if adapter.live is None:
            raise LoradError(
                "canary.no_live",
                f"{str(name)!r} has no live version beside which {label} could be tried",
                hint=f"`loractl promote {name} {label}` makes it live",
                details={"adapter": str(name)},
            )
        if adapter.live == label:
            raise LoradError(
                "version.live",
                f"{version.ref} is live already: it takes every request",
                hint="try another version",
                details={"adapter": str(name), "version": label},
            )
        if not version.servable:
            raise version_failed(version)
        return version

    def begin(
        self,
        name: AdapterName,
        label: str,
        percent: float,
        *,
        who: Who,
        auto_rollback: bool = False,
        reason: str = "",
        expected_generation: int | None = None,
    ) -> CanaryMove:
        """Give `percent` of the bare name's requests to a version, instead of any other canary."""
        with self._ledger.lock:
            adapter = self._ledger.catalog.at_generation(name, expected_generation)
            self.check(name, label)
            before = adapter.canary
            if before and (before.version, before.percent, before.auto_rollback) == (
                label,
                percent,
                auto_rollback,
            ):
                return _unmoved(adapter)
            with self._ledger.changing(name) as db:
                key = self._ledger.key(name)
                changes.set_canary(db, key, label, percent, auto_rollback)
                generation = changes.next_generation(db, key)
                changes.record(
                    db,
                    key,
                    Action.CANARY,
                    who,
                    reason,
                    before.version if before else None,
                    label,
                    percent=percent,
                )
            return CanaryMove(name, before, self._canary(name), generation, changed=True)

    def end(
        self,
        name: AdapterName,
        *,
        who: Who,
        reason: str = "",
        expected_generation: int | None = None,
        version: str | None = None,
    ) -> CanaryMove:
        """All requests go to the live version again. `version`: only if that is the canary."""
        with self._ledger.lock:
            adapter = self._ledger.catalog.at_generation(name, expected_generation)
            before = adapter.canary
            if before is None or version not in (None, before.version):
                return _unmoved(adapter)
            with self._ledger.changing(name) as db:
                key = self._ledger.key(name)
                changes.clear_canary(db, key, before, who, reason)
                generation = changes.next_generation(db, key)
            return CanaryMove(name, before, None, generation, changed=True)

    def _canary(self, name: AdapterName) -> Canary | None:
        return self._ledger.catalog.adapter(name).canary


def _unmoved(adapter: Adapter) -> CanaryMove:
    canary = adapter.canary
    return CanaryMove(adapter.name, canary, canary, adapter.generation, changed=False)
