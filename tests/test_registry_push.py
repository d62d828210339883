"""Pushes to the registry: versions, labels, names, and adapters that are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.registry.records import Action
from lorad.registry.registry import Registry
from registry_on_disk import CHECK, ME, TINKER, code, files, push, write_adapter
from registry_on_disk import adapters as adapters
from registry_on_disk import registry as registry
from registry_on_disk import state as state


def test_pushed_version_lies_in_the_store_and_is_not_live(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    pushed = push(registry, adapters[0], "acme/tinker", message="first try")
    version = pushed.version
    assert pushed.outcome == "created"
    assert str(version.ref) == "acme/tinker@v1"
    assert (version.rank, version.modules, version.targets) == (2, 1, ("q_proj",))
    assert (version.message, version.created_by) == ("first try", ME)
    directory = registry.directory(version.ref)
    assert directory == state / "store" / "org%2FTiny-Base" / "acme" / "tinker" / "v1"
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (directory / file).read_bytes() == (adapters[0] / file).read_bytes()
        assert stat.S_IMODE((directory / file).stat().st_mode) == 0o400
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    with pytest.raises(LoradError) as caught:
        registry.resolve("acme/tinker")
    assert code(caught) == "adapter.not_found"
    assert "promote" in caught.value.hint
    assert registry.resolve("acme/tinker@v1") == version.ref


def test_same_content_is_the_same_version(
    registry: Registry, state: Path, adapters: list[Path], tmp_path: Path
) -> None:
    first = push(registry, adapters[0])
    before = files(state)
    again = push(registry, write_adapter(tmp_path / "copy", 0))
    assert again.outcome == "unchanged"
    assert again.version == first.version
    assert files(state) == before
    assert [e.action for e in registry.history(TINKER)] == [Action.PUSH]


def test_other_scaling_is_other_content(
    registry: Registry, adapters: list[Path], tmp_path: Path
) -> None:
    push(registry, adapters[0])
    louder = push(registry, write_adapter(tmp_path / "louder", 0, lora_alpha=8))
    assert (louder.outcome, louder.version.label) == ("created", "v2")


def test_labels_count_up_past_given_ones(registry: Registry, tmp_path: Path) -> None:
    labels = [None, "v7", None, "summer-2026", None]
    got = [
        push(registry, write_adapter(tmp_path / str(n), n), label=label).version.label
        for n, label in enumerate(labels)
    ]
    assert got == ["v1", "v7", "v8", "summer-2026", "v9"]
    assert list(registry.adapter(TINKER).versions) == got


def test_a_label_never_gets_other_content(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    before = files(state)
    with pytest.raises(LoradError) as other_content:
        push(registry, adapters[1], label="v1")
    with pytest.raises(LoradError) as other_label:
        push(registry, adapters[0], label="v2")
    assert code(other_content) == code(other_label) == "version.exists"
    assert files(state) == before


def test_same_content_under_two_names_is_two_adapters(
    registry: Registry, adapters: list[Path]
) -> None:
    one = push(registry, adapters[0], "a/tinker")
    two = push(registry, adapters[0], "b/tinker")
    assert one.version.ref.digest == two.version.ref.digest
    assert [a.name.tenant for a in registry.adapters()] == ["a", "b"]


def test_dry_run_says_what_it_would_do_and_does_nothing(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    would = push(registry, adapters[0], dry_run=True)
    assert (would.outcome, would.version.label) == ("created", "v1")
    assert files(state) == set()
    assert registry.adapters() == []
    push(registry, adapters[0])
    assert push(registry, adapters[0], dry_run=True).outcome == "unchanged"


def test_name_differing_from_the_base_is_a_warning(registry: Registry, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", 1, base_model_name_or_path="org/Another")
    same = write_adapter(tmp_path / "same", 2, base_model_name_or_path="/models/tiny-base/")
    assert [w.code for w in push(registry, other).version.warnings] == ["base_name_differs"]
    assert push(registry, same).version.warnings == ()


@pytest.mark.parametrize("name", ["org/versions", "history", "acme/history", "base"])
def test_words_of_the_api_are_no_names(registry: Registry, adapters: list[Path], name: str) -> None:
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[0], name)
    assert code(caught) == "name.reserved"


@pytest.mark.parametrize(
    ("base", "name"),
    [("smollm", "smollm"), ("SmolLM", "smollm"), ("smollm", "default/smollm"), ("a/b", "a/b")],
)
def test_base_model_cannot_be_shadowed(
    tmp_path: Path, adapters: list[Path], base: str, name: str
) -> None:
    registry = Registry.open(tmp_path / "s", base, CHECK)
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[0], name)
    assert code(caught) == "name.reserved"
    registry.close()


def test_bad_adapters_leave_nothing(registry: Registry, state: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pickled = write_adapter(tmp_path / "pickled", 0)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    wide = write_adapter(tmp_path / "wide", 0, rank=32)
    fifo = write_adapter(tmp_path / "fifo", 0)
    (fifo / "adapter_model.safetensors").unlink()
    os.mkfifo(fifo / "adapter_model.safetensors")
    expected = {
        tmp_path / "absent": "path.not_found",
        empty: "adapter.config_missing",
        pickled: "adapter.unsafe_format",
        wide: "adapter.rank_exceeds_max",
        fifo: "adapter.unsafe_format",
    }
    for directory, reason in expected.items():
        with pytest.raises(LoradError) as caught:
            push(registry, directory)
        assert code(caught) == reason
        assert caught.value.hint
    assert files(state) == set()
    assert registry.adapters() == []


def test_links_of_a_hub_cache_are_copied_as_files(
    registry: Registry, adapters: list[Path], tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in adapters[0].iterdir():
        (linked / file.name).symlink_to(file)
    version = push(registry, linked).version
    assert not any(file.is_symlink() for file in registry.directory(version.ref).iterdir())
