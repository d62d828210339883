"""A registry on a real disk, adapters to push to it, and how its tests look at it.

A test file imports the fixtures it uses under their own names (`state as state`), where pytest
finds them.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.errors import LoradError
from lorad.registry.records import Pushed, Who
from lorad.registry.registry import Registry

_SHARED = runpy.run_path(str(Path(__file__).with_name("admin_daemon.py")))
write_adapter, BASE, SHAPE = _SHARED["write_adapter"], _SHARED["BASE"], _SHARED["SHAPE"]
CHECK = partial(read_adapter, shape=SHAPE, max_lora_rank=16)
ME = Who(uid=1234, pid=99)
TINKER = AdapterName("default", "tinker")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def registry(state: Path) -> Iterator[Registry]:
    opened = Registry.open(state, BASE, CHECK)
    yield opened
    opened.close()


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Three adapters that differ in their weights."""
    return [write_adapter(tmp_path / f"adapter{seed}", seed) for seed in range(3)]


def push(registry: Registry, directory: Path, name: str = "tinker", **how: object) -> Pushed:
    return registry.push(directory, AdapterName.parse(name), who=ME, **how)  # type: ignore[arg-type]


def code(caught: pytest.ExceptionInfo[LoradError]) -> str:
    return caught.value.code


def files(state: Path) -> set[str]:
    """Every file below the store, staging too."""
    store = state / "store"
    return {str(path.relative_to(store)) for path in store.rglob("*") if not path.is_dir()}
