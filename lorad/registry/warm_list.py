"""Which versions were in use, so that a restart can load them again before they are asked for.

A hint, not a record: it is written from time to time without waiting for the disk, and a list
that is old, damaged or gone costs some waiting and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.errors import LoradError
from lorad.registry.registry import Registry

_FILE = "warm.json"
_MOST = 4096


def write_warm_list(state: Path, refs: Sequence[AdapterRef]) -> None:
    """`refs` are the last used first. A disk that refuses is passed over."""
    entries = [[ref.name.qualified, ref.version] for ref in refs[:_MOST]]
    partial = state / f"{_FILE}.new"
    with suppress(OSError):
        partial.write_text(json.dumps(entries))
        partial.replace(state / _FILE)


def read_warm_list(state: Path, registry: Registry) -> list[AdapterRef]:
    """The versions of the list that can still be served, the last used first."""
    try:
        entries = json.loads((state / _FILE).read_bytes())
        named = [(AdapterName.parse(name), str(label)) for name, label in entries]
    except (OSError, ValueError, TypeError, AttributeError, LoradError):
        return []
    refs = []
    for name, label in named[:_MOST]:
        with suppress(LoradError):  # deleted since
            version = registry.version(name, label)
            refs += [version.ref] if version.servable else []
    return refs
