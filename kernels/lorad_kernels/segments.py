"""Rows of a batch grouped by adapter: what SGMV and BGMV walk over.

Punica (Chen et al., MLSys 2024, arXiv:2310.18547) calls a run of rows that share an adapter a
segment. The runner orders the sequences of a step by adapter, so a segment is a contiguous
range of rows: no permutation, and the factors of an adapter are read once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start:end` use adapter `slot` of the step's adapter list."""

    start: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """All segments of one batch, in row order. Base rows belong to none and cost nothing."""

    segments: tuple[Segment, ...]
    num_rows: int


def group_rows(slots: Sequence[int | None], lengths: Sequence[int]) -> LoraSegments:
    """Segments of a batch whose sequence i has `lengths[i]` rows and uses adapter `slots[i]`.

    None is the base model. Neighbours with the same adapter become one segment.
    """
    segments: list[Segment] = []
    row = 0
    for slot, length in zip(slots, lengths, strict=True):
        end = row + length
        last = segments[-1] if segments else None
        if slot is None or length == 0:
            pass
        elif last is not None and last.slot == slot and last.end == row:
            segments[-1] = Segment(last.start, end, slot)
        else:
            segments.append(Segment(row, end, slot))
        row = end
    return LoraSegments(tuple(segments), row)
