"""Makes a contiguous run out of scattered free pages, by moving what lies between.

Two steps, both pure arithmetic over the pool's books. Pages of K and V can go anywhere, so the
cheapest window is one without adapters, and of those the one with the fewest such pages. Only
when adapters are so scattered that no window is long enough do adapters move: each slides down
over the free pages below it, which collects those pages above it. Whoever asks for no more
pages than are free gets them, whatever lies where.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from operator import sub

from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab

_WALL = 1 << 40  # the weight of an adapter's page: no window holds one
_WEIGHTS = (0, 1, _WALL, _WALL)  # free, K and V, adapter, reserved


def best_window(owners: bytes, length: int) -> range | None:
    """The `length` pages without an adapter that hold the fewest pages of K and V."""
    sums = list(accumulate(map(_WEIGHTS.__getitem__, owners), initial=0))
    weights = list(map(sub, sums[length:], sums))
    if not weights or (least := min(weights)) >= _WALL:
        return None
    start = weights.index(least)
    return range(start, start + length)


def adapters_to_slide(pool: PagePool, length: int) -> list[int]:
    """First pages of the adapters, from the bottom, that have to slide down for a window.

    Of all neighbouring adapters whose gaps together are long enough, those with the fewest
    pages. There are some whenever `length` pages are free.
    """
    runs = pool.runs()
    ends = [0, *(start + count for start, count in runs)]
    gaps = list(zip(ends, [*(start for start, _ in runs), pool.num_pages], strict=True))
    owners = pool.owners()
    free = [owners.count(0, start, end) for start, end in gaps]
    best: list[int] = []
    cost = pool.num_pages + 1
    first = 0
    collected = moved = 0
    for last in range(1, len(gaps)):
        collected += free[last - 1]
        moved += runs[last - 1][1]
        size = gaps[last][1] - gaps[last][0]
        while first + 1 < last and collected - free[first] + size >= length:
            collected -= free[first]
            moved -= runs[first][1]
            first += 1
        if collected + size >= length and moved < cost:
            cost = moved
            best = [start for start, _ in runs[first:last]]
    return best


class Relocator:
    """Runs for adapters, by moving at most `pages_per_step` pages of K and V in a step.

    A longer clearing goes on in the next steps; until then its window is reserved. One adapter
    that slides may alone be longer than the bound: it moves whole.
    """

    def __init__(
        self,
        pool: PagePool,
        slab: Slab,
        pages_per_step: int,
        *,
        on_pages_moved: Callable[[Mapping[int, int]], None],
        on_run_moved: Callable[[int, int], None],
        before_moving: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._slab = slab
        self._pages_per_step = self._budget = pages_per_step
        self._on_pages_moved = on_pages_moved
        self._on_run_moved = on_run_moved
        self._before_moving = before_moving
        self._window_for: str | None = None
        self._asked = False
        self.moved_pages = 0
        self.moved_runs = 0
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a run is in the making, and asking for it again will go on."""
        return self._asked or self._window_for is not None

    def begin_step(self) -> None:
        """A new step, a new budget. A window that nobody asked for any more is given up."""
        self._budget = self._pages_per_step
        if not self._asked:
            self.cancel()
        self._asked = False

    def cancel(self) -> bool:
        """Give up what is half cleared; whether there was such a window."""
        had_window = self._window_for is not None
        self._pool.cancel_window()
        self._window_for = None
        return had_window

    def pages_wanted(self, owner: str, length: int) -> int:
        """Free pages that `make_run` needs to go on: fewer once its window is half cleared."""
        if not self._has_window(owner, length):
            return length
        return len(self._pool.kv_pages_in(self._pool.window))

    def make_run(self, owner: str, length: int) -> int | None:
        """First page of a run for `owner`; None when it has to be asked for again next step."""
        if not self._has_window(owner, length):
            start = self._pool.take_run(length)
            if start is not None or self._window_for or length > self._pool.adapter_room:
                return start
        self._asked = True
        started = time.perf_counter()
        try:
            return self._clear_run(owner, length)
        finally:
            self.seconds += time.perf_counter() - started

    def _clear_run(self, owner: str, length: int) -> int | None:
        if not self._has_window(owner, length) and not self._open_window(owner, length):
            return None
        if not self._clear_window():
            return None
        self._window_for = None
        return self._pool.settle()

    def _has_window(self, owner: str, length: int) -> bool:
        return self._window_for == owner and len(self._pool.window) == length

    def _open_window(self, owner: str, length: int) -> bool:
        while (window := best_window(self._pool.owners(), length)) is None:
            if self._budget <= 0 or not (slides := adapters_to_slide(self._pool, length)):
                return False
            self._slide_down(slides[0])
        self._pool.reserve(window)
        self._window_for = owner
        return True

    def _clear_window(self) -> bool:
        """Move K and V out of the window, as far as the budget goes; True when it is clear."""
        moves: dict[int, int] = {}
        inside = self._pool.kv_pages_in(self._pool.window)
        for page in inside[: max(0, self._budget)]:
            target = self._pool.take_target()
            if target is None:
                break
            self._pool.move_page(page, target)
            moves[page] = target
        self._enter(moves)
        return len(moves) == len(inside)

    def _slide_down(self, start: int) -> None:
        """Move an adapter over the free pages of the gap below it; its K and V stay there."""
        length = dict(self._pool.runs())[start]
        below = max((s + n for s, n in self._pool.runs() if s < start), default=0)
        gap = range(below, start)
        self._pack_down(gap)
        target = below + len(self._pool.kv_pages_in(gap))
        if target == start:
            raise RuntimeError("an adapter without a free page below it cannot slide")
        self._before_moving()
        self._slab.move_run(start, target, length)
        self._pool.move_run(start, target)
        self._on_run_moved(start, target)
        self.moved_runs += 1
        self._budget -= length

    def _pack_down(self, gap: range) -> None:
        """The K and V of a gap go to its lowest pages."""
        pages = self._pool.kv_pages_in(gap)
        bottom = gap[: len(pages)]
        taken = set(pages)
        moves = dict(
            zip(
                (page for page in pages if page not in bottom),
                (page for page in bottom if page not in taken),
                strict=True,
            )
        )
        for source, target in moves.items():
            self._pool.move_page(source, target)
        self._enter(moves)

    def _enter(self, moves: dict[int, int]) -> None:
        if moves:
            self._slab.copy_pages(list(moves), list(moves.values()))
            self._on_pages_moved(moves)
            self.moved_pages += len(moves)
            self._budget -= len(moves)
