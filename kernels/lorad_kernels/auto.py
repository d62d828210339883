"""Which implementation serves a device, decided once per device type."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lorad_kernels.factors import FactorTable
    from lorad_kernels.ops import AttentionBatch, Draws
    from lorad_kernels.segments import LoraSegments


T = TypeVar("T")


class Implementation(Protocol):
    """What every implementation module offers; see `ops` for shapes and formulas."""

    def add_lora(
        self,
        y: Tensor,
        x: Tensor,
        slab: Tensor,
        table: FactorTable,
        slice_starts: Sequence[int],
        segments: LoraSegments,
    ) -> None: ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
    ) -> Tensor: ...

    def row_max(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def greedy_tokens(self, logits: Tensor) -> Tensor: ...

    def draw_tokens(self, logits: Tensor, draws: Draws) -> Tensor: ...

    def take_rows(self, x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor: ...


def implementation(device: torch.device) -> Implementation:
    return _for_type(device.type)


@cache
def _for_type(device_type: str) -> Implementation:
    if device_type == "cpu":
        from lorad_kernels import cpu

        return cpu
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lorad_kernels import gpu

        return gpu
    from lorad_kernels import reference

    return reference


def forward_pass(device: torch.device) -> AbstractContextManager[None]:
    """Inside, operations of this thread may be queued, to run together; at the end they have.

    Anything but an operation of this package must call `finish` before it reads or writes their
    tensors.
    """
    if device.type == "cpu":
        from lorad_kernels.cpu_queue import queued

        return queued()
    return nullcontext()  # a GPU queues by itself


def finish(device: torch.device) -> None:
    """Run what this thread has queued in a `forward_pass`."""
    if device.type == "cpu":
        from lorad_kernels import cpu_threads

        cpu_threads.finish()


def record(work: Callable[[], T]) -> tuple[Callable[[], None], T] | None:
    """What runs again the CPU operations of `work`, and what `work` returns.

    The tensors that `work` makes are filled by each run, and not before. None if anything else
    than an operation of this package, queued on the CPU, takes part.
    """
    from lorad_kernels import cpu_queue

    try:
        recorded, result = cpu_queue.record(work)
    except cpu_queue.NotRecordable:
        return None
    return recorded.run, result


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Compile what a device needs for a serving dtype, so that no step waits for it.

    On the CPU this takes about ten seconds the first time on a machine; the result is kept
    beside the package, or in the user's cache where that cannot be written. Where kernels are
    `compiled_at_launch` there is nothing to do here.
    """
    if device.type == "cpu":
        from lorad_kernels import cpu

        cpu.compile_kernels(dtype)


def compiled_at_launch(device: torch.device) -> bool:
    """Whether kernels are compiled when first launched: a step should, before anybody waits.

    Triton's are, once for each dtype, layout and shape of projections, and for nothing else.
    """
    return device.type == "cuda"


def captures(device: torch.device, head_dim: int) -> bool:
    """Whether a decode step may be captured: no kernel of it takes its work from the host.

    The reference reads contexts and segments on the host, and serves the widest heads.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lorad_kernels.triton_attention import WIDEST_HEAD

        return head_dim <= WIDEST_HEAD
    return device.type == "cpu" and head_dim % 16 == 0
