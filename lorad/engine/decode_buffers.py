"""The tensors that captured decode steps read: at fixed addresses, filled anew before each step.

A step of n sequences uses the first rows of each, up to the captured batch size; the rows from n
on are padding. Padding computes the base model's token 0 at position 0, over a page that belongs
to nobody, and nobody looks at the result.
"""

from __future__ import annotations

import torch
from lorad_kernels import (
    FIELDS,
    SHORT_ROWS,
    AdapterFactors,
    AttentionBatch,
    FactorTable,
    LoraSegments,
    alignment,
)

from lorad.engine.step_inputs import PackedAdapters, StepInputs, same_adapters
from lorad.memory.slab import Slab
from lorad.model.forward_batch import ForwardBatch, LoraBatch
from lorad.sizing.model_shape import ModelShape

# Per row: token, position, context, page, place in the page; and one piece of three numbers.
_KINDS, _PIECE = 5, 3


class _Mirror:
    """int64 numbers on the device and their copy on the host; on a CPU the two are one.

    The host's is pinned. It may be written again once the device has done what it was sent for:
    the engine waits for every step's tokens.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=torch.int64, device=device)
        on_cpu = device.type == "cpu"
        self._host = (
            self.device if on_cpu else torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        )
        self.array = self._host.numpy()

    def send(self, row: int | None = None) -> None:
        """Copy all of it, or one row, to the device; does not wait."""
        if self._host is not self.device:
            target, source = self.device, self._host
            if row is not None:
                target, source = target[row], source[row]
            target.copy_(source, non_blocking=True)


class DecodeBuffers:
    """For steps of at most `rows` sequences of at most `max_model_len` tokens."""

    def __init__(
        self, shape: ModelShape, slab: Slab, rows: int, max_model_len: int, max_rank: int
    ) -> None:
        if slab.scratch_page is None:
            raise ValueError("the slab has no page for the rows of padding")
        device, size = slab.data.device, slab.block_size
        self.rows = rows
        self.max_model_len = max_model_len
        self._slab = slab
        self._scratch_page = slab.scratch_page
        self._max_rank = max_rank
        self._flat = _Mirror(((_KINDS + _PIECE) * rows,), device)
        self._numbers = self._flat.array[: _KINDS * rows].reshape(_KINDS, rows)
        self._pieces = self._flat.array[_KINDS * rows :].reshape(rows, _PIECE)
        self._block_tables = _Mirror((rows, -(-max_model_len // size)), device)
        self._written: list[list[int]] = [[] for _ in range(rows)]
        self._every_row = torch.arange(rows, device=device)
        projections = shape.projections
        slices = max(len(projection.slices) for projection in projections)
        # One slot more than rows: the last, of rank 0 everywhere, is what idle pieces name.
        table = (shape.num_layers, len(projections), rows + 1, slices, FIELDS)
        self._factors = _Mirror(table, device)
        self._tables = self._fixed_tables(shape.num_layers, len(projections))
        self._packed = PackedAdapters()
        self._adapters: list[AdapterFactors] = []

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers."""
        mirrors = (self._flat, self._block_tables, self._factors)
        return sum(t.nbytes for t in (self._every_row, *(mirror.device for mirror in mirrors)))

    def fits(self, adapters: list[AdapterFactors]) -> bool:
        """Whether a captured step can have these adapters.

        It cannot with a rank above the one that was captured, nor with offsets that are not
        multiples of 16 (the slab's own layout has none).
        """
        return same_adapters(adapters, self._adapters) or (
            len(adapters) <= self.rows
            and all(
                packed[..., 0].max() <= self._max_rank and alignment(packed) == 16
                for packed in self._packed.of(adapters)
            )
        )

    def fill(self, step: StepInputs, size: int) -> None:
        """Write a step of decodes into the first `size` rows, those behind it as padding.

        Its adapters fit.
        """
        count = len(step.token_ids)
        padding = size - count
        for kind, values, other in (
            (0, step.token_ids, 0),
            (1, step.positions, 0),
            (2, step.context_lens, 1),
            (3, step.kv_pages, self._scratch_page),
            (4, step.kv_offsets, 0),
        ):
            self._numbers[kind, :size] = values + [other] * padding
        self._fill_pieces(step, size)
        self._flat.send()
        self._fill_factors(step.adapters)
        for row, table in enumerate(step.block_tables + [[self._scratch_page]] * padding):
            self._fill_table(row, table)

    def batch(self, size: int, lora: bool) -> ForwardBatch:
        """The first `size` rows as the decoder takes them, for ever at the same addresses.

        What a launch needs to know on the host is the most there may be: contexts of
        `max_model_len`, a piece for every row, the largest rank.
        """
        rows = self._flat.device[: _KINDS * self.rows].view(_KINDS, self.rows)[:, :size]
        attention = AttentionBatch(
            query_starts=tuple(range(size + 1)),
            context_lens=(self.max_model_len,) * size,
            num_decodes=size,
            block_tables=self._block_tables.device[:size],
            context_lens_device=rows[2],
            kv_pages=rows[3],
            kv_offsets=rows[4],
        )
        pieces = self._flat.device[_KINDS * self.rows :].view(self.rows, _PIECE)[:size]
        segments = LoraSegments((), size, fixed=pieces)
        return ForwardBatch(
            token_ids=rows[0],
            positions=rows[1],
            attention=attention,
            logits_rows=self._every_row[:size],
            lora=LoraBatch(self._slab.data, self._tables, segments) if lora else None,
        )

    def _fill_pieces(self, step: StepInputs, size: int) -> None:
        self._pieces[:size] = (0, 1, self.rows)
        if step.segments is not None:
            pieces = step.segments.pieces(SHORT_ROWS, is_long=False)
            self._pieces[: len(pieces)] = pieces

    def _fill_factors(self, adapters: list[AdapterFactors]) -> None:
        """Slots from 0 on; what later slots hold is named by no piece, except the last."""
        if adapters and not same_adapters(adapters, self._adapters):
            for slot, packed in enumerate(self._packed.of(adapters)):
                self._factors.array[:, :, slot] = packed
            self._factors.send()
            self._adapters = adapters

    def _fill_table(self, row: int, table: list[int]) -> None:
        """Only tables that changed are sent: every 16th step of a sequence, or a new place."""
        if self._written[row] != table:
            self._written[row] = table.copy()
            self._block_tables.array[row, : len(table)] = table
            self._block_tables.send(row)

    def _fixed_tables(self, layers: int, projections: int) -> list[list[FactorTable]]:
        host, device = self._factors.array, self._factors.device
        return [
            [
                FactorTable((), host[layer, index], device[layer, index], fixed_rank=self._max_rank)
                for index in range(projections)
            ]
            for layer in range(layers)
        ]
