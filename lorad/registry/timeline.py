"""Which version was live before: what `rollback` without a target goes to."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lorad.registry.records import Action, Event


def previous_live(moves: Iterable[Event], servable: Collection[str]) -> str | None:
    """The version that was live before the present one, or None.

    A rollback takes back the promotions after its target, so a second rollback goes one
    further back and never returns to the version that was just rolled away from. Versions
    that can no longer be served are passed over.
    """
    line: list[str | None] = []
    for move in moves:
        target = move.to_version
        if move.action is Action.ROLLBACK and target in line:
            while line[-1] != target:
                line.pop()
        else:
            line.append(target)
    current = line.pop() if line else None
    earlier = (label for label in reversed(line) if label in servable and label != current)
    return next(earlier, None)
