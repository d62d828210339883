"""LoRA deltas on a GPU: shrink and expand over all segments and slices of a projection.

One pair of kernels serves decode (BGMV: tiles of 16 rows) and prefill (SGMV: tiles of 64). The
rank is read at run time, per adapter and slice; programs beyond it exit at once. The sum over
the input's width is cut into pieces of a fixed size, whose partial sums go to a scratch tensor
and are added in order: no atomics, so a row's delta has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorad_kernels.segments import SHORT_ROWS

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.segments import LoraSegments

# Width summed by one shrink program. A property of the projection alone, never of the batch.
SPLIT_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work. One rank block is the least a tensor core multiplies."""

    rows: int
    width: int  # of x in one step of shrink
    ranks: int
    columns: int  # of y in one program of expand
    warps: int
    shrink_stages: int


# The tile of decode stays at 16 rows whatever the batch: its rows have the same bits anywhere.
BGMV = Tiles(rows=SHORT_ROWS, width=128, ranks=16, columns=128, warps=4, shrink_stages=3)
SGMV = Tiles(rows=64, width=64, ranks=16, columns=64, warps=4, shrink_stages=3)
# ptxas before 13.3 miscompiles a cast beside a pipelined wgmma, so expand is not pipelined.
EXPAND_STAGES = 1

# Triton compiles a kernel anew for an integer that is 1, and for one that divides by 16. These
# vary from step to step, so they are left as they come: nothing is compiled while a step waits.
SHRINK_VARIES = ("num_rows", "max_rank", "rank_blocks")
EXPAND_VARIES = ("num_rows", "max_rank", "pieces")


