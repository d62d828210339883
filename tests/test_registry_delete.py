"""Deletes and pins in the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.registry.records import Action
from lorad.registry.registry import Registry
from registry_on_disk import ME, TINKER, code, files, push
from registry_on_disk import adapters as adapters
from registry_on_disk import registry as registry
from registry_on_disk import state as state


def test_delete_removes_the_files_and_keeps_the_label(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    registry.delete(TINKER, "v1", who=ME, reason="leaked")
    assert files(state) == set()
    assert registry.adapters() == []
    assert registry.history(TINKER)[0].reason == "leaked"
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[1], label="v1")
    assert code(caught) == "version.exists"
    assert push(registry, adapters[1]).version.label == "v2"
    back = push(registry, adapters[0])
    assert (back.outcome, back.version.label) == ("restored", "v1")
    assert registry.verify(back.version.ref)


def test_delete_refuses_what_is_referred_to(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    push(registry, adapters[1])
    registry.promote(TINKER, "v1", who=ME)
    registry.set_pinned(TINKER, "v2", True, who=ME)
    for label, reason in (("v1", "version.live"), ("v2", "version.pinned")):
        with pytest.raises(LoradError) as caught:
            registry.delete(TINKER, label, who=ME)
        assert code(caught) == reason
    assert set(registry.adapter(TINKER).versions) == {"v1", "v2"}


def test_pins_are_kept_and_told_once(registry: Registry, adapters: list[Path]) -> None:
    ref = push(registry, adapters[0]).version.ref
    assert registry.set_pinned(TINKER, "v1", True, who=ME)
    assert not registry.set_pinned(TINKER, "v1", True, who=ME)
    assert registry.pinned() == [ref]
    assert registry.set_pinned(TINKER, "v1", False, who=ME)
    assert registry.pinned() == []
    assert [e.action for e in registry.history(TINKER)] == [Action.UNPIN, Action.PIN, Action.PUSH]
