"""Records of the registry and the engine as the JSON of the admin API."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from lorad.engine.messages import AdapterState, EngineStats, MemoryStats, StepRecord
from lorad.registry.records import Adapter, CanaryMove, Event, Move, Version, Who
from lorad.server.canary_watch import Counts
from lorad.server.self_test import SelfTestResult
from lorad.wire import (
    AdapterInfo,
    CanaryInfo,
    CanaryResult,
    CountsInfo,
    EngineInfo,
    EventInfo,
    MemoryInfo,
    MoveResult,
    ResidencyInfo,
    SelfTestInfo,
    StepInfo,
    StoreInfo,
    TtftInfo,
    VersionInfo,
    WhoInfo,
)

States = Mapping[str, AdapterState]  # by digest


def states(stats: EngineStats) -> States:
    return {state.digest: state for state in stats.adapters}


def who_info(who: Who) -> WhoInfo:
    return {"uid": who.uid, "pid": who.pid}


def adapter_info(adapter: Adapter, resident: States, counts: Mapping[str, Counts]) -> AdapterInfo:
    """`counts` are of its live version and its canary."""
    return {
        "name": str(adapter.name),
        "generation": adapter.generation,
        "live": adapter.live,
        "live_since": adapter.live_since,
        "canary": canary_info(adapter, counts),
        "created_at": adapter.created_at,
        "versions": [
            version_info(version, resident, live=label == adapter.live)
            for label, version in adapter.versions.items()
        ],
    }


def canary_info(adapter: Adapter, counts: Mapping[str, Counts]) -> CanaryInfo | None:
    if adapter.canary is None:
        return None
    return {
        "version": adapter.canary.version,
        "percent": adapter.canary.percent,
        "auto_rollback": adapter.canary.auto_rollback,
        "since": adapter.canary.since,
        "counts": {label: counts_info(found) for label, found in counts.items()},
    }


def counts_info(counts: Counts) -> CountsInfo:
    return {
        "requests": counts.requests,
        "errors": counts.errors,
        "nonfinite": counts.nonfinite,
        "prompt_tokens": counts.prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "first_tokens": counts.first_tokens,
        "ttft_seconds": counts.ttft_seconds,
    }


def self_test_info(result: SelfTestResult | None) -> SelfTestInfo | None:
    if result is None:
        return None
    return {
        "prompts": result.prompts,
        "effect": result.effect,
        "delta_error": result.delta_error,
    }


def canary_result(move: CanaryMove, *, dry_run: bool) -> CanaryResult:
    after = move.after
    return {
        "name": str(move.name),
        "from_version": move.before.version if move.before else None,
        "version": after.version if after else None,
        "percent": after.percent if after else 0.0,
        "auto_rollback": bool(after and after.auto_rollback),
        "generation": move.generation,
        "changed": move.changed,
        "dry_run": dry_run,
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
        "name": str(event.name),
        "at": event.at,
        "who": who_info(event.who),
        "action": event.action.value,
        "from_version": event.from_version,
        "to_version": event.to_version,
        "generation": event.generation,
        "reason": event.reason,
        "percent": event.percent,
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
        "loads_done": sum(memory.load_seconds.counts),
        "evictions": {f"{what} for {whom}": n for (what, whom), n in memory.evictions.items()},
        "host_evictions": memory.host_evictions,
        "moved_pages": memory.moved_pages,
        "moved_adapters": memory.moved_adapters,
        "move_seconds": memory.move_seconds,
        "prefix_lookup_tokens": memory.prefix_lookup_tokens,
        "prefix_hit_tokens": memory.prefix_hit_tokens,
        "preemptions": memory.preemptions,
    }


def store_info(state: Path) -> StoreInfo:
    """Of the disk that holds the registry. Zeros when it does not answer."""
    try:
        disk = shutil.disk_usage(state)
    except OSError:
        return {"path": str(state), "free_bytes": 0, "total_bytes": 0}
    return {"path": str(state), "free_bytes": disk.free, "total_bytes": disk.total}


def ttft_info(recent: Iterable[tuple[str, float]]) -> TtftInfo:
    """Of the last requests, in seconds: all of them, and each version's own."""
    by_version: dict[str, list[float]] = {}
    for label, seconds in recent:
        by_version.setdefault(label, []).append(seconds)
    every = sorted(seconds for times in by_version.values() for seconds in times)
    return {
        "requests": len(every),
        "p50": every[len(every) // 2] if every else None,
        "p99": every[len(every) * 99 // 100] if every else None,
        "p50_by_version": {k: sorted(v)[len(v) // 2] for k, v in by_version.items()},
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