@triton.jit(do_not_specialize=SHRINK_VARIES)  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    slab,
    table,
    tiles,
    partial,
    x_stride,
    width,
    table_slices,
    slices,
    num_rows,
    max_rank,
    rank_blocks,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """partial[p, t, s, j] = sum over k in piece p of x[t, k] * A[slot(t), s][j, k]."""
    tile = tl.program_id(0) // rank_blocks
    block = tl.program_id(0) % rank_blocks
    s = tl.program_id(1)
    piece = tl.program_id(2)
    start = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    entry = table + (slot * table_slices + s) * 4
    rank = tl.load(entry)
    if block * RANKS < rank:
        a = slab + tl.multiple_of(tl.load(entry + 1), ALIGN)
        rows = start + tl.arange(0, ROWS)
        ranks = block * RANKS + tl.arange(0, RANKS)
        first = piece * SPLIT
        last = tl.minimum(first + SPLIT, width)
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for k in range(first, last, WIDTH):
            ks = k + tl.arange(0, WIDTH)
            inside = ks < last
            xs = tl.load(
                x + rows[:, None] * x_stride + ks[None, :],
                mask=(rows < end)[:, None] & inside[None, :],
                other=0.0,
            )
            weights = tl.load(
                a + ranks[None, :].to(tl.int64) * width + ks[:, None],
                mask=(ranks < rank)[None, :] & inside[:, None],
                other=0.0,
            )
            total = tl.dot(xs, weights, total, input_precision=PRECISION)
        target = ((piece * num_rows + rows[:, None]) * slices + s) * max_rank + ranks[None, :]
        tl.store(partial + target, total, mask=(rows < end)[:, None] & (ranks < rank)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _expanded(  # type: ignore[no-untyped-def]
    partial,
    b,
    rank,
    rows,
    columns,
    in_tile,
    in_slice,
    s,
    slices,
    num_rows,
    max_rank,
    pieces,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sum over j of h[rows, s, j] * B[columns, j]; h is the sum of the pieces, in order."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for j in range(0, rank, RANKS):
        ranks = j + tl.arange(0, RANKS)
        in_rank = ranks < rank
        place = (rows[:, None] * slices + s) * max_rank + ranks[None, :]
        h_mask = in_tile[:, None] & in_rank[None, :]
        h = tl.zeros((rows.shape[0], RANKS), tl.float32)
        for piece in range(pieces):
            offset = piece * num_rows * slices * max_rank
            h += tl.load(partial + offset + place, mask=h_mask, other=0.0)
        weights = tl.load(
            b + columns[None, :].to(tl.int64) * rank + ranks[:, None],
            mask=in_slice[None, :] & in_rank[:, None],
            other=0.0,
        )
        total = tl.dot(h, weights.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=EXPAND_VARIES)  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    y,
    slab,
    table,
    tiles,
    partial,
    y_stride,
    end_0,
    end_1,
    end_2,
    table_slices,
    slices,
    num_rows,
    max_rank,
    pieces,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """y[t, n] += scaling * sum over j of h[t, s, j] * B[slot(t), s][n - start of s, j].

    Program axis 1 runs over the column blocks of slice 0, then of slice 1, then of slice 2.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    blocks_0 = tl.cdiv(end_0, COLUMNS)
    blocks_1 = tl.cdiv(end_1 - end_0, COLUMNS)
    s = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    begin = tl.where(s == 0, 0, tl.where(s == 1, end_0, end_1))
    stop = tl.where(s == 0, end_0, tl.where(s == 1, end_1, end_2))
    block -= tl.where(s == 0, 0, tl.where(s == 1, blocks_0, blocks_0 + blocks_1))
    start = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    entry = table + (slot * table_slices + s) * 4
    rank = tl.load(entry)
    if rank > 0:
        b = slab + tl.multiple_of(tl.load(entry + 2), ALIGN)
        scaling = tl.load(entry + 3).to(tl.float64, bitcast=True).to(tl.float32)
        rows = start + tl.arange(0, ROWS)
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        in_tile = rows < end
        in_slice = columns < stop - begin
        # The compiler reads eight elements of B at once where it sees that each row begins at a
        # multiple of them. (A hint on `rank` itself would hold in both branches.)
        if rank % 8 == 0:
            total = _expanded(
                partial, b, rank // 8 * 8, rows, columns, in_tile, in_slice,
                s, slices, num_rows, max_rank, pieces, RANKS, PRECISION,
            )  # fmt: skip
        else:
            total = _expanded(
                partial, b, rank, rows, columns, in_tile, in_slice,
                s, slices, num_rows, max_rank, pieces, RANKS, PRECISION,
            )  # fmt: skip
        target = y + rows[:, None] * y_stride + begin + columns[None, :]
        mask = in_tile[:, None] & in_slice[None, :]
        old = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (old + scaling * total).to(y.dtype.element_ty), mask=mask)


def expand_columns(dtype: torch.dtype, tiles: Tiles) -> int:
    """Columns of one expand program. In float32, 128 spill registers on sm_80."""
    return min(tiles.columns, 64) if dtype is torch.float32 else tiles.columns


def expand_precision(dtype: torch.dtype, tiles: Tiles) -> str:
    """How h (float32) and B are multiplied.

    A 16-bit B is exact in tf32, so only h is rounded: not at all in float32, to 2^-22 in decode
    (three products of its parts), to 2^-11 in prefill.
    """
    if dtype is torch.float32:
        return "ieee"
    return "tf32x3" if tiles is BGMV else "tf32"


def add_lora(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: FactorTable,
    slice_starts: Sequence[int],
    segments: LoraSegments,
) -> None:
    """`ops.add_lora`; rows of y and x are contiguous."""
    if table.max_rank == 0:
        return
    short = segments.short_tiles(y.device)
    if len(short):
        _launch(BGMV, short, y, x, slab, table, slice_starts)
    if segments.long:
        long = segments.tiles(SGMV.rows, True, y.device)
        _launch(SGMV, long, y, x, slab, table, slice_starts)


def _launch(
    tiles: Tiles,
    places: Tensor,
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    table: FactorTable,
    slice_starts: Sequence[int],
) -> None:
    slices, width, max_rank = len(slice_starts) - 1, x.shape[1], table.max_rank
    pieces, rank_blocks = -(-width // SPLIT_WIDTH), -(-max_rank // tiles.ranks)
    partial = torch.empty(
        pieces, x.shape[0], slices, max_rank, dtype=torch.float32, device=x.device
    )
    if partial.numel() >= 2**31:  # the kernels count in 32 bits
        raise ValueError(f"{x.shape[0]} rows of rank {max_rank} are too many for one step")
    factors = table.on(y.device)
    shrink: Any = shrink_kernel[(len(places) * rank_blocks, slices, pieces)]
    shrink(
        x, slab, factors, places, partial, x.stride(0), width, factors.shape[1], slices,
        x.shape[0], max_rank, rank_blocks, SPLIT=SPLIT_WIDTH, ROWS=tiles.rows,
        WIDTH=tiles.width, RANKS=tiles.ranks, PRECISION="ieee", ALIGN=table.alignment,
        num_warps=tiles.warps, num_stages=tiles.shrink_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    ends = (*slice_starts[1:], *[slice_starts[-1]] * (3 - slices))
    columns = expand_columns(y.dtype, tiles)
    blocks = sum(-(-(end - start) // columns) for start, end in pairwise(slice_starts))
    expand: Any = expand_kernel[(len(places), blocks)]
    expand(
        y, slab, factors, places, partial, y.stride(0), *ends, factors.shape[1], slices,
        x.shape[0], max_rank, pieces, ROWS=tiles.rows, RANKS=tiles.ranks,
        COLUMNS=columns, PRECISION=expand_precision(y.dtype, tiles),
        ALIGN=table.alignment,
        num_warps=tiles.warps, num_stages=EXPAND_STAGES, enable_fp_fusion=True,
    )  # fmt: skip
