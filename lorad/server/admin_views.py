"""Records of the registry and the engine as the JSON of the admin API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lorad.engine.messages import AdapterState, EngineStats, MemoryStats, StepRecord
from lorad.registry.records import Adapter, Event, Move, Version, Who
from lorad.wire import (
    AdapterInfo,
    EngineInfo,
    EventInfo,
    MemoryInfo,
    MoveResult,
    ResidencyInfo,
    StepInfo,
    VersionInfo,
    WhoInfo,
)

States = Mapping[str, AdapterState]  # by digest


def states(stats: EngineStats) -> States:
    return {state.digest: state for state in stats.adapters}


def who_info(who: Who) -> WhoInfo:
    return {"uid": who.uid, "pid": who.pid}


def adapter_info(adapter: Adapter, resident: States) -> AdapterInfo:
    return {
        "name": str(adapter.name),
        "generation": adapter.generation,
        "live": adapter.live,
        "live_since": adapter.live_since,
        "created_at": adapter.created_at,
        "versions": [
            version_info(version, resident, live=label == adapter.live)
            for label, version in adapter.versions.items()
        ],
    }


def version_info(version: Version, resident: States, *, live: bool) -> VersionInfo:
    return {
        "version": version.label,
        "digest": version.ref.digest,
        "live": live,
        "state": version.state.value,
        "failure": version.failure,
        "pinned": version.pinned,
        "rank": version.rank,
        "modules": version.modules,
        "targets": list(version.targets),
        "bytes": version.config_bytes + version.weights_bytes,
        "trained_on": version.trained_on,
        "warnings": [{"code": w.code, "message": w.message} for w in version.warnings],
        "message": version.message,
        "created_at": version.created_at,
        "created_by": who_info(version.created_by),
        "residency": residency_info(resident.get(version.ref.digest)),
    }


def residency_info(state: AdapterState | None) -> ResidencyInfo:
    """A version that the engine does not know is on disk only."""
    found = state or AdapterState(digest="", residency="disk")
    return {
        "tier": found.residency,
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
        "running_requests": found.running_requests,
        "waiting_requests": found.waiting_requests,
        "error": found.error,
    }


def event_info(event: Event) -> EventInfo:
    return {
        "id": event.id,
        "at": event.at,
        "who": who_info(event.who),
        "action": event.action.value,
        "from_version": event.from_version,
        "to_version": event.to_version,
        "generation": event.generation,
        "reason": event.reason,
    }


def move_result(move: Move, *, dry_run: bool) -> MoveResult:
    return {
        "name": str(move.name),
        "from_version": move.from_version,
        "to_version": move.to_version,
        "generation": move.generation,
        "changed": move.changed,
        "dry_run": dry_run,
    }


def engine_info(stats: EngineStats) -> EngineInfo:
    return {
        "steps": stats.steps,
        "running": stats.running,
        "waiting": stats.waiting,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "total_pages": stats.total_pages,
        "free_pages": stats.free_pages,
        "kv_pages": stats.kv_pages,
        "adapter_pages": stats.adapter_pages,
        "page_bytes": stats.page_bytes,
        "host_cache_bytes": stats.host_cache_bytes,
        "cached_pages": stats.cached_pages,
        "weight_bytes": stats.weight_bytes,
        "memory": memory_info(stats.memory),
    }


def memory_info(memory: MemoryStats) -> MemoryInfo:
    return {
        "lookups": dict(memory.lookups),
        "loads": {str(reason): count for reason, count in memory.loads.items()},
        "cancelled_loads": memory.cancelled_loads,
        "load_seconds": memory.load_seconds.sum,
        "evictions": {f"{what} for {whom}": n for (what, whom), n in memory.evictions.items()},
        "host_evictions": memory.host_evictions,
        "moved_pages": memory.moved_pages,
        "moved_adapters": memory.moved_adapters,
        "move_seconds": memory.move_seconds,
        "prefix_lookup_tokens": memory.prefix_lookup_tokens,
        "prefix_hit_tokens": memory.prefix_hit_tokens,
        "preemptions": memory.preemptions,
    }


def tier_counts(adapters: Iterable[AdapterState]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in adapters:
        counts[state.residency] = counts.get(state.residency, 0) + 1
    return counts


def step_info(step: StepRecord) -> StepInfo:
    return {
        "step": step.step,
        "started_at": step.started_at,
        "seconds": step.seconds,
        "prefill_tokens": step.prefill_tokens,
        "decode_tokens": step.decode_tokens,
        "rows": dict(step.rows),
        "requests": list(step.requests),
    }
