"""The registry in memory: what a request is resolved against, without SQL or a lock.

A catalog is never changed. A mutation makes a new one and swaps the reference, so a reader
sees one state or the other and nothing between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lorad.adapter_ref import AdapterName, AdapterRef, split_version
from lorad.errors import LoradError
from lorad.registry.records import Adapter, LiveAdapter, Version
from lorad.registry.sticky import takes

_SHOWN = 80  # characters of a client's string that an error repeats


class Catalog:
    def __init__(self, adapters: Mapping[AdapterName, Adapter]) -> None:
        self._adapters = adapters

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def __len__(self) -> int:
        return len(self._adapters)

    def replaced(self, adapter: Adapter) -> Catalog:
        """A new catalog with this adapter as it is now; one without versions disappears."""
        adapters = dict(self._adapters)
        adapters.pop(adapter.name, None)
        if adapter.versions:
            adapters[adapter.name] = adapter
        return Catalog(adapters)

    def find(self, name: AdapterName) -> Adapter | None:
        return self._adapters.get(name)

    def adapter(self, name: AdapterName) -> Adapter:
        """Raises `adapter.not_found`."""
        found = self._adapters.get(name)
        if found is None:
            raise no_adapter(str(name))
        return found

    def is_live(self, ref: AdapterRef) -> bool:
        found = self._adapters.get(ref.name)
        return found is not None and found.live == ref.version

    def is_canary(self, ref: AdapterRef) -> bool:
        found = self._adapters.get(ref.name)
        return bool(found and found.canary and found.canary.version == ref.version)

    def live_version(self, name: AdapterName) -> Version | None:
        """None too for a name that does not exist."""
        found = self._adapters.get(name)
        return found.live_version if found else None

    def version(self, name: AdapterName, label: str) -> Version:
        """Raises `adapter.not_found` or `version.not_found`; a failed version is returned."""
        adapter = self.adapter(name)
        found = adapter.versions.get(label)
        if found is None:
            raise _no_version(adapter, label)
        return found

    def at_generation(self, name: AdapterName, expected: int | None) -> Adapter:
        """Raises `generation.changed` when `expected` is given and is not the present one."""
        adapter = self.adapter(name)
        if expected is not None and expected != adapter.generation:
            raise LoradError(
                "generation.changed",
                f"{str(name)!r} is at generation {adapter.generation}, not {expected}: "
                f"its live version is now {adapter.live or 'none'}",
                hint="look at it again (`loractl show`), then decide again",
                details={"generation": adapter.generation, "live": adapter.live},
            )
        return adapter

    def resolve(self, model: str, sticky: str | None = None) -> AdapterRef:
        """`name`, `tenant/name` (= live) or either with `@label` to an immutable reference.

        `sticky` names the caller: while the adapter has a canary, a caller among its percent
        gets the canary instead of the live version. None always gets the live one.
        Raises `adapter.not_found`, `version.not_found`, or `version.failed` for a version
        whose files are damaged. What cannot be a name is not found either.
        """
        try:
            name, label = split_version(model)
        except LoradError:
            raise no_adapter(model) from None
        version = self.version(name, label) if label else _chosen(self.adapter(name), sticky)
        if not version.servable:
            raise version_failed(version)
        return version.ref

    def live(self) -> list[LiveAdapter]:
        """Every adapter whose bare name answers, by name."""
        found = [
            LiveAdapter(version.ref, adapter.live_since or adapter.created_at)
            for adapter in self
            if (version := adapter.live_version) and version.servable
        ]
        return sorted(found, key=lambda entry: entry.ref.name)


def _chosen(adapter: Adapter, sticky: str | None) -> Version:
    """The canary for its share of the callers, as long as it can be served; else live."""
    live, canary = _live(adapter), adapter.canary
    if canary is None or sticky is None:
        return live
    version = adapter.versions[canary.version]
    return version if version.servable and takes(canary, version.ref.digest, sticky) else live


def version_failed(version: Version) -> LoradError:
    return LoradError(
        "version.failed",
        f"{version.ref} cannot be served: {version.failure}",
        hint="push the same content again to restore it, or roll back to another version",
        details={"adapter": str(version.ref.name), "version": version.label},
    )


def no_adapter(model: str) -> LoradError:
    return LoradError(
        "adapter.not_found",
        f"there is no adapter {model[:_SHOWN]!r}",
        hint="`loractl list` shows the adapters of this daemon",
        details={"adapter": model[:_SHOWN]},
    )


def _no_version(adapter: Adapter, label: str) -> LoradError:
    return LoradError(
        "version.not_found",
        f"adapter {str(adapter.name)!r} has no version {label[:_SHOWN]!r}",
        hint=f"its newest versions are {', '.join(list(adapter.versions)[-10:])}",
        details={"adapter": str(adapter.name), "version": label[:_SHOWN]},
    )


def _live(adapter: Adapter) -> Version:
    if adapter.live_version is None:
        name, newest = str(adapter.name), adapter.newest.label
        raise LoradError(
            "adapter.not_found",
            f"adapter {name!r} has no live version",
            hint=f"`loractl promote {name} {newest}` makes its newest version live; "
            f"{name}@{newest} asks for it before that",
            details={"adapter": name},
        )
    return adapter.live_version
