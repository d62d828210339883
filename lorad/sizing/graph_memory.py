"""Device memory of the captured decode steps (CUDA graphs): their buffers, and their pool.

A graph runs on fixed addresses, so what it reads and writes is allocated once, for the most rows
and the longest context there may be. A test compares this with what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

from lorad.sizing.architecture import Architecture, LayerGroup, Linear, Part

# Beyond this a step is long enough to be launched kernel by kernel.
MAX_GRAPH_ROWS = 512

_INDEX = 8  # bytes of an index
_ROW_INDICES = 8  # of a row: token, position, context, page, place, and a piece of three
_TABLE_ENTRY = 4 * 3 * 4 * _INDEX  # of a layer: four projections, three slices, four fields
# How the kernels cut what they write between their two launches, in float32: `SPLIT` and
# `MAX_SPLITS` of lorad_kernels.triton_attention, `SPLIT_WIDTH` of triton_lora.
SPLIT, MAX_SPLITS = 256, 32
SPLIT_WIDTH = 1024
_FUSED_SLICES = 3


def graph_rows(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that are captured; a step is padded to the next larger one."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_ROWS, 32))
    return (*(size for size in sizes if size < most), most)


def graph_buffer_bytes(
    arch: Architecture, rows: int, max_model_len: int, block_size: int, itemsize: int
) -> int:
    """Index buffers, block tables, factor tables, logits and tokens of `rows` rows. Exact."""
    tables = rows * -(-max_model_len // block_size) * _INDEX
    factors = (rows + 1) * arch.num_layers * _TABLE_ENTRY
    # Indices, the rows whose logits are wanted, and the tokens.
    indices = rows * (_ROW_INDICES + 2) * _INDEX
    return indices + tables + factors + rows * arch.vocab_size * itemsize


def graph_pool_bytes(
    arch: Architecture,
    rows: int,
    live_elements: int,
    max_model_len: int,
    max_rank: int,
    itemsize: int,
    tp: int,
) -> int:
    """Tensors inside the largest graph, whose memory the smaller ones use again. An estimate.

    `live_elements` is how many elements of a row one layer keeps at once.
    """
    splits = min(MAX_SPLITS, -(-max_model_len // SPLIT))
    partial = max(_attention(group, tp) for group in arch.groups) * splits
    shrunk = shrunk_columns(arch, tp) * max_rank
    floats = partial + shrunk + 2 * arch.hidden_size  # float32, the residual among them
    return rows * (floats * 4 + (live_elements + arch.vocab_size) * itemsize)


def _attention(group: LayerGroup, tp: int) -> int:
    """Of a row and split: what the heads have summed, and each one's maximum and weight."""
    linears = [linear for linear in group.linears if linear.part is Part.ATTENTION]
    width = max((x.in_per_gpu(tp) for x in linears), default=0)
    heads = max(_heads(linears), default=0)
    return width + 2 * -(-heads // tp)


def _heads(linears: list[Linear]) -> Iterator[int]:
    for linear in linears:
        yield from linear.heads


def shrunk_columns(arch: Architecture, tp: int) -> int:
    """Partial sums of shrink for a row and rank, in the projection that has the most."""
    return max(_pieces(linear, tp) for _, linear in arch.linears())


def _pieces(linear: Linear, tp: int) -> int:
    slices = 1 if linear.leaf in ("o_proj", "down_proj") else _FUSED_SLICES
    return slices * -(-linear.in_per_gpu(tp) // SPLIT_WIDTH)
