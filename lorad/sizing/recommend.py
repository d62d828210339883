"""From a workload to `max_loras`, `max_cpu_loras` and `max_lora_rank`, with what they buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lorad.sizing.budget import Budget, Machine
from lorad.sizing.cache_model import (
    CacheModel,
    Distinct,
    HitRate,
    LruModel,
    distinct_in_batch,
    distinct_in_time,
    pinned_hit_rate,
    smallest_capacity,
)
from lorad.sizing.fleet import AdapterKind, assign_kinds
from lorad.sizing.memory_plan import pages_for
from lorad.sizing.popularity import Popularity
from lorad.sizing.traces import HOUR, Trace, TraceModel

# One adapter load, beside its bytes: a queue hop, allocation, launches. Milliseconds.
_LOAD_BASE_MS = 1.0
_HOST_HEADROOM = 1.2


@dataclass(frozen=True)
class Workload:
    """Who asks for which adapter how often."""

    popularity: Popularity
    rate: float  # requests per second; 0 = not said
    batch: int  # rows that run at once
    miss: float  # the miss rate to reach on the device
    trace: Trace | None = None


@dataclass(frozen=True)
class FleetSizes:
    """Sizes of every adapter of the fleet, in the order of the popularity."""

    kinds: tuple[AdapterKind, ...]
    of: tuple[int, ...]  # index of its kind
    kind_bytes: tuple[int, ...]

    @classmethod
    def of_workload(
        cls, workload: Workload, kinds: Sequence[AdapterKind], itemsize: int
    ) -> FleetSizes:
        """A kind whose label is an adapter's name is its; the rest take turns."""
        popularity = workload.popularity
        of = assign_kinds(len(popularity), kinds, popularity.names)
        return cls(tuple(kinds), tuple(of), tuple(k.allocated(itemsize) for k in kinds))

    def in_pages(self, page: int) -> list[int]:
        pages = [pages_for(nbytes, page) for nbytes in self.kind_bytes]
        return [pages[kind] for kind in self.of]

    def in_bytes(self) -> list[int]:
        return [self.kind_bytes[kind] for kind in self.of]

    @property
    def mean_bytes(self) -> float:
        return sum(self.in_bytes()) / len(self.of)


@dataclass(frozen=True)
class Recommendation:
    """Settings, what decided them, and what they give."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    binds: str  # what decided max_loras
    slots_for_miss: int
    distinct: Distinct
    unique_last_hour: float | None
    resident: float  # adapters on the device at once
    device: HitRate  # with all pages that KV leaves
    at_max_loras: HitRate  # with max_loras places of any size
    host: float  # share of requests whose adapter waits in host memory
    disk: float  # share that go to the store
    pinned_gain: float  # what pinning the most popular would add to `at_max_loras`
    device_load_ms: float
    disk_load_ms: float
    load_utilization: float | None  # busy share of the one loader; None without a rate


def recommend(
    workload: Workload, sizes: FleetSizes, budget: Budget | None, machine: Machine | None
) -> Recommendation:
    """`budget` and `machine` are None where no device was named: then memory never binds."""
    shares, fleet = workload.popularity.shares, len(workload.popularity)
    slots = _model(workload, [1] * fleet)
    distinct = distinct_in_batch(shares, workload.batch)
    wanted, binds, for_miss = _wanted_slots(workload, slots, distinct)
    device, fitting = _device(workload, sizes, budget)
    if fitting < wanted:
        wanted, binds = max(1, fitting), "device memory"
    hour = _unique_last_hour(workload)
    cpu_loras = _cpu_loras(hour, wanted, fleet, sizes, machine)
    in_host = _model(workload, [1] * fleet).hit_rate(cpu_loras).rate
    device_ms, disk_ms = _load_ms(sizes.mean_bytes, machine)
    host, disk = max(0.0, in_host - device.rate), 1.0 - max(in_host, device.rate)
    at_max = slots.hit_rate(wanted)
    load = (host * device_ms + disk * (device_ms + disk_ms)) / 1000
    return Recommendation(
        max_loras=wanted,
        max_cpu_loras=cpu_loras,
        max_lora_rank=max(kind.rank for kind in sizes.kinds),
        binds=binds,
        slots_for_miss=for_miss,
        distinct=distinct,
        unique_last_hour=hour,
        resident=device.resident,
        device=device,
        at_max_loras=at_max,
        host=host,
        disk=disk,
        pinned_gain=max(0.0, pinned_hit_rate(shares, wanted) - at_max.rate),
        device_load_ms=device_ms,
        disk_load_ms=disk_ms,
        load_utilization=workload.rate * load if workload.rate else None,
    )


def _model(workload: Workload, sizes: Sequence[int]) -> CacheModel:
    if workload.trace is not None:
        return TraceModel(workload.trace, sizes)
    return LruModel(workload.popularity.shares, sizes)


def slots_curve(workload: Workload, slots: Sequence[int]) -> list[tuple[int, float, float]]:
    """(slots, LRU hit rate, hit rate with the most popular pinned) for a table or a plot."""
    shares = workload.popularity.shares
    model = _model(workload, [1] * len(shares))
    return [(n, model.hit_rate(n).rate, pinned_hit_rate(shares, n)) for n in slots]


def _wanted_slots(
    workload: Workload, slots: CacheModel, distinct: Distinct
) -> tuple[int, str, int]:
    """(slots, what decided them, slots for the miss target alone)."""
    fleet = len(workload.popularity)
    for_miss = smallest_capacity(slots, fleet, workload.miss)
    for_batch = min(fleet, distinct.high)
    if max(for_miss, for_batch) == fleet:
        return fleet, "fleet size", for_miss
    if for_batch > for_miss:
        return for_batch, "adapters in one batch", for_miss
    return for_miss, "miss target", for_miss


def _device(workload: Workload, sizes: FleetSizes, budget: Budget | None) -> tuple[HitRate, int]:
    """Hits with all pages KV leaves, and how many adapters those hold on average."""
    fleet = len(workload.popularity)
    if budget is None:
        return HitRate(1.0, "all fit", fleet), fleet
    pages = sizes.in_pages(budget.page)
    hits = _model(workload, pages).hit_rate(budget.adapter_pages)
    return hits, min(fleet, int(budget.adapter_pages / (sum(pages) / fleet)))


def _unique_last_hour(workload: Workload) -> float | None:
    if workload.trace is not None:
        return float(workload.trace.unique_in_last(HOUR))
    if not workload.rate:
        return None
    return distinct_in_time(workload.popularity.shares, workload.rate * HOUR)


def _cpu_loras(
    hour: float | None,
    max_loras: int,
    fleet: int,
    sizes: FleetSizes,
    machine: Machine | None,
) -> int:
    """Adapters of the last hour and a fifth more, never fewer than on the device."""
    wanted = fleet if hour is None else min(fleet, ceil(hour * _HOST_HEADROOM))
    if machine is not None and machine.host_ram:
        wanted = min(wanted, int(machine.host_ram / sizes.mean_bytes))
    return max(max_loras, wanted)


def _load_ms(nbytes: float, machine: Machine | None) -> tuple[float, float]:
    """Milliseconds from host memory to the device, and from the store to host memory."""
    if machine is None:
        return 0.0, 0.0
    device = _LOAD_BASE_MS + nbytes / machine.host_link_gb_s / 1e6
    return device, _LOAD_BASE_MS + nbytes / machine.disk_gb_s / 1e6
