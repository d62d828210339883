"""The engine's counters and gauges for Prometheus, read from a snapshot at scrape time.

No label depends on what clients send, so the number of series is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lorad.engine.messages import EngineStats, Histogram, LoadReason, MemoryStats

EVICTIONS = (
    ("prefix", "kv"),
    ("prefix", "adapter"),
    ("adapter", "kv"),
    ("adapter", "adapter"),
    ("adapter", "unload"),
)


def metrics_source(stats: Callable[[], EngineStats], *others: Collector) -> Callable[[], bytes]:
    """A function that renders the newest snapshot, and `others`, in the text format."""
    registry = CollectorRegistry()
    for collector in (_EngineCollector(stats), *others):
        registry.register(collector)
    return lambda: generate_latest(registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield CounterMetricFamily("lorad_engine_steps", "Engine steps run.", stats.steps)
        yield CounterMetricFamily(
            "lorad_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens
        )
        yield CounterMetricFamily(
            "lorad_generated_tokens", "Tokens generated.", stats.generated_tokens
        )
        yield _gauge(
            "lorad_requests", "state", {"running": stats.running, "waiting": stats.waiting}
        )
        yield _gauge(
            "lorad_pages",
            "owner",
            {
                "kv": stats.kv_pages,
                "cached": stats.cached_pages,
                "adapter": stats.adapter_pages,
                "free": stats.free_pages,
            },
        )
        yield GaugeMetricFamily("lorad_page_bytes", "Bytes of one page.", stats.page_bytes)
        yield GaugeMetricFamily(
            "lorad_host_cache_bytes", "Adapters in host memory.", stats.host_cache_bytes
        )
        tiers = Counter(state.residency for state in stats.adapters)
        yield _gauge(
            "lorad_adapters",
            "tier",
            {tier: tiers[tier] for tier in ("device", "host", "loading", "failed")},
        )
        yield GaugeMetricFamily(
            "lorad_weight_bytes", "The base model on the device.", stats.weight_bytes
        )
        yield from _memory(stats.memory)


def _memory(memory: MemoryStats) -> Iterator[Metric]:
    """Each label has a fixed set of values; a value that never occurred is 0."""
    yield _counter(
        "lorad_adapter_lookups",
        "Requests by the tier that held their adapter when they came.",
        "tier",
        {tier: memory.lookups.get(tier, 0) for tier in ("device", "host", "store")},
    )
    loads = {reason: memory.loads.get(reason, 0) for reason in get_args(LoadReason)}
    yield _counter("lorad_adapter_loads", "Loads from the store.", "reason", loads)
    yield CounterMetricFamily(
        "lorad_adapter_loads_cancelled",
        "Loads that nobody waited for any more.",
        memory.cancelled_loads,
    )
    yield _load_seconds(memory.load_seconds)
    evictions = CounterMetricFamily(
        "lorad_evictions", "What left the device, and for whom.", labels=["kind", "reason"]
    )
    for kind, reason in EVICTIONS:
        evictions.add_metric([kind, reason], memory.evictions.get((kind, reason), 0))
    yield evictions
    yield CounterMetricFamily(
        "lorad_host_evictions", "Adapters that left host memory.", memory.host_evictions
    )
    yield _counter(
        "lorad_relocations",
        "Pages of KV, and adapters, moved to make room for an adapter.",
        "kind",
        {"page": memory.moved_pages, "adapter": memory.moved_adapters},
    )
    yield CounterMetricFamily(
        "lorad_relocation_seconds", "Seconds that moving took.", memory.move_seconds
    )
    yield CounterMetricFamily(
        "lorad_prefix_lookup_tokens", "Prompt tokens admitted.", memory.prefix_lookup_tokens
    )
    yield CounterMetricFamily(
        "lorad_prefix_hit_tokens",
        "Prompt tokens found in the prefix cache.",
        memory.prefix_hit_tokens,
    )
    yield CounterMetricFamily(
        "lorad_preemptions", "Sequences that lost their pages for a while.", memory.preemptions
    )


def _load_seconds(histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, histogram.BOUNDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(
        "lorad_adapter_load_seconds", "Reading an adapter.", buckets, histogram.sum
    )


def _counter(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _gauge(name: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, f"By {label}.", labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
