"""What a push means: a new version, one that is there already, one restored, or a conflict."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import PeftAdapter
from lorad.errors import LoradError
from lorad.registry import rows
from lorad.registry.records import Version, VersionState, Warned, Who

_NUMBERED = re.compile(r"v([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A checked adapter that is to become a version of `name`."""

    base_model: str
    name: AdapterName
    label: str | None  # None: the next free one
    digest: str
    checked: PeftAdapter
    sizes: tuple[int, int]  # bytes of the configuration and of the weights
    who: Who
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    outcome: Literal["created", "restored", "unchanged"]
    label: str


def label_number(label: str) -> int:
    """7 for `v7`; 0 for a label that is not a plain number."""
    match = _NUMBERED.fullmatch(label)
    return int(match[1]) if match else 0


def decide(db: sqlite3.Connection, incoming: Incoming) -> Decision:
    """Raises `version.exists` when the label, or the content, belongs to another version."""
    key = rows.adapter_id(db, incoming.base_model, incoming.name)
    if key is None:
        return Decision("created", incoming.label or "v1")
    same = rows.version_by(db, key, digest=incoming.digest)
    if same is not None:
        return _seen_before(incoming, same["label"], same["state"])
    if incoming.label is None:
        return Decision("created", _next_label(db, key))
    if rows.version_by(db, key, label=incoming.label) is not None:
        raise _exists(incoming, incoming.label, "with other content, and versions never change")
    return Decision("created", incoming.label)


def new_version(incoming: Incoming, label: str) -> Version:
    checked = incoming.checked
    return Version(
        ref=AdapterRef(incoming.name, label, incoming.digest),
        state=VersionState.AVAILABLE,
        failure="",
        pinned=False,
        config_bytes=incoming.sizes[0],
        weights_bytes=incoming.sizes[1],
        rank=checked.max_rank,
        modules=len(checked.modules),
        targets=tuple(checked.targets),
        warnings=tuple(_warnings(checked, incoming.base_model)),
        trained_on=checked.base_model_name or "",
        message=incoming.message,
        created_at=time.time(),
        created_by=incoming.who,
    )


def _warnings(checked: PeftAdapter, base_model: str) -> Iterator[Warned]:
    for finding in checked.warnings:
        yield Warned(finding.code, finding.message)
    trained_on = checked.base_model_name
    if trained_on and _last_part(trained_on) != _last_part(base_model):
        yield Warned(
            "base_name_differs",
            f"it was trained on {trained_on[:200]!r}; the base is {base_model!r}",
        )


def _last_part(model: str) -> str:
    """`org/Name` on the hub and `/models/name` on a disk are most likely the same model."""
    return model.rstrip("/").rpartition("/")[2].lower()


def _seen_before(incoming: Incoming, label: str, state: str) -> Decision:
    if incoming.label not in (None, label):
        raise _exists(incoming, label, f"with this very content; it cannot be {incoming.label} too")
    return Decision("unchanged" if state == VersionState.AVAILABLE else "restored", label)


def _next_label(db: sqlite3.Connection, key: int) -> str:
    row = db.execute("SELECT next_number FROM adapters WHERE id = ?", (key,)).fetchone()
    return f"v{row['next_number']}"


def _exists(incoming: Incoming, label: str, how: str) -> LoradError:
    return LoradError(
        "version.exists",
        f"{incoming.name} already has a version {label} {how}",
        hint="leave the version out to take the next free one",
        details={"adapter": str(incoming.name), "version": label},
    )
