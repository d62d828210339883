"""Base projections of few rows on the CPU: weights streamed once, near the memory's speed.

oneDNN's matmul behind `torch.nn.functional.linear` reorders the weights in every call, which for
a few rows costs more than the product. Up to numbers of rows measured per shape, kernels of our
own read them in place instead: dot products for very few rows, the matrix unit for some more.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numba
import numpy as np
import torch
from numba import carray, float32, uint16
from torch import Tensor
from torch.nn import functional

from lorad_kernels import cpu_activations, cpu_amx
from lorad_kernels.cpu_dots import dot_strip, strip_rows
from lorad_kernels.cpu_queue import queued
from lorad_kernels.cpu_simd import add_scaled, set_scaled
from lorad_kernels.cpu_threads import ARGUMENTS, FIRST, Kernel, finish
from lorad_kernels.cpu_work import array_at, work_items

_COLUMNS = 64  # rows of the weight in a work item
_AHEAD = 8  # rows of the weight between what is read and what is fetched
# Which kernel serves how many rows is measured at these; more rows are left to oneDNN.
MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PACKED_FOR_ROWS = 32
_MOST_FOR_DOTS = 16  # a dot product per element loses against any matmul above that
_MEASURED_BYTES = 32 * 2**20  # of weights of one shape: more than the caches hold


@numba.njit
def _linear(arguments, dtype):  # type: ignore[no-untyped-def]
    x = carray(array_at(arguments[FIRST], dtype), 1)
    x_stride, count, width = arguments[FIRST + 1], arguments[FIRST + 2], arguments[FIRST + 3]
    weight = carray(array_at(arguments[FIRST + 4], dtype), 1)
    features = arguments[FIRST + 5]
    y = carray(array_at(arguments[FIRST + 6], dtype), 1)
    bias = carray(array_at(arguments[FIRST + 7], dtype), 1)
    has_bias = arguments[FIRST + 7] != 0
    rows = strip_rows(count)
    sums = np.empty(4 * _COLUMNS, np.float32)
    one = float32(1.0)
    for item in work_items(arguments):
        first = item * _COLUMNS
        columns = min(_COLUMNS, features - first)
        for t in range(0, count, rows):
            # Only the first rows fetch the weight; the others find it in the cache.
            dot_strip(
                rows, x, t * x_stride, x_stride, count - t, weight, first * width, width,
                columns, _AHEAD * width if t == 0 else 0, width, sums, 0, _COLUMNS,
            )  # fmt: skip
            for i in range(min(rows, count - t)):
                if has_bias:
                    add_scaled(sums, i * _COLUMNS, columns, bias, first, one)
                set_scaled(y, (t + i) * features + first, columns, sums, i * _COLUMNS, one)


def _linear_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _linear(carray(arguments, ARGUMENTS), uint16)


def _linear_float32(arguments):  # type: ignore[no-untyped-def]
    _linear(carray(arguments, ARGUMENTS), float32)


KERNELS = {torch.bfloat16: Kernel(_linear_bfloat16), torch.float32: Kernel(_linear_float32)}


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What to compile for a serving dtype."""
    return (KERNELS[dtype],) if dtype in KERNELS else ()


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[T, in]` times weight `[out, in]` transposed, plus bias: `[T, out]`.

    Every row comes out alike in any batch.
    """
    features, width = weight.shape
    y = cpu_activations.empty((x.shape[0], features), x.dtype)
    KERNELS[x.dtype](
        -(-features // _COLUMNS), weight.numel() * weight.element_size(),
        x, x.stride(0), x.shape[0], width, weight, features, y, 0 if bias is None else bias,
    )  # fmt: skip
    return y


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> y


class CpuLinear:
    """A base projection, by the fastest kernel for each number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._packed: Tensor | None = None
        self._kernels: tuple[Product | None, ...] = ()  # by index in MEASURED_ROWS

    @property
    def weight(self) -> Tensor:
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        index = bisect_left(MEASURED_ROWS, x.shape[0])
        kernel = self._kernels[index] if index < len(self._kernels) else None
        if kernel is not None and x.shape[0] and x.stride(1) == 1:
            return kernel(x, self._weight, self._bias)
        return self._by_onednn(x)

    def _by_onednn(self, x: Tensor) -> Tensor:
        finish()
        if x.dtype is torch.bfloat16 and self._packed is None:
            return _multiply(x, self._weight, self._bias)
        if self._packed is None:
            return functional.linear(x, self._weight, self._bias)
        return _multiply_packed(x, self._packed, self._bias)

    def pack(self) -> None:
        """Keep the weight in oneDNN's own layout too, so that no call reorders it."""
        with torch.inference_mode():
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._packed = reorder(self._weight, _PACKED_FOR_ROWS)

    def choose(self, kernels: Sequence[Product | None]) -> None:
        """What serves up to each of MEASURED_ROWS; None is oneDNN."""
        self._kernels = tuple(kernels)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear`, into memory of our choice."""
    y = cpu_activations.empty((x.shape[0], weight.shape[0]), x.dtype)
    if bias is None:
        return torch.mm(x, weight.T, out=y)
    return torch.addmm(bias, x, weight.T, out=y)


def _multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def tune(linears: Sequence[CpuLinear], spare_bytes: int, seconds: float = 3.0) -> None:
    """Choose the kernels; pack the weights if copies are needed and fit in `spare_bytes`.

    With the matrix unit no copy is needed: oneDNN is left with so many rows that reordering the
    weights is a small part of the work, and copies would not lie on huge pages.

    Measured per weight shape over several layers, so that weights come from memory as they do
    when a model runs. Stops measuring when `seconds` are over. Only bfloat16 is tuned: float32
    has nothing to reorder.
    """
    served = [linear for linear in linears if linear.weight.dtype is torch.bfloat16]
    end = time.perf_counter() + seconds
    slow = [linear for linear in served if not cpu_amx.serves(linear.weight)]
    if sum(w.weight.nbytes for w in slow) <= spare_bytes and torch.backends.mkldnn.is_available():
        for linear in slow:
            linear.pack()
    for group in _by_shape(served).values():
        some = group[: 1 + _MEASURED_BYTES // group[0].weight.nbytes]
        chosen: list[Product | None] = []
        while len(chosen) < len(MEASURED_ROWS) and time.perf_counter() < end:
            chosen.append(_fastest(some, MEASURED_ROWS[len(chosen)]))
        for linear in group:
            linear.choose([*chosen, *_unmeasured(linear.weight)[len(chosen) :]])


def _unmeasured(weight: Tensor) -> list[Product | None]:
    """What is likely best where no time was left to measure."""
    more = cpu_amx.multiply if cpu_amx.serves(weight) else None
    return [few_rows if rows <= 2 else more for rows in MEASURED_ROWS]


def _by_shape(linears: Sequence[CpuLinear]) -> dict[torch.Size, list[CpuLinear]]:
    groups: dict[torch.Size, list[CpuLinear]] = {}
    for linear in linears:
        groups.setdefault(linear.weight.shape, []).append(linear)
    return groups


def _fastest(group: Sequence[CpuLinear], rows: int) -> Product | None:
    # oneDNN looks better here than between other work, which leaves its code and tables cold.
    candidates: list[Product | None] = [None]
    if cpu_amx.serves(group[0].weight):
        candidates = [cpu_amx.multiply]
    if rows <= _MOST_FOR_DOTS:
        candidates.append(few_rows)
    x = torch.zeros(rows, group[0].weight.shape[1], dtype=torch.bfloat16)
    # In turns, so that a slow spell of the machine meets all of them.
    turns = [[_seconds(group, x, kernel) for kernel in candidates] for _ in range(4)]
    least = [min(times) for times in zip(*turns, strict=True)]
    return candidates[least.index(min(least))]


def _seconds(group: Sequence[CpuLinear], x: Tensor, kernel: Product | None) -> float:
    for linear in group:
        linear.choose([kernel] * len(MEASURED_ROWS))
    start = time.perf_counter()
    with queued():
        for linear in group:
            linear(x)
    return time.perf_counter() - start
