"""The registry's start: what a restart keeps, what a crash left, damage, a full disk."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry.records import VersionState
from lorad.registry.registry import Registry
from registry_on_disk import BASE, CHECK, ME, TINKER, code, files, push, write_adapter
from registry_on_disk import adapters as adapters
from registry_on_disk import registry as registry
from registry_on_disk import state as state


def test_restart_keeps_everything(registry: Registry, state: Path, adapters: list[Path]) -> None:
    for directory in adapters:
        push(registry, directory, "acme/tinker")
    name = AdapterName("acme", "tinker")
    registry.promote(name, "v2", who=ME)
    registry.set_pinned(name, "v3", True, who=ME)
    before = registry.adapters(), registry.history(name), registry.pinned()
    registry.close()
    again = Registry.open(state, BASE, CHECK)
    assert (again.adapters(), again.history(name), again.pinned()) == before
    assert again.resolve("acme/tinker").version == "v2"
    assert push(again, adapters[0], "acme/tinker").outcome == "unchanged"
    again.close()


def test_each_base_model_has_its_own_adapters(state: Path, adapters: list[Path]) -> None:
    for base in (BASE, "org/Other"):
        registry = Registry.open(state, base, CHECK)
        assert registry.adapters() == []
        push(registry, adapters[0])
        registry.close()
    registry = Registry.open(state, BASE, CHECK)
    assert live_labels(registry) == ["v1"]
    registry.close()


def live_labels(registry: Registry) -> list[str]:
    return [label for adapter in registry.adapters() for label in adapter.versions]


def test_second_process_is_kept_out(registry: Registry, state: Path) -> None:
    with pytest.raises(LoradError) as caught:
        Registry.open(state, BASE, CHECK)
    assert code(caught) == "daemon.already_running"
    registry.close()
    Registry.open(state, BASE, CHECK).close()


def test_start_clears_what_a_crash_left(
    registry: Registry, state: Path, adapters: list[Path], tmp_path: Path
) -> None:
    version = push(registry, adapters[0]).version
    half_pushed = registry.stage()
    (half_pushed / "adapter_config.json").write_text("{}")
    unregistered = registry.directory(version.ref).with_name("v9")
    write_adapter(unregistered, 9)
    registry.close()
    again = Registry.open(state, BASE, CHECK)
    assert {file.split("/")[-2] for file in files(state)} == {"v1"}
    assert list((state / "store" / ".staging").iterdir()) == []
    assert live_labels(again) == ["v1"]
    again.close()


@pytest.mark.parametrize("damage", ["missing", "shorter", "link"])
def test_start_marks_damaged_versions_failed(
    registry: Registry, state: Path, adapters: list[Path], damage: str
) -> None:
    ref = push(registry, adapters[0]).version.ref
    push(registry, adapters[1])
    registry.promote(TINKER, "v1", who=ME)
    weights = registry.directory(ref) / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "shorter":
        weights.write_bytes(content[:-1])
    elif damage == "link":
        weights.symlink_to(adapters[0] / weights.name)
    registry.close()

    again = Registry.open(state, BASE, CHECK)
    version = again.version(TINKER, "v1")
    assert version.state is VersionState.FAILED
    assert "adapter_model.safetensors" in version.failure
    with pytest.raises(LoradError) as caught:
        again.resolve("tinker")
    assert code(caught) == "version.failed"
    assert again.resolve("tinker@v2").version == "v2"
    again.close()

    weights.unlink(missing_ok=True)
    weights.write_bytes(content)  # say, the disk was not mounted
    healed = Registry.open(state, BASE, CHECK)
    assert healed.resolve("tinker") == ref
    healed.close()


def test_lost_database_never_deletes_the_store(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    registry.close()
    before = files(state)
    for file in state.glob("registry.db*"):
        file.unlink()
    for _ in range(2):  # the second start must not take the first one's new file for the truth
        with pytest.raises(LoradError) as caught:
            Registry.open(state, BASE, CHECK)
        assert code(caught) == "store.unavailable"
    assert files(state) == before


def test_database_of_a_newer_lorad_is_left_alone(registry: Registry, state: Path) -> None:
    registry.close()
    with sqlite3.connect(state / "registry.db") as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    with pytest.raises(LoradError) as caught:
        Registry.open(state, BASE, CHECK)
    assert code(caught) == "store.unavailable"


def test_full_disk_changes_nothing(
    registry: Registry, state: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    push(registry, adapters[0])
    before = files(state)

    def no_space(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("lorad.registry.store.os.fsync", no_space)
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[1])
    assert code(caught) == "store.no_space"
    monkeypatch.undo()
    assert files(state) == before
    assert live_labels(registry) == ["v1"]
    assert push(registry, adapters[1]).version.label == "v2"
