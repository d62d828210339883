"""The step loop: schedule, run, enter the results. Everything here runs on one thread."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from lorad.adapter_ref import AdapterRef
from lorad.adapters.loader import LoadResult
from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.device_fault import device_fault
from lorad.engine.load_turn import LoadTurn
from lorad.engine.messages import (
    AbortRequest,
    AdapterLoaded,
    AdapterProbed,
    AdapterUnloaded,
    CommandFailed,
    EngineStats,
    GenerationRequest,
    LoadAdapter,
    MemoryStats,
    ProbeAdapter,
    StepRecord,
    TokenOutput,
    UnloadAdapter,
)
from lorad.engine.model_runner import ModelRunner
from lorad.engine.probe import RecordedDelta
from lorad.engine.request import Sequence
from lorad.engine.scheduler import ScheduledBatch, Scheduler
from lorad.errors import LoradError
from lorad.memory.adapter_pool import ResidentAdapter
from lorad.memory.eviction import Eviction
from lorad.memory.page_pool import PagePool
from lorad.memory.slab import Slab

log = logging.getLogger(__name__)

ProbeResult = AdapterProbed | CommandFailed
Message = (
    GenerationRequest
    | AbortRequest
    | LoadAdapter
    | ProbeAdapter
    | UnloadAdapter
    | LoadResult
    | ProbeResult
)
Output = TokenOutput | AdapterLoaded | AdapterProbed | AdapterUnloaded | CommandFailed
# Compares a probe with the files, elsewhere; the result comes back as a message.
StartCheck = Callable[[ProbeAdapter, tuple[RecordedDelta, ...], float], None]

STEPS_KEPT = 1024


@dataclass(slots=True)
class _PendingLoad:
    command: LoadAdapter | ProbeAdapter
    started: float


@dataclass(slots=True)
class _PendingUnload:
    command: UnloadAdapter
    deadline: float
    requests: int  # that were running when it began


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        adapters: AdapterTiers,
        pool: PagePool,
        slab: Slab,
        eviction: Eviction,
        start_check: StartCheck,
        *,
        weight_bytes: int = 0,
        adapter_wait: float = 5.0,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters
        self._pool = pool
        self._slab = slab
        self._eviction = eviction
        self._start_check = start_check
        self._weight_bytes = weight_bytes
        self._loads: list[_PendingLoad] = []
        self._load_turn = LoadTurn(adapter_wait)
        self._unloads: list[_PendingUnload] = []
        self._outputs: list[Output] = []
        self.records: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._hit_tokens = 0  # of the prefix cache, at the last record

    # --- what the loop calls --------------------------------------------------------------

    def handle(self, message: Message) -> None:
        match message:
            case GenerationRequest():
                self._scheduler.add(Sequence.from_request(message))
            case AbortRequest():
                self._scheduler.abort(message.request_id)
            case LoadAdapter() | ProbeAdapter():
                self._loads.append(_PendingLoad(message, time.monotonic()))
            case UnloadAdapter():
                self._begin_unload(message)
            case LoadResult():
                self._finish_load(message)
            case AdapterProbed() | CommandFailed():
                self._outputs.append(message)

    def step(self) -> bool:
        """Run one batch, and whatever adapter commands can end now. False when there was none.

        Raises `engine.device_fault` when there is no use in another.
        """
        self._adapters.begin_step()
        self._keep_only_wanted()
        self._progress_commands()
        batch = self._scheduler.schedule()
        self._outputs += self._scheduler.take_failures()
        if not batch.items:
            return False
        started, clock = time.time(), time.perf_counter()
        try:
            sampled = self._runner.run(batch)
        except Exception as error:
            self._check_device(error)
            # The running requests cannot be trusted any more; those that wait can.
            log.exception("an engine step failed")
            failed = LoradError("engine.failed", f"the engine failed in a step: {error}")
            self._outputs += self._scheduler.fail_running(failed)
            return True
        outputs = self._scheduler.update(batch, sampled)
        self._outputs += outputs
        self._generated_tokens += sum(output.token_id is not None for output in outputs)
        self._record(batch, started, time.perf_counter() - clock)
        return True

    def _check_device(self, error: Exception) -> None:
        """After an error: raise `engine.device_fault` if the device is not what it was."""
        if (fault := device_fault(error, self._slab.data.device)) is not None:
            raise fault from error

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def waits(self) -> bool:
        """Whether something may go on without a new message: a queue, a load, a drain."""
        return bool(self._scheduler.waiting or self._loads or self._unloads)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            steps=self._steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            total_pages=self._pool.num_pages,
            free_pages=self._pool.free_pages,
            kv_pages=self._pool.kv_pages,
            adapter_pages=self._pool.adapter_pages + self._pool.reserved_pages,
            page_bytes=self._slab.page_bytes,
            host_cache_bytes=self._adapters.host_bytes,
            adapters=self._adapters.states(
                scheduler.running_by_adapter(), scheduler.waiting_by_adapter()
            ),
            cached_pages=self._pool.cached_pages,
            weight_bytes=self._weight_bytes,
            memory=self._memory_stats(),
        )

    def _memory_stats(self) -> MemoryStats:
        tiers, moves = self._adapters, self._adapters.relocator
        return MemoryStats(
            lookups=dict(tiers.lookups),
            loads=dict(tiers.loads),
            cancelled_loads=tiers.cancelled_loads,
            load_seconds=tiers.load_seconds.copy(),
            evictions=dict(self._eviction.counts),
            host_evictions=tiers.host_evictions,
            moved_pages=moves.moved_pages,
            moved_adapters=moves.moved_runs,
            move_seconds=moves.seconds,
            prefix_lookup_tokens=self._scheduler.prefix_lookup_tokens,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            preemptions=self._scheduler.preemptions,
        )

    # --- adapter commands -----------------------------------------------------------------

    def _keep_only_wanted(self) -> None:
        """Loads that no request and no command waits for are not worth reading."""
        if self._adapters.under_way:
            commanded = {load.command.adapter.digest for load in self._loads}
            self._adapters.keep_only(commanded | self._scheduler.waiting_by_adapter().keys())

    def _begin_unload(self, command: UnloadAdapter) -> None:
        digest = command.adapter.digest
        running = self._scheduler.unfinished(digest)
        deadline = time.monotonic() + command.drain_timeout
        self._unloads.append(_PendingUnload(command, deadline, running))

    def _finish_load(self, result: LoadResult) -> None:
        self._adapters.finish_load(result)
        if result.error is None:
            return
        digest = result.ref.digest
        self._outputs += self._scheduler.fail_waiting(digest, result.error)
        for pending in [p for p in self._loads if p.command.adapter.digest == digest]:
            self._end_load(pending, CommandFailed(pending.command.command_id, result.error))

    def _progress_commands(self) -> None:
        for unload in list(self._unloads):
            if (answer := self._try_unload(unload)) is not None:
                self._unloads.remove(unload)
                self._outputs.append(answer)
        # An adapter is held until the last of several unloads of it has ended.
        self._scheduler.held = {unload.command.adapter.digest for unload in self._unloads}
        self._progress_loads()
        self._scheduler.admits = not self._load_turn.holding

    def _end_load(self, load: _PendingLoad, output: AdapterLoaded | CommandFailed | None) -> None:
        self._loads.remove(load)
        self._load_turn.ended(load.command.command_id)
        if output is not None:
            self._outputs.append(output)

    def _progress_loads(self) -> None:
        may_probe = True  # one a step: those that run wait for no more than that
        for load in list(self._loads):
            command = load.command
            if isinstance(command, ProbeAdapter) and not may_probe:
                continue
            ready = self._bring(command)
            if ready is None:
                continue
            if isinstance(ready, CommandFailed):
                self._end_load(load, ready)
            elif isinstance(command, ProbeAdapter):
                self._end_load(load, self._probe(command, ready))
                may_probe = False
            else:
                self._end_load(load, self._loaded(command, ready, load.started))

    def _bring(self, command: LoadAdapter | ProbeAdapter) -> ResidentAdapter | CommandFailed | None:
        """The adapter once it is on the device; None while it is on its way."""
        if command.adapter.digest in self._scheduler.held:
            # The unload may wait for requests that have begun and must not be held back.
            self._load_turn.ended(command.command_id)
            return None
        readiness = self._adapters.prepare(command.adapter, "command")
        if readiness == "too_large":
            return CommandFailed(command.command_id, _too_large(command.adapter))
        if readiness == "no_room" and not self._load_turn.no_room(command.command_id):
            seconds = self._load_turn.longest_wait
            return CommandFailed(command.command_id, _no_room(command.adapter, seconds))
        resident = self._adapters.get(command.adapter.digest)
        if resident is None or readiness != "ready":
            return None
        return resident

    def _loaded(
        self, command: LoadAdapter, resident: ResidentAdapter, started: float
    ) -> AdapterLoaded:
        if command.pin is not None:
            self._adapters.pin(resident.digest, command.pin)
        seconds = time.monotonic() - started
        return AdapterLoaded(
            command.command_id, resident.num_pages, resident.layout.nbytes, seconds
        )

    def _probe(self, command: ProbeAdapter, resident: ResidentAdapter) -> CommandFailed | None:
        """None when the check has begun: its verdict will come as a message."""
        clock = time.perf_counter()
        try:
            recorded = self._runner.probe(resident.factors, command.token_ids)
        except Exception as error:
            self._check_device(error)
            log.exception("a probe of %s failed", command.adapter)
            failed = LoradError("engine.failed", f"the engine failed in a probe: {error}")
            return CommandFailed(command.command_id, failed)
        self._start_check(command, recorded, time.perf_counter() - clock)
        return None

    def _try_unload(self, unload: _PendingUnload) -> AdapterUnloaded | CommandFailed | None:
        command = unload.command
        digest = command.adapter.digest
        busy = self._scheduler.unfinished(digest)
        if not busy and not self._adapters.is_loading(digest):
            device, host = self._adapters.drop(digest)
            self._eviction.counts["adapter", "unload"] += device > 0
            return AdapterUnloaded(command.command_id, device, host, unload.requests)
        if time.monotonic() < unload.deadline:
            return None
        error = LoradError(
            "drain.timeout",
            f"{busy} requests still use {command.adapter} after {command.drain_timeout:g} s",
            hint="try again with a longer --drain-timeout; nothing has been unloaded",
            details={"running": busy},
        )
        return CommandFailed(command.command_id, error)

    # --- books ----------------------------------------------------------------------------

    def _record(self, batch: ScheduledBatch, started: float, seconds: float) -> None:
        rows: Counter[str] = Counter()
        prompt = 0
        for item in batch.items:
            rows[item.sequence.label] += item.count
            prompt += max(0, min(item.start + item.count, item.sequence.prompt_length) - item.start)
        if prompt:
            self._time_prefill(seconds / sum(rows.values()))
        hits, self._hit_tokens = self._hit_tokens, self._scheduler.prefix_hit_tokens
        self._steps += 1
        self._prompt_tokens += prompt
        self.records.append(
            StepRecord(
                step=self._steps,
                started_at=started,
                seconds=seconds,
                prefill_tokens=prompt,
                decode_tokens=sum(rows.values()) - prompt,
                rows=dict(rows),
                requests=tuple(item.sequence.request_id for item in batch.items),
                cached_tokens=self._hit_tokens - hits,
            )
        )

    def _time_prefill(self, token_seconds: float) -> None:
        """What a cached block saves, as a running mean: the eviction weighs it against loads."""
        eviction = self._eviction
        eviction.kv_token_seconds += 0.1 * (token_seconds - eviction.kv_token_seconds)


def _too_large(adapter: AdapterRef) -> LoradError:
    return LoradError(
        "memory.no_capacity",
        f"{adapter} does not fit into the device's pages",
        hint="raise memory.slab_bytes, or unpin adapters",
    )


def _no_room(adapter: AdapterRef, seconds: float) -> LoradError:
    return LoradError(
        "memory.no_capacity",
        f"{adapter} found no room beside the running requests in {seconds:g} s",
        hint="try again, or raise memory.slab_bytes: the running requests hold its pages",
    )
