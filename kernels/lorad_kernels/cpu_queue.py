"""Kernels of a forward pass queued up, and run by one call.

Between two kernels of a small model Python costs more than they do: every kernel streams weights
through the caches, so the interpreter finds nothing of its own there, and each call gives up the
GIL and must win it back from the threads that serve. So a forward pass only writes down what is
to run, as on a CUDA stream, and then all of it runs on one team of threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from numba import carray, int64

from lorad_kernels.cpu_threads import (
    ARGUMENTS,
    COUNT,
    DONE,
    FIRST,
    NEXT,
    Kernel,
    current_queue,
    open_queue,
)
from lorad_kernels.cpu_work import array_at, arrived, call_with

T = TypeVar("T")

# A thread that waits looks at the counter for some 50 microseconds, then sleeps between looks: a
# work item takes longer than that only if the system has put its thread aside, and needs the core.
_LOOKS = 50_000
_SLEEP_MICROSECONDS = 50
# A prefill of 128 tokens that held all its activations, 60 MB, would write each of them to memory
# that no cache has; the first one after some decodes took three times as long.
_MOST_HELD = 2**20  # bytes


def _run_queue(arguments):  # type: ignore[no-untyped-def]
    """Each thread of a team goes through all kernels, which hand out their work items among them.

    A thread waits only for work items that others have begun: one that the system has put aside
    holds nobody up, and catches up later.
    """
    block = carray(arguments, ARGUMENTS)
    kernels = carray(array_at(block[FIRST], int64), 1)
    for i in range(block[COUNT]):
        call_with(kernels[2 * i], kernels[2 * i + 1])
        counters = carray(array_at(kernels[2 * i + 1], int64), 1)
        looks = 0
        while arrived(counters, DONE) < counters[COUNT]:
            looks += 1
            if looks > _LOOKS:
                call_with(block[FIRST + 1], _SLEEP_MICROSECONDS)


QUEUE = Kernel(_run_queue)


class KernelQueue:
    """What is queued on one thread: run by `run`, and by the end of `queued`."""

    def __init__(self) -> None:
        self._calls: list[int] = []
        self._keep: list[object] = []
        self._held = 0

    def add(self, address: int, block: array[int], keep: object) -> None:
        """What `keep` holds lives until the kernel has run: nobody else gets its memory."""
        self._calls += (address, block.buffer_info()[0])
        self._keep += (block, keep)

    def holds(self, nbytes: int) -> None:
        """So much more memory waits for this queue, and cannot be used again before it has run."""
        if self._held + nbytes > _MOST_HELD:
            self.run()
        self._held += nbytes

    def run(self) -> None:
        self._held = 0
        if not self._calls:
            return
        calls, self._calls = array("q", self._calls), []
        _run_all(calls.buffer_info()[0], len(calls) // 2)
        self._keep.clear()


@contextmanager
def queued() -> Iterator[None]:
    """Inside, kernels of this thread are queued: until `cpu_threads.finish`, or the end, or until
    much memory waits for them.

    Inside a `record` they are recorded as all others are.
    """
    if current_queue() is not None:
        yield
        return
    queue = KernelQueue()
    open_queue(queue)
    try:
        yield
        queue.run()
    finally:
        open_queue(None)


class NotRecordable(Exception):
    """Something else than a kernel takes part."""


class _Recording:
    """Keeps kernels, with their tensors, and never runs one."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.blocks: list[array[int]] = []
        self.keep: list[object] = []

    def add(self, address: int, block: array[int], keep: object) -> None:
        self.addresses.append(address)
        self.blocks.append(block)
        self.keep.append(keep)

    def holds(self, nbytes: int) -> None:
        """Nothing to do: a recording keeps everything, for as long as it lives."""

    def run(self) -> None:
        raise NotRecordable


class Recorded:
    """Kernels that can be run again and again, over the same tensors."""

    def __init__(self, recording: _Recording) -> None:
        self._keep = recording.keep
        self._blocks = np.zeros((len(recording.blocks), ARGUMENTS), np.int64)
        for row, block in zip(self._blocks, recording.blocks, strict=True):
            row[: len(block)] = block
        first, stride = self._blocks.ctypes.data, self._blocks.strides[0]
        pairs = [(a, first + i * stride) for i, a in enumerate(recording.addresses)]
        self._calls = np.array(pairs, np.int64)

    def run(self) -> None:
        self._blocks[:, [NEXT, DONE]] = 0
        _run_all(self._calls.ctypes.data, len(self._calls))


def record(work: Callable[[], T]) -> tuple[Recorded, T]:
    """The kernels that `work` would run, and what it returns: tensors that `run` will fill.

    Raises NotRecordable if work calls `finish` anywhere.
    """
    recording = _Recording()
    open_queue(recording)
    try:
        result = work()
    finally:
        open_queue(None)
    return Recorded(recording), result


def _run_all(calls: int, count: int) -> None:
    """Run kernels by a table of their addresses and those of their arguments."""
    QUEUE.run(torch.get_num_threads(), array("q", (0, count, 0, calls, _usleep())))


@cache
def _usleep() -> int:
    """The address of the C library's function."""
    return ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0
