"""Page-locked host memory, from which the adapters are cut that wait for the device.

torch's own allocator for such memory rounds every block up to a power of two and keeps it for
ever, so that a cache of adapters takes up to twice what it counts; and each new block makes the
device wait. Here a few large segments are locked, the first at the start, and adapters take what
they need of them.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

Lock = Callable[[int, int], None]  # address and bytes; raises RuntimeError or OSError
Unlock = Callable[[int], None]  # address

_ALIGNMENT = 64
_SEGMENT = 2**30  # bytes locked at a time: some tenths of a second, on the loader's thread
_ADAPTERS_IN_SEGMENT = 4  # at least: what is left over at its end is less than one
_IN_TRANSIT = 8  # an eighth more than the cache may hold, for adapters that are not in it yet


class PinnedArena:
    """`keep` is called on one thread; where it is let go, a copy may be on any."""

    def __init__(self, max_bytes: int, segment_bytes: int, lock: Lock, unlock: Unlock) -> None:
        self._left = max_bytes  # not locked yet
        self._segment_bytes = segment_bytes
        self._lock, self._unlock = lock, unlock
        self._segments: list[_Segment] = []
        self._told_full = False
        self._grow()

    @property
    def nbytes(self) -> int:
        """Bytes that are locked."""
        return sum(segment.nbytes for segment in self._segments)

    def keep(self, data: Tensor) -> Tensor:
        """The same in page-locked memory, or `data` itself where there is none left.

        The memory is free again when the last tensor that shares it is gone. Whoever has the
        device copy from it holds one until the copy has ended.
        """
        cut = self._cut(data.numel() * data.element_size())
        if cut is None:
            if not self._told_full:
                log.warning("no page-locked memory is left: some adapters are copied without")
                self._told_full = True
            return data
        return torch.from_numpy(cut).view(data.dtype).view(data.shape).copy_(data)

    def _cut(self, nbytes: int) -> NDArray[np.uint8] | None:
        while True:
            for segment in self._segments:
                if (cut := segment.cut(nbytes)) is not None:
                    return cut
            if nbytes > min(self._segment_bytes, self._left) or not self._grow():
                return None

    def _grow(self) -> bool:
        """Lock one segment more; False when none may follow."""
        nbytes = min(self._segment_bytes, self._left)
        if nbytes <= 0:
            return False
        try:
            self._segments.append(_Segment(nbytes, self._lock, self._unlock))
        except (RuntimeError, OSError) as error:
            self._left = 0
            log.warning(
                "%d bytes of host memory cannot be page-locked (%s); adapters beyond %d bytes are "
                "copied without, which takes longer: raise the limit of locked memory (ulimit -l), "
                "or lower memory.host_cache_bytes",
                nbytes,
                str(error).partition("\n")[0],
                self.nbytes,
            )
            return False
        self._left -= nbytes
        return True


class _Segment:
    """One locked block. The smallest hole that is large enough is taken."""

    def __init__(self, nbytes: int, lock: Lock, unlock: Unlock) -> None:
        self.nbytes = nbytes
        memory = mmap.mmap(-1, nbytes)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self._bytes.fill(0)  # the pages come now, not in the driver, where the steps would wait
        address = self._bytes.ctypes.data
        lock(address, nbytes)
        weakref.finalize(self._bytes, unlock, address).atexit = False
        self._holes = [(0, nbytes)]  # (start, length), by start; no two touch
        self._returned: deque[tuple[int, int]] = deque()  # from any thread

    def cut(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Bytes that belong to the array, and to what shares its memory, until all are gone."""
        while self._returned:
            self._give_back(*self._returned.popleft())
        length = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        fitting = (hole for hole in self._holes if hole[1] >= length)
        hole = min(fitting, key=lambda hole: hole[1], default=None)
        if hole is None:
            return None
        start, room = hole
        self._holes.remove(hole)
        if room > length:
            insort(self._holes, (start + length, room - length))
        cut: NDArray[np.uint8] = self._bytes[start : start + nbytes]
        weakref.finalize(cut, self._returned.append, (start, length)).atexit = False
        return cut

    def _give_back(self, start: int, length: int) -> None:
        insort(self._holes, (start, length))
        place = self._holes.index((start, length))
        if place + 1 < len(self._holes) and self._holes[place + 1][0] == start + length:
            length += self._holes.pop(place + 1)[1]
        if place and sum(self._holes[place - 1]) == start:
            start, before = self._holes[place - 1]
            length += before
            place -= 1
            del self._holes[place]
        self._holes[place] = (start, length)


def cuda_arena(host_bytes: int, max_adapters: int, largest: int) -> PinnedArena:
    """Page-locked memory for a host cache of these bounds, `largest` being an adapter's most."""
    cached = min(host_bytes, max_adapters * largest)
    segment = max(_SEGMENT, _ADAPTERS_IN_SEGMENT * largest)
    arena = PinnedArena(cached + cached // _IN_TRANSIT, segment, _lock, _unlock)
    log.info("page-locked %d bytes of host memory for adapters", arena.nbytes)
    return arena


def _lock(address: int, nbytes: int) -> None:
    cudart = torch.cuda.cudart()
    if not (status := int(cudart.cudaHostRegister(address, nbytes, 0))):
        return
    # The runtime tells the error once more, to whoever launches the next kernel.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    raise RuntimeError(f"CUDA error: {cudart.cudaGetErrorString(cudart.cudaError(status))}")


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
