"""What the registry knows, as values: versions, adapters, events, and results of changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from lorad.adapter_ref import AdapterName, AdapterRef

LIVE = "live"  # the alias that a bare name stands for
CANARY = "canary"  # the alias that takes a share of its requests


class VersionState(StrEnum):
    """Of the files of a version. Where its bytes are in memory is the engine's to tell."""

    AVAILABLE = "available"
    FAILED = "failed"  # gone or altered on disk; never served
    RETIRED = "retired"  # deleted; the label is never given to other content


class Action(StrEnum):
    PUSH = "push"
    RESTORE = "restore"  # the content of a failed or retired version was pushed again
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    CANARY = "canary"
    CANARY_END = "canary_end"
    RETIRE = "retire"  # the bare name answers no more; the versions stay
    DELETE = "delete"
    FAIL = "fail"
    RECOVER = "recover"  # the files of a failed version are whole again
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Who:
    """The process that asked for a change, as the kernel names the peer of the socket."""

    uid: int
    pid: int

    @classmethod
    def daemon(cls) -> Who:
        """For changes that the daemon makes by itself."""
        return cls(os.geteuid(), os.getpid())


@dataclass(frozen=True, slots=True)
class Warned:
    """Something worth knowing about an adapter that is served nevertheless."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Version:
    """One immutable version. `rank` is the largest of its modules; sizes are bytes on disk."""

    ref: AdapterRef
    state: VersionState
    failure: str
    pinned: bool
    config_bytes: int
    weights_bytes: int
    rank: int
    modules: int
    targets: tuple[str, ...]
    warnings: tuple[Warned, ...]
    trained_on: str
    message: str
    created_at: float  # seconds since the epoch
    created_by: Who

    @property
    def label(self) -> str:
        return self.ref.version

    @property
    def servable(self) -> bool:
        return self.state is VersionState.AVAILABLE


@dataclass(frozen=True, slots=True)
class Canary:
    """A version that takes `percent` (above 0, at most 100) of the bare name's requests."""

    version: str
    percent: float
    auto_rollback: bool
    since: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter with its versions by label, oldest first; retired ones are left out."""

    name: AdapterName
    generation: int
    created_at: float
    versions: Mapping[str, Version]
    live: str | None = None
    live_since: float | None = None
    canary: Canary | None = None

    @property
    def live_version(self) -> Version | None:
        return self.versions[self.live] if self.live is not None else None

    @property
    def digests(self) -> list[str]:
        """Of the contents of its versions."""
        return [version.ref.digest for version in self.versions.values()]

    @property
    def newest(self) -> Version:
        return list(self.versions.values())[-1]


@dataclass(frozen=True, slots=True)
class LiveAdapter:
    """What `/v1/models` lists."""

    ref: AdapterRef
    since: float

    @property
    def name(self) -> AdapterName:
        return self.ref.name

    @property
    def version(self) -> str:
        return self.ref.version

    @property
    def created_at(self) -> float:
        """Seconds since the epoch: when this version became live."""
        return self.since


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one adapter. `id` only grows: a cursor into the history."""

    id: int
    name: AdapterName
    at: float
    who: Who
    action: Action
    from_version: str | None
    to_version: str | None
    generation: int
    reason: str
    percent: float | None = None  # that a canary got


@dataclass(frozen=True, slots=True)
class Move:
    """Where an alias pointed before and after; `changed` is False when it was there already."""

    name: AdapterName
    from_version: str | None
    to_version: str | None
    generation: int
    changed: bool


@dataclass(frozen=True, slots=True)
class CanaryMove:
    """The canary of a name before and after; `changed` is False when nothing was done."""

    name: AdapterName
    before: Canary | None
    after: Canary | None
    generation: int
    changed: bool


@dataclass(frozen=True, slots=True)
class Pushed:
    """`unchanged`: this content already was that version. `restored`: its files are back."""

    outcome: Literal["created", "restored", "unchanged"]
    version: Version
