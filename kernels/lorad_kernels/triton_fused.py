"""What lies between a decoder's matmuls on a GPU, each one pass over its rows.

Plain torch takes some thirty launches a layer for these, here it is four. No program looks at
more than one row, and how a row is cut follows from its width alone: it has the same bits in any
batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from lorad_kernels.ops import AttentionBatch

WIDEST_NORM = 16384  # elements of a row that one program holds in registers
SILU_BLOCK = 1024
MAX_BLOCK = 4096  # elements of a row that one program of row_max looks at


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    delta,
    weight,
    out,
    eps,
    width,
    HAS_DELTA: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x[t] += delta[t]; out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight."""
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    row = tl.load(x + start + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        row += tl.load(delta + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + start + columns, row, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(row * row) / width + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + start + columns, (row * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[t, i] = silu(gate_up[t, i]) * gate_up[t, width + i]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_store_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cos,
    sin,
    keys,
    values,
    pages,
    offsets,
    out,
    q_stride,
    k_stride,
    v_stride,
    page_stride,
    token_stride,
    heads,
    dim,
    HALF: tl.constexpr,
):
    """One head of one row: a head of q turns into `out`; one of k turns into its page, with v's.

    Program axis 1 runs over the heads of q, then over those of k and v.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = dim // 2
    pairs = tl.arange(0, HALF)
    inside = pairs < half
    c = tl.load(cos + row * dim + pairs, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * dim + pairs, mask=inside, other=0.0).to(tl.float32)
    if head < heads:
        source = q + row * q_stride + head * dim + pairs
        target = out + (row * heads + head) * dim + pairs
    else:
        own = (head - heads) * dim + pairs
        place = tl.load(pages + row) * page_stride + tl.load(offsets + row) * token_stride + own
        source = k + row * k_stride + own
        target = keys + place
        passing = v + row * v_stride + own
        tl.store(values + place, tl.load(passing, mask=inside), mask=inside)
        tl.store(values + place + half, tl.load(passing + half, mask=inside), mask=inside)
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _greatest(value, index):  # type: ignore[no-untyped-def]
    """The greatest of a block, NaN if there is one, and the index of its first place."""
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    numbers = tl.where(value != value, float("-inf"), value)
    best, where = tl.max(numbers, 0, return_indices=True, return_indices_tie_break_left=True)
    place = tl.sum(tl.where(tl.arange(0, index.shape[0]) == where, index, 0), 0)
    return tl.where(broken, float("nan"), best), place


@triton.jit  # type: ignore[untyped-decorator]
def block_max_kernel(  # type: ignore[no-untyped-def]
    x, tops, places, width, blocks, BLOCK: tl.constexpr
):
    """tops[t, p], places[t, p] = the greatest of piece p of x[t], and its column."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * width + columns, mask=columns < width, other=float("-inf"))
    best, where = _greatest(value.to(tl.float32), columns)
    tl.store(tops + row * blocks + block, best)
    tl.store(places + row * blocks + block, where)


@triton.jit  # type: ignore[untyped-decorator]
def row_max_kernel(  # type: ignore[no-untyped-def]
    tops, places, values, indices, blocks, BLOCKS: tl.constexpr
):
    """values[t], indices[t] = the greatest of tops[t], and its column."""
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, BLOCKS)
    inside = pieces < blocks
    value = tl.load(tops + row * blocks + pieces, mask=inside, other=float("-inf"))
    columns = tl.load(places + row * blocks + pieces, mask=inside, other=0)
    best, where = _greatest(value, columns)
    tl.store(values + row, best)
    tl.store(indices + row, where.to(tl.int64))


def norms(x: Tensor, delta: Tensor | None, weight: Tensor) -> bool:
    """Whether `add_rms_norm` computes this dtype and layout."""
    dense = weight.is_contiguous() and (delta is None or delta.is_contiguous())
    return dense and weight.dtype is torch.float32 and x.shape[1] <= WIDEST_NORM


def norm_warps(width: int) -> int:
    """So many that a thread holds no more than 32 elements."""
    return max(1, min(16, int(triton.next_power_of_2(width)) // 512))


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    run: Any = add_norm_kernel[(rows,)]
    run(
        x, x if delta is None else delta, weight, out, eps, width,
        HAS_DELTA=delta is not None, WIDTH=triton.next_power_of_2(width),
        num_warps=norm_warps(width),
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`ops.silu_mul` of a contiguous tensor."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    run: Any = silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))]
    run(gate_up, out, width, BLOCK=SILU_BLOCK, num_warps=4)
    return out


def rotates(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `rotate_and_store` computes this dtype and layout."""
    tensors = (q, k, v, k_cache, v_cache)
    packed = all(t.stride(-1) == 1 and t.stride(-2) == t.shape[-1] for t in tensors)
    alike = all(t.dtype is q.dtype for t in (k, v, k_cache, v_cache))
    return packed and alike and k_cache.stride() == v_cache.stride() and cos.is_contiguous()


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    run: Any = rotate_store_kernel[(rows, heads + k.shape[1])]
    run(
        q, k, v, cos, sin, k_cache, v_cache, batch.kv_pages, batch.kv_offsets, out,
        q.stride(0), k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
        heads, dim, HALF=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
    return out


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.row_max` of a contiguous tensor, in two launches so that few rows fill the device."""
    rows, width = x.shape
    blocks = triton.cdiv(width, MAX_BLOCK)
    tops = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=x.device)
    first: Any = block_max_kernel[(rows, blocks)]
    first(x, tops, places, width, blocks, BLOCK=MAX_BLOCK, num_warps=8)
    values = torch.empty(rows, dtype=torch.float32, device=x.device)
    indices = torch.empty(rows, dtype=torch.int64, device=x.device)
    second: Any = row_max_kernel[(rows,)]
    second(
        tops, places, values, indices, blocks,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return values, indices
