"""The engine's counters and gauges for Prometheus, read from a snapshot at scrape time.

No label depends on what clients send, so the number of series is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorad.engine.messages import EngineStats


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
            {"kv": stats.kv_pages, "adapter": stats.adapter_pages, "free": stats.free_pages},
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


def _gauge(name: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, f"By {label}.", labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
