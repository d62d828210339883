"""Adapters in page-locked memory: what is cut, given back, and what happens without any."""

from __future__ import annotations

import gc
import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.memory import pinned_arena
from lorad.memory.pinned_arena import PinnedArena, cuda_arena

KIB = 2**10


class Pages:
    """Locked ranges; a limit as of RLIMIT_MEMLOCK."""

    def __init__(self, limit: int = 2**40) -> None:
        self.limit, self.locked = limit, dict[int, int]()

    def lock(self, address: int, nbytes: int) -> None:
        if sum(self.locked.values()) + nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory\nadvice")
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def arena(self, max_bytes: int, segment_bytes: int) -> PinnedArena:
        return PinnedArena(max_bytes, segment_bytes, self.lock, self.unlock)

    def holds(self, data: torch.Tensor) -> bool:
        start = data.data_ptr()
        stop = start + data.numel() * data.element_size()
        return any(at <= start and stop <= at + size for at, size in self.locked.items())


def adapter(nbytes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nbytes // dtype.itemsize, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_kept_is_the_same_in_locked_memory(dtype):
    pages = Pages()
    arena = pages.arena(8 * KIB, 8 * KIB)
    for seed in range(3):
        data = adapter(2 * KIB, seed, dtype)
        kept = arena.keep(data)
        assert pages.holds(kept)
        assert kept.data_ptr() % 64 == 0
        assert kept.dtype == dtype
        assert torch.equal(kept, data)


def test_bytes_are_what_the_adapters_have_and_no_power_of_two():
    pages = Pages()
    arena = pages.arena(10 * 80 * KIB, 10 * 80 * KIB)
    kept = [arena.keep(adapter(80 * KIB)) for _ in range(10)]
    assert all(map(pages.holds, kept))
    assert arena.nbytes == sum(pages.locked.values()) == 10 * 80 * KIB
    assert not pages.holds(arena.keep(adapter(64)))


def test_segments_follow_when_they_are_needed():
    pages = Pages()
    arena = pages.arena(10 * KIB, 4 * KIB)
    assert arena.nbytes == 4 * KIB, "one is locked at the start"
    kept = [arena.keep(adapter(3 * KIB)) for _ in range(2)]
    assert arena.nbytes == 8 * KIB
    assert not pages.holds(arena.keep(adapter(5 * KIB))), "larger than a segment"
    kept += [arena.keep(adapter(2 * KIB)), arena.keep(adapter(KIB)), arena.keep(adapter(KIB))]
    assert all(map(pages.holds, kept))
    assert arena.nbytes == 10 * KIB
    assert not pages.holds(arena.keep(adapter(64)))


def test_the_smallest_hole_is_taken():
    pages = Pages()
    arena = pages.arena(8 * KIB, 8 * KIB)
    first, _wall, second, _rest = (arena.keep(adapter(n * KIB)) for n in (3, 1, 2, 2))
    place = second.data_ptr()
    del first, second
    assert arena.keep(adapter(2 * KIB)).data_ptr() == place


def test_memory_is_free_when_the_last_view_of_it_is_gone():
    pages = Pages()
    arena = pages.arena(4 * KIB, 4 * KIB)
    kept = arena.keep(adapter(4 * KIB))
    part, place = kept[100:200].view(torch.int16), kept.data_ptr()
    del kept
    assert not pages.holds(arena.keep(adapter(64))), "somebody may read a part of it"
    del part
    assert arena.keep(adapter(4 * KIB)).data_ptr() == place


def test_it_may_be_let_go_on_another_thread():
    pages = Pages()
    arena = pages.arena(4 * KIB, 4 * KIB)
    held = [arena.keep(adapter(4 * KIB))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pages.holds(arena.keep(adapter(4 * KIB)))


def test_memory_outlives_the_arena_while_somebody_reads_it_and_is_unlocked_then():
    pages = Pages()
    arena = pages.arena(4 * KIB, 4 * KIB)
    data = adapter(KIB)
    kept = arena.keep(data)
    del arena
    gc.collect()
    assert pages.holds(kept)
    assert torch.equal(kept, data)
    del kept
    assert pages.locked == {}


def test_without_locked_memory_adapters_are_kept_as_they_came_and_it_is_told_once(caplog):
    pages = Pages(limit=0)
    data = adapter(KIB)
    arena = pages.arena(4 * KIB, KIB)
    for _ in range(3):
        assert arena.keep(data) is data
    told = [record.getMessage() for record in caplog.records]
    assert arena.nbytes == 0
    assert len(told) == 2
    assert "cannot be page-locked (CUDA error: out of memory)" in told[0]
    assert "ulimit -l" in told[0]
    assert "no page-locked memory is left" in told[1]


def test_what_is_locked_stays_of_use_when_no_more_can_be():
    pages = Pages(limit=4 * KIB)
    arena = pages.arena(16 * KIB, 4 * KIB)
    kept = arena.keep(adapter(4 * KIB))
    assert pages.holds(kept)
    assert not pages.holds(arena.keep(adapter(KIB)))
    del kept
    assert pages.holds(arena.keep(adapter(KIB)))


def test_the_arena_of_a_host_cache_has_its_bounds_and_some_for_what_arrives(monkeypatch, caplog):
    pages = Pages()
    monkeypatch.setattr(pinned_arena, "_lock", pages.lock)
    monkeypatch.setattr(pinned_arena, "_unlock", pages.unlock)
    monkeypatch.setattr(pinned_arena, "_SEGMENT", 16 * KIB)
    caplog.set_level(logging.INFO)
    by_bytes = cuda_arena(8 * KIB, max_adapters=100, largest=KIB)
    assert by_bytes.nbytes == 9 * KIB
    by_count = cuda_arena(2**40, max_adapters=8, largest=KIB)
    assert by_count.nbytes == 9 * KIB
    in_segments = cuda_arena(2**40, max_adapters=256, largest=32 * KIB)
    assert in_segments.nbytes == 4 * 32 * KIB
    assert "page-locked 9216 bytes of host memory" in caplog.text


def test_locking_is_cudas_and_its_error_is_not_left_to_the_next_kernel(monkeypatch):
    """The runtime here fails once: the call itself, then whoever launches a kernel."""
    calls: list[object] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *range_and_flags: calls.append(range_and_flags) or 2,
        cudaHostUnregister=calls.append,
        cudaError=int,
        cudaGetErrorString=lambda status: {2: "out of memory"}[status],
    )

    def launches(*_: object, device: str) -> None:
        calls.append(device)
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", launches)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        pinned_arena._lock(4096, KIB)
    assert calls == [(4096, KIB, 0), "cuda"]
    cudart.cudaHostRegister = lambda *range_and_flags: 0
    pinned_arena._lock(4096, KIB)
    pinned_arena._unlock(4096)
    assert calls[2:] == [4096]


@given(
    operations=st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60),
    segment=st.sampled_from([1024, 4096]),
)
@settings(max_examples=150, deadline=None)
def test_nothing_overlaps_and_everything_comes_back(operations, segment):
    pages = Pages()
    arena = pages.arena(4096, segment)
    kept: list[tuple[torch.Tensor, int]] = []
    for number, (take, size) in enumerate(operations):
        if take:
            data = torch.full((size,), number % 251, dtype=torch.uint8)
            kept.append((arena.keep(data), number % 251))
        elif kept:
            kept.pop(size % len(kept))
        assert all(bool((each == value).all()) for each, value in kept)
    held = sum(each.numel() for each, _ in kept if pages.holds(each))
    assert held <= arena.nbytes == sum(pages.locked.values())
    kept.clear()
    again = [arena.keep(torch.zeros(segment, dtype=torch.uint8)) for _ in range(4096 // segment)]
    assert all(map(pages.holds, again)), "no hole was lost"
