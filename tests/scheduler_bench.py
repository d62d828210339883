"""The scheduler over a real pool, real adapters and a real host cache; only the model is missing.

`Bench.step` checks every batch against the limits and every page against its owner, so each test
that uses it is also a test of those. A request has a salt of its own unless a test gives it
another, so that it finds nobody's blocks in the prefix cache but, after a preemption, its own. A
test file imports `clock as clock`: the fixture then holds for every test in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.host_cache import HostCache
from lorad.adapters.loader import LoadResult
from lorad.adapters.weights import AdapterWeights
from lorad.engine import scheduler as scheduler_module
from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.messages import GenerationRequest, SamplingParams, TokenOutput
from lorad.engine.request import Sequence
from lorad.engine.sampler import Sampled
from lorad.engine.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from lorad.errors import LoradError
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab
from lorad.sizing.adapter_size import AdapterLayout

BLOCK = 4  # tokens in a page
PAGE_ELEMENTS = 16  # 64 bytes in float32
EOS, TOKEN = 2, 5


def ref(name: str) -> AdapterRef:
    return AdapterRef(AdapterName.parse(name), "v1", f"sha256:{name}")


def weights_of(name: str, pages: int) -> AdapterWeights:
    elements = pages * PAGE_ELEMENTS
    layout = AdapterLayout(slices=(), nbytes=4 * elements, weight_nbytes=4 * elements, max_rank=1)
    return AdapterWeights(f"sha256:{name}", layout, torch.ones(elements))


class Bench:
    """Adapters are named by letters; each takes as many pages as `sizes` says, else one."""

    def __init__(
        self,
        pages: int = 64,
        *,
        budget: int = 64,
        max_num_seqs: int = 16,
        max_loras: int = 8,
        max_model_len: int = 256,
        sizes: dict[str, int] | None = None,
        max_cpu_loras: int = 64,
        moved_pages: int = 64,
        adapter_floor: int = 0,
        adapter_ceiling: int | None = None,
    ) -> None:
        """`moved_pages` are moved in a step at most."""
        self.limits = SchedulerLimits(max_num_seqs, budget, max_loras, max_model_len)
        self.sizes = sizes or {}
        self.pool = PagePool(pages, adapter_floor=adapter_floor, adapter_ceiling=adapter_ceiling)
        data = torch.zeros(pages * PAGE_ELEMENTS)
        slab = Slab(data, pages, PAGE_ELEMENTS, BLOCK)
        clock = itertools.count()
        self.eviction = Eviction(self.pool, clock=lambda: float(next(clock)))
        kv_cache = KVCache(self.pool, slab, self.eviction)
        self.adapters = AdapterPool(
            self.pool,
            slab,
            self.eviction,
            kv_cache,
            moved_bytes_per_step=moved_pages * slab.page_bytes,
        )
        self.loads: list[AdapterRef] = []  # asked for, not answered
        self.tiers = AdapterTiers(
            self.adapters,
            HostCache(max_cpu_loras, 2**30),
            self.loads.append,
            self.cancel_load,
            prefetch=max_loras,  # as build_engine has it
        )
        self.scheduler = Scheduler(self.limits, kv_cache, self.tiers, frozenset({EOS}))
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.proven: set[tuple[object, ...]] = set()  # what finite results were computed from
        self.now = 0.0

    # --- what a test does ---------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: int = 3,
        max_tokens: int = 4,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> Sequence:
        request = GenerationRequest(
            name,
            tuple(range(10, 10 + prompt)),
            SamplingParams(max_tokens),
            ref(adapter) if adapter else None,
            name if salt is None else salt,
        )
        sequence = Sequence.from_request(request)
        sequence.arrived_at = self.now
        self.outputs[name] = []
        self.scheduler.add(sequence)
        return sequence

    def resident(self, *names: str) -> None:
        for name in names:
            assert self.tiers.prepare(ref(name)) == "loading"
            self.finish_load(name)
            assert self.tiers.prepare(ref(name)) == "ready"

    def cancel_load(self, digest: str) -> bool:
        """As the loader does with what it has not begun to read."""
        wanted = [each for each in self.loads if each.digest == digest]
        for each in wanted:
            self.loads.remove(each)
        return bool(wanted)

    def finish_load(self, name: str) -> None:
        self.loads.remove(ref(name))
        self.tiers.finish_load(
            LoadResult(ref(name), 0.1, weights_of(name, self.sizes.get(name, 1)))
        )

    def fail_load(self, name: str) -> None:
        self.loads.remove(ref(name))
        error = LoradError("adapter.load_failed", name)
        self.tiers.finish_load(LoadResult(ref(name), 0.1, error=error))
        self.enter(self.scheduler.fail_waiting(ref(name).digest, error))

    def step(
        self, tokens: dict[str, int | None] | None = None, command: str | None = None
    ) -> ScheduledBatch:
        """One step; every sampled token is TOKEN, or what `tokens` says for a request.

        `command` is the adapter of a load command that is pending, as in Engine.step.
        """
        expected = {s: s.num_computed for s in self.scheduler.running}
        self.tiers.begin_step()
        commanded = {ref(command).digest} if command else set()
        self.tiers.keep_only(commanded | self.scheduler.waiting_by_adapter().keys())
        if command:
            self.tiers.prepare(ref(command), "command")
        batch = self.scheduler.schedule()
        self.enter(self.scheduler.take_failures())
        self.check(batch, expected)
        sampled = [
            Sampled((tokens or {}).get(item.sequence.request_id, TOKEN)) for item in batch.sampled
        ]
        self.enter(self.scheduler.update(batch, sampled))
        for item, result in zip(batch.sampled, sampled, strict=True):
            if result.token_id is not None:
                blocks = range(BLOCK, item.start + item.count + 1, BLOCK)
                self.proven |= {self.content(item.sequence, tokens) for tokens in blocks}
        self.check_pages()
        return batch

    def run(self, limit: int = 500) -> int:
        """Steps until nothing is left, loads ending at once; returns how many."""
        for steps in range(limit):
            for each in list(self.loads):
                self.finish_load(each.name.name)
            if not self.sequences():
                return steps
            self.step()
        raise AssertionError(f"still there after {limit} steps: {self.waiting} {self.running}")

    # --- what a test looks at -----------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        return [s.request_id for s in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [s.request_id for s in self.scheduler.waiting]

    def sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def tokens(self, name: str) -> int:
        return sum(output.token_id is not None for output in self.outputs[name])

    def end(self, name: str) -> str | None:
        """How a request ended: its finish reason, or the code of its error."""
        last = self.outputs[name][-1] if self.outputs[name] else None
        return last and (last.error.code if last.error else last.finish_reason)

    def enter(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            answers = self.outputs[output.request_id]
            assert not answers or answers[-1].finish_reason is None, "an output after the end"
            answers.append(output)

    @staticmethod
    def content(sequence: Sequence, tokens: int) -> tuple[object, ...]:
        """What the K and V of a sequence's first tokens depend on."""
        return sequence.digest, sequence.request.cache_salt, *sequence.tokens[:tokens]

    # --- what must hold in every step ---------------------------------------------------------

    def check(self, batch: ScheduledBatch, computed: dict[Sequence, int]) -> None:
        items = batch.items
        assert sum(item.count for item in items) <= self.limits.max_num_batched_tokens
        assert len(self.running) <= self.limits.max_num_seqs
        assert len(set(self.scheduler.running_by_adapter())) <= self.limits.max_loras
        assert len({item.sequence for item in items}) == len(items)
        for item in items:
            sequence, end = item.sequence, item.start + item.count
            assert sequence in self.scheduler.running
            assert item.count >= 1
            assert item.start == sequence.num_computed
            if item.start not in (0, computed.get(sequence)):  # it begins, with cached blocks
                assert item.start % BLOCK == 0, "tokens left out"
                assert self.content(sequence, item.start) in self.proven
            assert item.samples == (end == len(sequence.tokens))
            assert len(sequence.block_table) * BLOCK >= end
            assert sequence.digest is None or sequence.digest in self.adapters
        order = [(item.count > 1, item.sequence.digest or "") for item in items]
        assert order == sorted(order), "rows of one adapter are not side by side"
        self.check_pages()

    def check_pages(self) -> None:
        pages = Counter(page for s in self.scheduler.running for page in s.block_table)
        assert len(pages) == self.pool.kv_pages
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == pages[page]
        for sequence in self.scheduler.running:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
        assert not any(s.block_table for s in self.scheduler.waiting)
        users = Counter(s.digest for s in self.scheduler.running if s.digest)
        assert {a.digest: a.users for a in self.adapters.resident() if a.users} == users
        assert self.pool.adapter_pages == sum(a.num_pages for a in self.adapters.resident())

    def check_all_is_free(self) -> None:
        """Or kept only until somebody wants the place: cached blocks and idle adapters."""
        assert not self.sequences()
        for _ in range(2):  # a window that nobody asks for any more is given up
            self.tiers.begin_step()
        assert (self.pool.kv_pages, self.pool.reserved_pages) == (0, 0)
        assert not any(adapter.users for adapter in self.adapters.resident())
        kept = self.pool.cached_pages + self.pool.adapter_pages
        assert self.pool.free_pages + kept == self.pool.num_pages


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scheduler's time, moved by hand: `clock.now`."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake
