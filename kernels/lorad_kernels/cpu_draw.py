"""Drawing tokens on the CPU: a row's weights are computed once and stay in the cache.

Top-k and top-p look for the least weight that stays by bisection over float32's bits, which for
positive numbers are ordered as the numbers are: no sort, and exact. Only weights above a floor
that certainly lies below the bound are looked at again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from numba import carray, float32, float64, int64, uint16
from torch import Tensor

from lorad_kernels.cpu_simd import count_from, exp_and_sum, largest, set_scaled, sum_from
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel
from lorad_kernels.cpu_work import array_at, float_from, work_items

if TYPE_CHECKING:
    from lorad_kernels.ops import Draws

_BLOCK = 512  # weights that are summed in float32
# The vector exponential ends at e^-87; nothing below is ever drawn.
_LEAST = 2e-38
_FLOORS = (2.0**-6, 2.0**-12, 2.0**-24, _LEAST)


@numba.njit
def _mass_from(weights, count, least):  # type: ignore[no-untyped-def]
    """The sum of the weights that are at least `least`, in float64 but for short blocks."""
    mass = 0.0
    for block in range(0, count, _BLOCK):
        mass += sum_from(weights, block, min(_BLOCK, count - block), least)
    return mass


@numba.njit
def _number(bits):  # type: ignore[no-untyped-def]
    return float_from(int64(bits))


@numba.njit
def _bits(number):  # type: ignore[no-untyped-def]
    cell = np.empty(1, np.float32)
    cell[0] = number
    return int64(cell.view(np.uint32)[0])


@numba.njit
def _kth(weights, count, k):  # type: ignore[no-untyped-def]
    """The k-th largest of the weights, all positive and at most 1; k <= count."""
    low, high = _bits(_LEAST), _bits(1.0) + 1  # enough are at least the one, too few the other
    while high - low > 1:
        middle = (low + high) // 2
        if count_from(weights, 0, count, _number(middle)) >= k:
            low = middle
        else:
            high = middle
    return _number(low)


@numba.njit
def _nucleus(weights, count, least, target):  # type: ignore[no-untyped-def]
    """The least weight, from `least` on, of which all larger ones hold less than `target`."""
    low, high = _bits(least) - 1, _bits(1.0)
    while high - low > 1:
        middle = (low + high) // 2
        if _mass_from(weights, count, _number(middle + 1)) < target:
            high = middle
        else:
            low = middle
    return _number(high)


@numba.njit
def _least_kept(weights, width, total, top_k, top_p, min_p, some):  # type: ignore[no-untyped-def]
    """The least weight that may be drawn; `some` has room for all weights."""
    least = float32(_LEAST)
    if 0 < top_k < width or top_p < 1.0:
        wanted = top_k if 0 < top_k < width else 0
        floor = float32(_LEAST)
        for each in _FLOORS:
            floor = float32(each)
            enough = count_from(weights, 0, width, floor) >= wanted
            if enough and (top_p >= 1.0 or _mass_from(weights, width, floor) >= top_p * total):
                break
        count = 0
        for i in range(width):
            if weights[i] >= floor:
                some[count] = weights[i]
                count += 1
        # Fewer than wanted are left only where the others can never be drawn.
        if 0 < wanted <= count:
            least = max(least, _kth(some, count, wanted))
            total = _mass_from(some, count, least)
        if top_p < 1.0:
            least = max(least, _nucleus(some, count, least, max(top_p * total, 1e-300)))
    return max(least, float32(min_p))


@numba.njit
def _at(weights, width, least, uniform):  # type: ignore[no-untyped-def]
    """The first weight where what is kept so far holds more than a share `uniform` of it all."""
    target = uniform * _mass_from(weights, width, least)
    before = 0.0
    for block in range(0, width, _BLOCK):
        count = min(_BLOCK, width - block)
        inside = sum_from(weights, block, count, least)
        if before + inside > target:
            found = block
            for i in range(block, block + count):
                if weights[i] >= least:
                    before, found = before + weights[i], i
                    if before > target:
                        break
            return found
        before += inside
    found = width - 1  # sums that were rounded differently: the last one kept
    while weights[found] < least:
        found -= 1
    return found


@numba.njit
def _draw(arguments, dtype):  # type: ignore[no-untyped-def]
    logits = carray(array_at(arguments[FIRST], dtype), 1)
    width = arguments[FIRST + 1]
    temperatures = carray(array_at(arguments[FIRST + 2], float64), 1)
    top_ks = carray(array_at(arguments[FIRST + 3], int64), 1)
    top_ps = carray(array_at(arguments[FIRST + 4], float64), 1)
    min_ps = carray(array_at(arguments[FIRST + 5], float64), 1)
    uniforms = carray(array_at(arguments[FIRST + 6], float64), 1)
    tokens = carray(array_at(arguments[FIRST + 7], int64), 1)
    weights = np.empty((width + _BLOCK) // _BLOCK * _BLOCK, np.float32)
    some = np.empty(width, np.float32)
    for row in work_items(arguments):
        start, total = row * width, 0.0
        top, scale = largest(logits, start, width), float32(1.0 / temperatures[row])
        for block in range(0, width, _BLOCK):
            count = min(_BLOCK, width - block)
            set_scaled(weights, block, count, logits, start + block, float32(1.0))
            total += exp_and_sum(weights, block, count, top, scale)
        least = _least_kept(weights, width, total, top_ks[row], top_ps[row], min_ps[row], some)
        tokens[row] = _at(weights, width, least, uniforms[row])


def _draw_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _draw(carray(arguments, ARGUMENTS), uint16)


def _draw_float32(arguments):  # type: ignore[no-untyped-def]
    _draw(carray(arguments, ARGUMENTS), float32)


KERNELS = {torch.bfloat16: Kernel(_draw_bfloat16), torch.float32: Kernel(_draw_float32)}


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What to compile for a serving dtype; penalties make float32 of a row."""
    return tuple(KERNELS.values()) if dtype in KERNELS else ()


def serves(logits: Tensor) -> bool:
    """Whether `draw_tokens` takes this dtype and layout."""
    return logits.dtype in KERNELS and logits.is_contiguous()


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    # The exponentials make it dearer than its bytes.
    KERNELS[logits.dtype](
        rows, 4 * logits.nbytes, logits, width,
        draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform, tokens,
    )  # fmt: skip
    return tokens
