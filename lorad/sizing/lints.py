"""What goes wrong in practice with adapters, found before it does, with what it costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lorad.sizing.architecture import Architecture
from lorad.sizing.budget import Budget, Demand, Itemsizes, Machine
from lorad.sizing.fleet import AdapterKind
from lorad.sizing.other_engines import vllm_rank, vllm_reservation
from lorad.sizing.recommend import FleetSizes, Recommendation, Workload, slots_curve

DEFAULT_SLOTS = 8  # compared where neither a setting nor a workload says how many
HIGH_RANK, _USUAL_RANK = 64, 16
_BUSY = 0.7  # utilization of the loader from which waiting grows fast
_MEDUSA_HEADS = 4
# support-v2, support_v2.1, support@3, support-2024-05-01: one adapter under several names.
_VERSION = re.compile(
    r"([-_.@](v?\d+([._]\d+)*|\d{4}-\d{2}-\d{2}|step-?\d+|epoch-?\d+))+$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Lint:
    """One finding. A cost in bytes is per GPU, one in ms is the mean per request or per load;
    None where it cannot be put in that unit."""

    code: str
    message: str
    hint: str
    cost_bytes: int | None = None
    cost_ms: float | None = None


@dataclass(frozen=True)
class Deployment:
    """How things are, or are meant to be, configured; 0 and "" = not said."""

    max_loras: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0
    processes: int = 1  # model processes that serve the fleet today
    replicas: int = 1
    routing: str = "affinity"
    speculation: str = ""


@dataclass(frozen=True)
class Situation:
    """All that a lint may look at; None where the plan was not asked for that much."""

    arch: Architecture
    kinds: Sequence[AdapterKind]
    sizes: Itemsizes
    demand: Demand
    deployment: Deployment
    machine: Machine | None = None
    budget: Budget | None = None
    workload: Workload | None = None
    fleet: FleetSizes | None = None
    recommendation: Recommendation | None = None

    @property
    def slots(self) -> int:
        if self.deployment.max_loras:
            return self.deployment.max_loras
        return self.recommendation.max_loras if self.recommendation else DEFAULT_SLOTS

    @property
    def largest_rank(self) -> int:
        return max(kind.rank for kind in self.kinds)


def find_lints(at: Situation) -> list[Lint]:
    """Every finding, in a fixed order."""
    return [lint for check in _CHECKS for lint in check(at)]


def _not_served(at: Situation) -> Iterator[Lint]:
    if not at.arch.served:
        yield Lint(
            "family-not-served",
            f"lorad plans for {at.arch.model_type} but does not serve it yet",
            "the sizes hold; serve it with another engine until then",
        )
    if at.demand.tp > 1:
        yield Lint(
            "tp-not-served",
            f"lorad runs on one GPU; figures for --tp {at.demand.tp} are per GPU of a split model",
            "use --tp 1 for lorad, or --compare vllm for an engine that splits",
        )


def _rank_headroom(at: Situation) -> Iterator[Lint]:
    bound, real = at.deployment.max_lora_rank, at.largest_rank
    if bound <= real:
        return
    cost = _vllm_bytes(at, bound) - _vllm_bytes(at, real)
    yield Lint(
        "rank-headroom",
        f"max_lora_rank {bound} is above the largest real rank {real}: "
        f"vLLM pays for it in each of {at.slots} slots, lorad does not",
        f"set max_lora_rank to {real}",
        cost_bytes=cost,
    )


def _rank_bucket(at: Situation) -> Iterator[Lint]:
    real = at.largest_rank
    bucket = vllm_rank(real)
    if bucket is None or bucket == real:
        return
    cost = _vllm_bytes(at, bucket) * (bucket - real) // bucket
    yield Lint(
        "rank-bucket",
        f"vLLM rounds rank {real} up to {bucket}; lorad stores and computes rank {real}",
        f"train at {bucket}, or at the next rank below that vLLM has",
        cost_bytes=cost,
    )


def _vllm_bytes(at: Situation, rank: int) -> int:
    found = vllm_reservation(at.arch, at.slots, rank, at.sizes.adapters, at.demand.tp)
    return found.high if found else 0


def _host_below_device(at: Situation) -> Iterator[Lint]:
    device, host = at.slots, at.deployment.max_cpu_loras
    if not host or host >= device:
        return
    yield Lint(
        "host-below-device",
        f"max_cpu_loras {host} is below max_loras {device}: an adapter leaves the host while "
        "still on the device and is read from the store again (vLLM refuses this)",
        f"set max_cpu_loras to {device} or more",
        cost_ms=at.recommendation.disk_load_ms if at.recommendation else None,
    )


def _host_ram(at: Situation) -> Iterator[Lint]:
    rec, fleet, machine = at.recommendation, at.fleet, at.machine
    if not rec or not fleet or not machine or not machine.host_ram:
        return
    need = int(rec.max_cpu_loras * fleet.mean_bytes)
    if need > machine.host_ram:
        yield Lint(
            "host-ram-short",
            f"host memory does not hold the {rec.max_cpu_loras} adapters of the device",
            "give more --host-ram",
            cost_bytes=need - machine.host_ram,
        )


def _process_per_adapter(at: Situation) -> Iterator[Lint]:
    processes = at.deployment.processes
    if processes < 2:
        return
    weights = at.arch.elements_per_gpu(at.demand.tp) * at.sizes.weights
    yield Lint(
        "process-per-adapter",
        f"{processes} processes hold the same base weights; one serves all their adapters",
        "serve the adapters from one process",
        cost_bytes=(processes - 1) * weights,
    )


def _versions_as_names(at: Situation) -> Iterator[Lint]:
    names = at.workload.popularity.names if at.workload else [kind.label for kind in at.kinds]
    groups = Counter(_VERSION.sub("", name) for name in names)
    repeated = [(base, count) for base, count in groups.items() if count > 1]
    if not repeated:
        return
    extra = sum(count - 1 for _, count in repeated)
    mean = sum(kind.allocated(at.sizes.adapters) for kind in at.kinds) / len(at.kinds)
    base, count = max(repeated, key=lambda item: item[1])
    yield Lint(
        "versions-as-names",
        f"{extra} adapters look like versions of another ({base}: {count} names); each name is "
        "cached, and clients must change to be promoted",
        "push them as versions of one name, and promote",
        cost_bytes=int(extra * mean),
    )


def _no_affinity(at: Situation) -> Iterator[Lint]:
    """With N replicas behind a random balancer, each one sees, and must cache, the fleet."""
    replicas, rec = at.deployment.replicas, at.recommendation
    if replicas < 2 or at.deployment.routing == "affinity" or not rec or not at.workload:
        return
    slots, fleet = at.slots, len(at.workload.popularity)
    if fleet <= slots:
        return
    (_, alone, _), (_, together, _) = slots_curve(
        at.workload, [slots, min(fleet, slots * replicas)]
    )
    yield Lint(
        "no-affinity",
        f"{replicas} replicas without adapter affinity hit {alone:.1%} of the time; "
        f"routed by adapter they would hit about {together:.1%}",
        "hash consistently on the adapter (--emit k8s)",
        cost_ms=(together - alone) * rec.device_load_ms,
    )


def _speculation(at: Situation) -> Iterator[Lint]:
    method = at.deployment.speculation
    if method not in ("eagle", "medusa"):
        return
    hidden, vocab = at.arch.hidden_size, at.arch.vocab_size
    if method == "eagle":
        group = at.arch.groups[0]
        layer = sum(linear.elements for linear in group.linears) + group.other_elements
        elements = layer + 2 * hidden * hidden
    else:
        elements = _MEDUSA_HEADS * (hidden * (hidden + 1) + vocab * hidden)
    yield Lint(
        "speculation-with-adapters",
        f"{method} was trained on the base model: its draft runs without the adapter, and its "
        "guesses are accepted less often the more the adapter changes",
        "measure acceptance with your adapters, or draft by n-grams, which need no weights",
        cost_bytes=elements * at.sizes.weights,
    )


def _high_rank(at: Situation) -> Iterator[Lint]:
    for kind in at.kinds:
        if kind.needed is not None:
            yield from _over_spectrum(at, kind, kind.needed)
        elif kind.rank >= HIGH_RANK:
            now = kind.nbytes(at.sizes.adapters)
            yield Lint(
                "rank-over-spectrum",
                f"{_with_rank(kind)} is often more than the weights use; rank {_USUAL_RANK} "
                f"would be {_USUAL_RANK / kind.rank:.0%} of the size",
                "see `loractl inspect --spectrum`, then `loractl resize`",
                cost_bytes=now - now * _USUAL_RANK // kind.rank,
            )


def _with_rank(kind: AdapterKind) -> str:
    rank = f"rank {kind.rank}"
    return rank if kind.label == rank else f"{kind.label} ({rank})"


def _over_spectrum(at: Situation, kind: AdapterKind, needed: AdapterKind) -> Iterator[Lint]:
    saved = kind.nbytes(at.sizes.adapters) - needed.nbytes(at.sizes.adapters)
    if saved > 0:
        yield Lint(
            "rank-over-spectrum",
            f"{_with_rank(kind)} keeps 99 % of the energy of each of its modules at rank "
            f"{needed.rank} or less",
            f"loractl resize {kind.label} --energy 0.99",
            cost_bytes=saved,
        )


def _miss_unreachable(at: Situation) -> Iterator[Lint]:
    rec, workload = at.recommendation, at.workload
    if not rec or not workload or not at.fleet:
        return
    if rec.device.miss > workload.miss:
        short = (rec.slots_for_miss - rec.device.resident) * at.fleet.mean_bytes
        yield Lint(
            "miss-unreachable",
            f"{workload.popularity.label} needs {rec.slots_for_miss} adapters on the device for "
            f"misses of {workload.miss:.1%}; memory holds {rec.device.resident:.0f}, and "
            f"{rec.device.miss:.1%} miss",
            "lower --context or --concurrency, take a larger GPU, or more replicas with affinity",
            cost_bytes=max(0, int(short)),
            cost_ms=(rec.device.miss - workload.miss) * rec.device_load_ms,
        )


def _loader_busy(at: Situation) -> Iterator[Lint]:
    rec = at.recommendation
    if rec and rec.load_utilization is not None and rec.load_utilization > _BUSY:
        yield Lint(
            "loader-busy",
            f"loading adapters would keep the loader busy {rec.load_utilization:.0%} of the time; "
            "from 100 % on, requests queue without end",
            "more device or host memory for adapters, smaller ranks, or fewer requests a replica",
            cost_ms=rec.device_load_ms,
        )


def _context(at: Situation) -> Iterator[Lint]:
    if at.arch.max_position and at.demand.context > at.arch.max_position:
        yield Lint(
            "context-beyond-model",
            f"--context {at.demand.context} is beyond the model's {at.arch.max_position} positions",
            f"use --context {at.arch.max_position}",
        )


def _scratch(at: Situation) -> Iterator[Lint]:
    budget, machine = at.budget, at.machine
    if not budget or not machine or not budget.scratch or budget.slab <= 0:
        return
    spare = machine.total - budget.usable
    over = budget.scratch.high - budget.scratch.reserved - spare
    if over > 0:
        yield Lint(
            "scratch-tight",
            "if activations and graphs take their high estimate, the GPU is full",
            "lower --gpu-memory-utilization or --max-num-batched-tokens",
            cost_bytes=over,
        )


_CHECKS: tuple[Callable[[Situation], Iterator[Lint]], ...] = (
    _not_served,
    _context,
    _scratch,
    _rank_headroom,
    _rank_bucket,
    _high_rank,
    _host_below_device,
    _host_ram,
    _process_per_adapter,
    _versions_as_names,
    _no_affinity,
    _speculation,
    _miss_unreachable,
    _loader_busy,
)
