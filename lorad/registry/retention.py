"""Which versions a garbage collection may delete."""

from __future__ import annotations

from lorad.registry.records import Adapter


def superseded(adapter: Adapter, keep: int, rollback_target: str | None) -> list[str]:
    """Labels beyond the newest `keep`, oldest first, that nothing refers to.

    The live version, the canary, pinned versions and the one that a rollback would go to
    stay, however old they are.
    """
    referred = {adapter.live, rollback_target, adapter.canary and adapter.canary.version}
    old = list(adapter.versions.values())[: max(0, len(adapter.versions) - keep)]
    return [v.label for v in old if v.label not in referred and not v.pinned]
