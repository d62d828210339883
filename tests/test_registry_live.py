"""The registry's live pointer: promote, rollback, retire, and the history of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.registry.records import Action, Who
from lorad.registry.registry import Registry
from registry_on_disk import ME, TINKER, code, push
from registry_on_disk import adapters as adapters
from registry_on_disk import registry as registry
from registry_on_disk import state as state


def live(registry: Registry, name: str = "tinker") -> str:
    return registry.resolve(name).version


def test_promote_and_rollback(registry: Registry, adapters: list[Path]) -> None:
    for directory in adapters:
        push(registry, directory)
    moves = [registry.promote(TINKER, label, who=ME) for label in ("v1", "v2", "v3")]
    assert [(m.from_version, m.to_version, m.generation) for m in moves] == [
        (None, "v1", 1),
        ("v1", "v2", 2),
        ("v2", "v3", 3),
    ]
    for expected in ("v2", "v1"):  # a second rollback goes further back, not forward again
        target = registry.rollback_target(TINKER)
        registry.rollback(TINKER, target.label, who=ME)
        assert live(registry) == expected
    with pytest.raises(LoradError) as caught:
        registry.rollback_target(TINKER)
    assert code(caught) == "rollback.no_previous"


def test_rollback_after_a_new_promote_returns_to_what_was_live_then(
    registry: Registry, adapters: list[Path]
) -> None:
    for directory in adapters:
        push(registry, directory)
    registry.promote(TINKER, "v1", who=ME)
    registry.promote(TINKER, "v2", who=ME)
    registry.rollback(TINKER, "v1", who=ME)
    registry.promote(TINKER, "v3", who=ME)
    assert registry.rollback_target(TINKER).label == "v1"


def test_rollback_passes_over_what_was_deleted(registry: Registry, adapters: list[Path]) -> None:
    for directory in adapters:
        push(registry, directory)
    for label in ("v1", "v2", "v3"):
        registry.promote(TINKER, label, who=ME)
    registry.delete(TINKER, "v2", who=ME)
    assert registry.rollback_target(TINKER).label == "v1"


def test_promoting_what_is_live_changes_nothing(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    registry.promote(TINKER, "v1", who=ME)
    again = registry.promote(TINKER, "v1", who=ME)
    assert (again.changed, again.generation) == (False, 1)
    assert len(registry.history(TINKER)) == 2


def test_retired_name_answers_no_more_and_can_come_back(
    registry: Registry, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    registry.promote(TINKER, "v1", who=ME)
    assert registry.retire(TINKER, who=ME).to_version is None
    with pytest.raises(LoradError):
        registry.resolve("tinker")
    assert registry.live_adapters() == []
    assert registry.rollback_target(TINKER).label == "v1"
    registry.promote(TINKER, "v1", who=ME)
    assert live(registry) == "v1"


def test_generation_guards_against_a_stale_decision(
    registry: Registry, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    push(registry, adapters[1])
    registry.promote(TINKER, "v1", who=ME, expected_generation=0)
    with pytest.raises(LoradError) as caught:
        registry.promote(TINKER, "v2", who=ME, expected_generation=0)
    assert code(caught) == "generation.changed"
    assert live(registry) == "v1"


def test_of_two_promotes_with_one_generation_one_wins(
    registry: Registry, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    push(registry, adapters[1])
    outcomes: list[str] = []
    start = threading.Barrier(2)

    def promote(label: str) -> None:
        start.wait()
        try:
            registry.promote(TINKER, label, who=ME, expected_generation=0)
            outcomes.append("won")
        except LoradError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=promote, args=(label,)) for label in ("v1", "v2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["generation.changed", "won"]


def test_history_says_who_what_and_why(registry: Registry, adapters: list[Path]) -> None:
    other = Who(uid=7, pid=8)
    begun = time.time()
    push(registry, adapters[0], message="trained on tickets")
    registry.promote(TINKER, "v1", who=other, reason="looks good")
    promoted, pushed = registry.history(TINKER)
    assert (pushed.action, pushed.who, pushed.to_version) == (Action.PUSH, ME, "v1")
    assert pushed.reason == "trained on tickets"
    assert (promoted.action, promoted.who, promoted.reason) == (
        Action.PROMOTE,
        other,
        "looks good",
    )
    assert (promoted.from_version, promoted.to_version, promoted.generation) == (None, "v1", 1)
    assert begun <= pushed.at <= promoted.at <= time.time()
    assert pushed.id < promoted.id
