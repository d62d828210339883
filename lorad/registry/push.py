"""What a push means: a new version, one that is there already, one restored, or a conflict."""

from __future__ import annotations

import re
import sqlite3
import time
from dataclasses import dataclass
from typing import Literal

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import PeftAdapter
from lorad.errors import LoradError
from lorad.registry import rows
from lorad.registry.records import Version, VersionState, Who

_NUMBERED = re.compile(r"v([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Content:
    """A checked adapter that is to become a version of `name`."""

    name: AdapterName
    label: str | None  # None: the next free one
    digest: str
    checked: PeftAdapter
    sizes: tuple[int, int]  # bytes of the configuration and of the weights


@dataclass(frozen=True, slots=True)
class Decision:
    outcome: Literal["created", "restored", "unchanged"]
    label: str


def label_number(label: str) -> int:
    """7 for `v7`; 0 for a label that is not a plain number."""
    match = _NUMBERED.fullmatch(label)
    return int(match[1]) if match else 0


def decide(db: sqlite3.Connection, base_model: str, content: Content) -> Decision:
    """Raises `version.exists` when the label, or the content, belongs to another version."""
    key = rows.adapter_id(db, base_model, content.name)
    if key is None:
        return Decision("created", content.label or "v1")
    same = rows.version_by(db, key, digest=content.digest)
    if same is not None:
        return _seen_before(content, same["label"], same["state"])
    if content.label is None:
        return Decision("created", _next_label(db, key))
    if rows.version_by(db, key, label=content.label) is not None:
        raise _exists(content, content.label, "with other content, and versions never change")
    return Decision("created", content.label)


def new_version(content: Content, label: str, who: Who, message: str) -> Version:
    checked = content.checked
    return Version(
        ref=AdapterRef(content.name, label, content.digest),
        state=VersionState.AVAILABLE,
        failure="",
        pinned=False,
        config_bytes=content.sizes[0],
        weights_bytes=content.sizes[1],
        rank=checked.max_rank,
        modules=len(checked.modules),
        targets=tuple(checked.targets),
        warnings=tuple(checked.warnings),
        trained_on=checked.base_model_name or "",
        message=message,
        created_at=time.time(),
        created_by=who,
    )


def _seen_before(content: Content, label: str, state: str) -> Decision:
    if content.label not in (None, label):
        raise _exists(content, label, f"with this very content; it cannot be {content.label} too")
    return Decision("unchanged" if state == VersionState.AVAILABLE else "restored", label)


def _next_label(db: sqlite3.Connection, key: int) -> str:
    row = db.execute("SELECT next_number FROM adapters WHERE id = ?", (key,)).fetchone()
    return f"v{row['next_number']}"


def _exists(content: Content, label: str, how: str) -> LoradError:
    return LoradError(
        "version.exists",
        f"{content.name} already has a version {label} {how}",
        hint="leave the version out to take the next free one",
        details={"adapter": str(content.name), "version": label},
    )
