"""Decides which tokens run in the next step. Touches no tensor.

Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal
et al., OSDI 2024): one token budget is spent on running sequences first, then on waiting ones.
A request whose adapter is not on the device waits alone; those behind it go on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from lorad.engine.adapter_tiers import AdapterTiers, Readiness
from lorad.engine.messages import TokenOutput
from lorad.engine.request import Sequence
from lorad.engine.sampler import Sampled
from lorad.errors import LoradError
from lorad.memory.kv_cache import KVCache
from lorad.memory.prefix_cache import BlockChain


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and the queues may hold. `adapter_wait` is in seconds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_model_len: int
    adapter_wait: float = 5.0


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens `start : start + count` of a sequence, and sample if that is its end."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @classmethod
    def next_tokens(cls, sequence: Sequence, count: int) -> ScheduledSequence:
        start = sequence.num_computed
        return cls(sequence, start, count, start + count == len(sequence.tokens))


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of one step: sequences with one row first, each part ordered by adapter."""

    items: tuple[ScheduledSequence, ...]

    @property
    def sampled(self) -> list[ScheduledSequence]:
        return [item for item in self.items if item.samples]


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCache,
        adapters: AdapterTiers,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._limits = limits
        self._kv = kv_cache
        self._adapters = adapters
        self._eos = eos_token_ids
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # Adapters being unloaded: requests that have not begun wait until that is over.
        self.held: set[str] = set()
        self.admits = True  # False while a load command waits for the running ones' pages
        self._failures: list[TokenOutput] = []
        self.preemptions = 0
        self.prefix_lookup_tokens = 0  # of prompts, when they were admitted
        self.prefix_hit_tokens = 0

    # --- queues ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.chain = self._kv.chain(sequence.digest, request.cache_salt)
        if request.adapter is not None:
            self._adapters.count_request(request.adapter)
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request; its pages are free at once."""
        for sequence in self.running:
            if sequence.request_id == request_id:
                self._retire(sequence)
                return
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)

    def fail_waiting(self, digest: str, error: LoradError) -> list[TokenOutput]:
        """End the waiting requests of an adapter that cannot be had."""
        failed = [s for s in self.waiting if s.digest == digest]
        self.waiting = deque(s for s in self.waiting if s.digest != digest)
        return [_failure(sequence, error) for sequence in failed]

    def fail_running(self, error: LoradError) -> list[TokenOutput]:
        """End what a failed step computed for: its K and V cannot be trusted."""
        failed = list(self.running)
        for sequence in failed:
            self._retire(sequence, poisoned=True)
        return [_failure(sequence, error) for sequence in failed]

    def running_by_adapter(self) -> dict[str, int]:
        return Counter(s.digest for s in self.running if s.digest)

    def waiting_by_adapter(self) -> dict[str, int]:
        return Counter(s.digest for s in self.waiting if s.digest)

    def unfinished(self, digest: str) -> int:
        """Requests of an adapter that have begun: the running ones and the preempted ones."""
        return sum(s.digest == digest and s.started for s in (*self.running, *self.waiting))

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """The next step's work. Requests that can never run are ended: `take_failures`."""
        items = list(self._continue_running())
        if self.admits or not self.running:
            items += self._admit_waiting(items)
        if not items and not self.running and not self._adapters.busy:
            self._fail_unplaceable()
        self._prefetch()
        items.sort(key=lambda item: (item.count > 1, item.sequence.digest or ""))
        return ScheduledBatch(tuple(items))

    def take_failures(self) -> list[TokenOutput]:
        """Requests that scheduling ended since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def update(self, batch: ScheduledBatch, sampled: list[Sampled]) -> list[TokenOutput]:
        """Enter what the step computed; returns the new tokens and the ends."""
        for item in batch.items:
            item.sequence.num_computed = item.start + item.count
        return [
            self._enter(item.sequence, result)
            for item, result in zip(batch.sampled, sampled, strict=True)
        ]

    # --- inside a step --------------------------------------------------------------------

    def _continue_running(self) -> Iterator[ScheduledSequence]:
        budget = self._limits.max_num_batched_tokens
        for sequence in list(self.running):
            if budget <= 0:
                return
            if sequence not in self.running:  # preempted for an older one in this pass
                continue
            count = min(sequence.num_pending, budget)
            if self._make_room(sequence, count):
                yield ScheduledSequence.next_tokens(sequence, count)
                budget -= count

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Pages for the next `count` tokens, at the cost of the newest sequence if need be."""
        while not self._kv.grow(sequence.block_table, sequence.num_computed + count):
            if self._adapters.give_up_window():
                continue
            newest = self.running[-1]
            if newest is sequence and len(self.running) == 1:
                self._retire(sequence)
                self._failures.append(_failure(sequence, _no_room()))
                return False
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _fail_unplaceable(self) -> None:
        """Nothing runs and nothing loads, yet the oldest request has no room: it never will."""
        for sequence in self.waiting:
            if sequence.digest not in self.held or sequence.started:
                self.waiting.remove(sequence)
                self._failures.append(_failure(sequence, _no_room()))
                return

    def _admit_waiting(self, running: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Sequences that begin beside what the running ones do in this step."""
        admitted: list[ScheduledSequence] = []
        budget = self._limits.max_num_batched_tokens - sum(item.count for item in running)
        computed = set().union(*map(self._blocks_ending, running))
        wanted = set(self.running_by_adapter())  # running, or on their way for this queue
        draining = self._draining_adapter()
        no_room: set[str | None] = set()  # looking once a step is enough
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._limits.max_num_seqs:
                break
            if sequence.digest in no_room:
                continue
            readiness = self._adapter_readiness(sequence, wanted, draining)
            if readiness == "too_large":
                self.waiting.remove(sequence)
                self._failures.append(_failure(sequence, _no_room()))
            if readiness == "no_room":
                if self._overdue(sequence):
                    break  # those behind it would go on taking the pages that it waits for
                no_room.add(sequence.digest)
            if readiness != "ready" or (computed and self._next_block(sequence) in computed):
                continue
            item = self._start(sequence, budget)
            if item is None:
                break  # later, smaller ones must not starve this one of pages
            admitted.append(item)
            computed |= self._blocks_ending(item)
            budget -= item.count
        return admitted

    def _blocks_ending(self, item: ScheduledSequence) -> set[bytes]:
        """Blocks that a prefill computes now and that the next step will find."""
        sequence = item.sequence
        if not item.samples or item.count == 1:
            return set()
        return self._kv.unknown(_chain(sequence), sequence.tokens, item.start + item.count)

    def _next_block(self, sequence: Sequence) -> bytes | None:
        """The first block that a sequence would have to compute, of those it could find.

        If another computes it in this step, waiting for the next saves computing it twice.
        """
        return self._kv.first_unknown(_chain(sequence), sequence.tokens)

    def _start(self, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        """Begin with what the prefix cache holds; None, and no change, without room for more.

        Takes idle pages, whosever, but never a running sequence's.
        """
        chain, table = _chain(sequence), sequence.block_table
        if sequence.digest:
            self._adapters.acquire(sequence.digest, again=sequence.use_counted)
            sequence.use_counted = True
        cached = self._kv.attach(table, chain, sequence.tokens)
        count = min(len(sequence.tokens) - cached, budget)
        if not self._kv.grow(table, cached + count):
            self._kv.release(table)
            if sequence.digest:
                self._adapters.release(sequence.digest)
            return None
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.started = True
        sequence.num_computed = cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.prefix_lookup_tokens += sequence.prompt_length
            self.prefix_hit_tokens += cached
        return ScheduledSequence.next_tokens(sequence, count)

    def _prefetch(self) -> None:
        """Adapters of requests that cannot run yet are read in the order of the queue."""
        for sequence in self.waiting:
            ref = sequence.request.adapter
            if ref and ref.digest not in self.held and not self._adapters.prefetch(ref):
                return

    def _overdue(self, sequence: Sequence) -> bool:
        return time.monotonic() - sequence.arrived_at > self._limits.adapter_wait

    def _adapter_readiness(
        self, sequence: Sequence, wanted: set[str], draining: str | None
    ) -> Readiness | None:
        """Is the adapter on the device? If not, and a place is left, sends for it.

        None while it is not the adapter's turn.
        """
        ref = sequence.request.adapter
        if ref is None:
            return "ready"
        if ref.digest == draining or (ref.digest in self.held and not sequence.started):
            return None
        if ref.digest not in wanted and len(wanted) >= self._limits.max_loras:
            return None
        wanted.add(ref.digest)
        return self._adapters.prepare(ref)

    def _draining_adapter(self) -> str | None:
        """The running adapter that takes no new requests, so that an old waiter gets its place.

        Bounds the wait for any adapter when `max_loras` is full: after `adapter_wait` seconds
        the adapter with the fewest tokens left runs dry.
        """
        active = self.running_by_adapter()
        if len(active) < self._limits.max_loras:
            return None
        blocked = any(
            s.digest and s.digest not in active and self._overdue(s) for s in self.waiting
        )
        if not blocked:
            return None
        left: Counter[str] = Counter()
        for sequence in self.running:
            if sequence.digest:
                left[sequence.digest] = max(left[sequence.digest], sequence.tokens_left)
        return min(left, key=lambda digest: left[digest])

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's pages; it is recomputed, tokens kept, when there is room."""
        self._retire(sequence)
        self.preemptions += 1
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def _retire(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        self.running.remove(sequence)
        if poisoned:
            self._kv.discard(sequence.block_table)
        else:
            self._kv.release(sequence.block_table)
        if sequence.digest:
            self._adapters.release(sequence.digest)

    def _enter(self, sequence: Sequence, result: Sampled) -> TokenOutput:
        if result.token_id is None:
            self._retire(sequence, poisoned=True)
            return _failure(
                sequence,
                LoradError(
                    "engine.nonfinite_logits",
                    f"{sequence.label} computed NaN or infinity for this request",
                    hint="the adapter's weights are too large for the serving dtype",
                ),
            )
        # A finite result depends on all K and V before it, so those are good.
        self._kv.remember(
            sequence.block_table, _chain(sequence), sequence.tokens, sequence.num_computed
        )
        sequence.tokens.append(result.token_id)
        reason = sequence.finish_reason(self._eos, self._limits.max_model_len)
        if reason is not None:
            self._retire(sequence)
        return TokenOutput(
            sequence.request_id,
            result.token_id,
            result.logprob,
            reason,
            cached_tokens=sequence.cached_tokens or 0,
        )


def _chain(sequence: Sequence) -> BlockChain:
    if sequence.chain is None:
        raise RuntimeError(f"{sequence.request_id} was never added")
    return sequence.chain


def _no_room() -> LoradError:
    return LoradError(
        "memory.no_capacity",
        "the request and its adapter do not fit into the device's pages",
        hint="raise memory.slab_bytes, unpin adapters, or ask for fewer tokens",
    )


def _failure(sequence: Sequence, error: LoradError) -> TokenOutput:
    return TokenOutput(sequence.request_id, None, finish_reason="error", error=error)
