"""Rows of a batch grouped by adapter: what SGMV and BGMV walk over.

Punica (Chen et al., MLSys 2024, arXiv:2310.18547) calls a run of rows that share an adapter a
segment. The runner orders the sequences of a step by adapter, so a segment is a contiguous
range of rows: no permutation, and the factors of an adapter are read once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# On the CPU, segments of up to LONG_ROWS rows are computed by kernels that read the factors in
# place, in chunks of CHUNK_ROWS; in longer ones (prefill) torch's matmuls are faster.
CHUNK_ROWS = 32
LONG_ROWS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start:end` use adapter `slot` of the step's adapter list."""

    start: int
    end: int
    slot: int

    @property
    def is_long(self) -> bool:
        return self.end - self.start > LONG_ROWS


@dataclass(frozen=True)
class LoraSegments:
    """All segments of one batch, in row order. Base rows belong to none and cost nothing."""

    segments: tuple[Segment, ...]
    num_rows: int

    @cached_property
    def chunks(self) -> NDArray[np.int64]:
        """`[chunks, 3]`: start, end, slot of pieces of the short segments."""
        pieces = [
            (start, min(start + CHUNK_ROWS, segment.end), segment.slot)
            for segment in self.segments
            if not segment.is_long
            for start in range(segment.start, segment.end, CHUNK_ROWS)
        ]
        return np.array(pieces, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def chunks_address(self) -> int:
        return self.chunks.ctypes.data

    @cached_property
    def long(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.is_long)


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
