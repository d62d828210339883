"""Load commands and requests that want the same pages: neither starves the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lorad.engine.load_turn import LoadTurn


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=0.0)


@pytest.fixture
def turn(clock) -> LoadTurn:
    return LoadTurn(5.0, lambda: clock.now)


def test_a_command_waits_as_long_as_any_adapter_before_it_holds_requests_back(turn, clock):
    assert turn.no_room("a")
    assert not turn.holding
    clock.now = 5.0
    assert turn.no_room("a")
    assert not turn.holding
    clock.now = 5.1
    assert turn.no_room("a")
    assert turn.holding
    turn.ended("a")
    assert not turn.holding


def test_a_hold_is_bounded(turn, clock):
    turn.no_room("a")
    clock.now = 6.0
    assert turn.no_room("a")
    clock.now = 36.0
    assert turn.no_room("a")
    clock.now = 36.1
    assert not turn.no_room("a")
    assert not turn.holding


def test_after_a_hold_requests_have_as_much_time_as_it_took(turn, clock):
    turn.no_room("a")
    turn.no_room("b")
    clock.now = 6.0
    turn.no_room("a")
    clock.now = 26.0
    turn.ended("a")
    turn.no_room("b")
    assert not turn.holding
    clock.now = 45.9
    turn.no_room("b")
    assert not turn.holding
    clock.now = 46.0
    assert turn.no_room("b")
    assert turn.holding


def test_only_one_holds_and_the_end_of_another_changes_nothing(turn, clock):
    turn.no_room("a")
    turn.no_room("b")
    clock.now = 6.0
    turn.no_room("a")
    turn.no_room("b")
    turn.ended("b")
    assert turn.holding
    clock.now = 100.0
    assert turn.no_room("c"), "its own wait begins now"
