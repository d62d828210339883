"""Runs compiled kernels on torch's own OpenMP threads.

A second thread pool (numba brings one) would fight torch's for the cores: OpenMP's threads spin
for milliseconds after each matmul. So kernels are plain C functions, and the OpenMP run-time that
torch has already loaded runs them on the team that ran its last matmul. Where none is found, a
kernel runs on the calling thread alone: the result is the same.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numba
import torch
from numba import types
from torch import Tensor

# The first slots of a kernel's arguments: work items claimed, in all, and done.
NEXT, COUNT, DONE, FIRST = 0, 1, 2, 3
ARGUMENTS = 24
_KERNEL = types.void(types.CPointer(types.int64))
# Below this many bytes read, waking the other threads costs more than they save.
_SERIAL_BYTES = 64 * 1024
_CONSTANTS: list[array[int]] = []


class Queue(Protocol):
    """Takes kernels to run them later, in the order they came in; see `cpu_queue`."""

    def add(self, address: int, block: array[int], keep: object) -> None: ...

    def holds(self, nbytes: int) -> None: ...

    def run(self) -> None: ...


class _Queues(threading.local):
    """The queue that is open on this thread."""

    current: Queue | None = None


_queues = _Queues()


def current_queue() -> Queue | None:
    return _queues.current


def open_queue(queue: Queue | None) -> None:
    _queues.current = queue


def finish() -> None:
    """Run what this thread has queued: to be called before anything else than a kernel reads
    or writes a kernel's tensors."""
    if _queues.current is not None:
        _queues.current.run()


class Kernel:
    """A function over its arguments `int64[n]`, compiled when first used and kept on disk.

    It claims work items from `arguments[NEXT]` until `arguments[COUNT]` are taken, and counts
    those done in `arguments[DONE]`, so several threads may run it at once over the same arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._address = 0

    @property
    def address(self) -> int:
        if not self._address:
            self.compile()
        return self._address

    def compile(self) -> None:
        """About a second the first time on a machine, then read from the disk."""
        if not self._address:
            _drop_stale(self._function.__name__)
            # The compiled function must outlive its address.
            self._compiled = numba.cfunc(_KERNEL, cache=True)(self._function)
            self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)
            self._address = self._compiled.address

    def __call__(
        self, items: int, work_bytes: int, *arguments: int | Tensor, keep: object = None
    ) -> None:
        """Run over `items` work items that read about `work_bytes` together.

        A tensor stands for the address of its first element. Where a queue is open on this
        thread the kernel runs later; its tensors, and what `keep` holds, live until then.
        """
        address = self.address
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        block = array("q", (0, items, 0, *numbers))
        queue = _queues.current
        if queue is not None:
            queue.add(address, block, (arguments, keep))
            return
        self.run(1 if work_bytes < _SERIAL_BYTES else min(items, torch.get_num_threads()), block)

    def run(self, threads: int, block: array[int]) -> None:
        address, pointer, team = self.address, block.buffer_info()[0], _gomp_parallel()
        if threads < 2 or team is None:
            self._alone(pointer)
        else:
            team(address, pointer, threads, 0)


def _drop_stale(name: str) -> None:
    """Forget a compiled kernel that is older than any of the sources it is made of.

    numba looks only at the file that holds the kernel itself, not at what it calls.
    """
    folder = Path(__file__).parent
    newest = max(source.stat().st_mtime for source in folder.glob("cpu_*.py"))
    for index in (folder / "__pycache__").glob(f"*.{name}-*.nbi"):
        with suppress(OSError):  # another process was faster, or the folder is read-only
            if index.stat().st_mtime < newest:
                index.unlink()


@lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """A float32 as a kernel's argument."""
    bits: int = struct.unpack("i", struct.pack("f", value))[0]
    return bits


@cache
def constant(values: tuple[int, ...]) -> int:
    """The address of an int64 array that is never freed: for the few that a model has."""
    _CONSTANTS.append(array("q", values))
    return _CONSTANTS[-1].buffer_info()[0]


@cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP run-time in this process."""
    for path in _loaded_openmp():
        library = ctypes.CDLL(path)
        if hasattr(library, "GOMP_parallel"):
            function = library.GOMP_parallel
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.restype = None
            return function
    return None


def _loaded_openmp() -> list[str]:
    """OpenMP run-times mapped into this process, the one torch brings first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 4 and "/" in line}
    names = ("libgomp", "libiomp5", "libomp")
    found = [path for path in paths if Path(path).name.startswith(names)]
    return sorted(found, key=lambda path: ("torch" not in path, path))
