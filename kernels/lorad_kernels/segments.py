"""Rows of a batch grouped by adapter: what SGMV and BGMV walk over.

Punica (Chen et al., MLSys 2024, arXiv:2310.18547) calls a run of rows that share an adapter a
segment. The runner orders the sequences of a step by adapter, so a segment is a contiguous
range of rows: no permutation, and the factors of an adapter are read once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A sequence with more rows than this (prefill) becomes a segment of its own, for which a matmul
# over many rows is faster. Rows of shorter ones, decodes among them, are always computed by the
# kernels that give a row the same bits in any batch. On a CPU without a matrix unit those win up
# to more rows: what torch needs around each of its many small matmuls is dearer than their
# arithmetic.
LONG_ROWS, LONG_ROWS_ON_CPU = 64, 512
# The CPU's kernels walk pieces of this many rows, a GPU's tiles of the other.
CHUNK_ROWS = 32
SHORT_ROWS = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start:end` use adapter `slot` of the step's adapter list."""

    start: int
    end: int
    slot: int
    is_long: bool = False


@dataclass(frozen=True)
class LoraSegments:
    """All segments of one batch, in row order. Base rows belong to none and cost nothing.

    `fixed`, int64 `[n, 3]` on the step's device, stands for a captured decode step: its kernels
    are launched once for ever, over n pieces (start, end, slot) of at most SHORT_ROWS rows, which
    each replay finds rewritten. Pieces that are not needed name a slot whose ranks are 0.
    """

    segments: tuple[Segment, ...]
    num_rows: int
    fixed: Tensor | None = field(default=None, compare=False)

    def pieces(self, rows: int, is_long: bool) -> NDArray[np.int64]:
        """`[pieces, 3]`: start, end, slot of pieces of the long or of the other segments."""
        pieces = [
            (start, min(start + rows, segment.end), segment.slot)
            for segment in self.segments
            if segment.is_long == is_long
            for start in range(segment.start, segment.end, rows)
        ]
        return np.array(pieces, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def chunks(self) -> NDArray[np.int64]:
        if self.fixed is not None:
            pieces: NDArray[np.int64] = self.fixed.numpy()
            return pieces
        return self.pieces(CHUNK_ROWS, is_long=False)

    @cached_property
    def chunks_address(self) -> int:
        return self.chunks.ctypes.data

    @cached_property
    def _tiles(self) -> dict[tuple[int, bool], Tensor]:
        return {}

    def tiles(self, rows: int, is_long: bool, device: torch.device) -> Tensor:
        """`pieces` as a tensor of the step's device, copied once per step."""
        if (rows, is_long) not in self._tiles:
            pieces = torch.from_numpy(self.pieces(rows, is_long))
            self._tiles[rows, is_long] = pieces.to(device, non_blocking=True)
        return self._tiles[rows, is_long]

    def short_tiles(self, device: torch.device) -> Tensor:
        """The pieces of all but the long segments, on the step's device."""
        return self.tiles(SHORT_ROWS, False, device) if self.fixed is None else self.fixed

    @cached_property
    def long(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.is_long)

    def long_pieces(self, rows: int, without: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """The slots of the long segments, but for some, and `[n, 4]` pieces of the segments.

        A slot is there once. A piece is start, end, slot, and the slot's place among the slots.
        """
        if (rows, without) not in self._long_pieces:
            pieces = self.pieces(rows, is_long=True)
            pieces = pieces[~np.isin(pieces[:, 2], without)]
            slots, places = np.unique(pieces[:, 2], return_inverse=True)
            found = torch.from_numpy(slots), torch.from_numpy(np.column_stack([pieces, places]))
            self._long_pieces[rows, without] = found
        return self._long_pieces[rows, without]

    @cached_property
    def _long_pieces(self) -> dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]]:
        return {}


def long_rows(device: torch.device, dtype: torch.dtype) -> int:
    """The most rows of a segment that is not long there."""
    if device.type == "cpu":
        from lorad_kernels.cpu_tiles import available

        on_tiles = dtype is torch.bfloat16 and available()
        return LONG_ROWS if on_tiles else LONG_ROWS_ON_CPU
    return LONG_ROWS


def group_rows(
    slots: Sequence[int | None], lengths: Sequence[int], most_rows: int = LONG_ROWS
) -> LoraSegments:
    """Segments of a batch whose sequence i has `lengths[i]` rows and uses adapter `slots[i]`.

    None is the base model. Neighbours with the same adapter become one segment; those with more
    than `most_rows` rows are long, and apart.
    """
    segments: list[Segment] = []
    row = 0
    for slot, length in zip(slots, lengths, strict=True):
        end, is_long = row + length, length > most_rows
        last = segments[-1] if segments else None
        if slot is None or length == 0:
            pass
        elif last and (last.slot, last.end, last.is_long, is_long) == (slot, row, False, False):
            segments[-1] = Segment(last.start, end, slot)
        else:
            segments.append(Segment(row, end, slot, is_long))
        row = end
    return LoraSegments(tuple(segments), row)
