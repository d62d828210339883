"""The counters of canaries for Prometheus. Labels: two versions of each adapter that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorad.registry.records import Adapter
from lorad.server.canary_watch import CanaryWatch, Counts

_COUNTERS: dict[str, tuple[str, Callable[[Counts], float]]] = {
    "lorad_version_requests": ("Requests ended.", lambda c: c.requests),
    "lorad_version_errors": ("Requests that failed.", lambda c: c.errors),
    "lorad_version_nonfinite": ("Requests ended by NaN.", lambda c: c.nonfinite),
    "lorad_version_generated_tokens": ("Tokens generated.", lambda c: c.generated_tokens),
    "lorad_version_first_tokens": ("Requests with a first token.", lambda c: c.first_tokens),
    "lorad_version_ttft_seconds": ("Sum of times to it.", lambda c: c.ttft_seconds),
}
_LABELS = ("adapter", "version", "role")


class CanaryCollector(Collector):
    def __init__(self, adapters: Callable[[], Iterable[Adapter]], watch: CanaryWatch) -> None:
        self._adapters = adapters
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        compared = [a for a in self._adapters() if a.canary and a.live]
        share = GaugeMetricFamily(
            "lorad_canary_percent", "Share of the bare name's requests.", labels=_LABELS[:2]
        )
        for adapter in compared:
            if adapter.canary:
                name = adapter.name.qualified
                share.add_metric([name, adapter.canary.version], adapter.canary.percent)
        yield share
        for metric, (text, value) in _COUNTERS.items():
            family = CounterMetricFamily(metric, text, labels=_LABELS)
            for adapter in compared:
                for label, counts in self._watch.counts(adapter).items():
                    role = "live" if label == adapter.live else "canary"
                    family.add_metric([adapter.name.qualified, label, role], value(counts))
            yield family
