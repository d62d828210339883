"""A whole plan: from a model, its adapters and a machine to bytes, settings and findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lorad.sizing.architecture import Architecture
from lorad.sizing.budget import Budget, Demand, Itemsizes, Machine, make_budget
from lorad.sizing.fleet import AdapterKind
from lorad.sizing.lints import DEFAULT_SLOTS, Deployment, Lint, Situation, find_lints
from lorad.sizing.memory_plan import page_bytes, pages_for
from lorad.sizing.other_engines import Reservation, sglang_reservation, vllm_reservation
from lorad.sizing.recommend import FleetSizes, Recommendation, Workload, recommend


@dataclass(frozen=True)
class Question:
    """What a plan is asked for. Without a machine there is no budget, without a workload no
    recommendation."""

    model: str
    arch: Architecture
    kinds: tuple[AdapterKind, ...]
    sizes: Itemsizes
    demand: Demand
    deployment: Deployment
    machine: Machine | None = None
    workload: Workload | None = None
    compare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The answer. `pages` of a kind are those of the slab; bytes are per GPU."""

    question: Question
    page: int
    budget: Budget | None
    fleet: FleetSizes | None
    recommendation: Recommendation | None
    others: tuple[Reservation, ...]
    lints: tuple[Lint, ...]

    @property
    def slots(self) -> int:
        """Adapters that run at once: what `max_loras` is, or would be."""
        if self.question.deployment.max_loras:
            return self.question.deployment.max_loras
        return self.recommendation.max_loras if self.recommendation else DEFAULT_SLOTS

    def kind_bytes(self, kind: AdapterKind) -> int:
        return kind.nbytes(self.question.sizes.adapters)

    def kind_pages(self, kind: AdapterKind) -> int:
        return pages_for(kind.allocated(self.question.sizes.adapters), self.page)

    @property
    def mean_bytes(self) -> float:
        """Bytes of an average adapter, without the rounding to pages."""
        if self.fleet:
            per_kind = [self.kind_bytes(kind) for kind in self.fleet.kinds]
            return sum(per_kind[kind] for kind in self.fleet.of) / len(self.fleet.of)
        return sum(map(self.kind_bytes, self.question.kinds)) / len(self.question.kinds)

    @property
    def mean_pages(self) -> float:
        if self.fleet:
            pages = self.fleet.in_pages(self.page)
            return sum(pages) / len(pages)
        return sum(map(self.kind_pages, self.question.kinds)) / len(self.question.kinds)

    @property
    def batch_pages(self) -> int:
        """Pages of the adapters that one batch may need at once; at least the largest one's."""
        largest = max(map(self.kind_pages, self.question.kinds))
        if not self.recommendation or not self.question.workload:
            return largest
        fleet = len(self.question.workload.popularity)
        return max(largest, int(min(fleet, self.recommendation.distinct.high) * self.mean_pages))

    @property
    def fitting_sequences(self) -> int:
        """Sequences at the full context that fit beside the adapters of one batch."""
        if self.budget is None:
            return self.question.demand.concurrency
        left = max(0, self.budget.pages - self.batch_pages)
        return left // self.budget.kv_per_sequence_pages

    @property
    def fits(self) -> bool:
        """Weights, the KV of every sequence and the adapters of one batch, all at once."""
        if self.budget is None:
            return True
        return self.budget.kv_pages + self.batch_pages <= self.budget.pages


def make_plan(question: Question) -> Plan:
    arch, demand, sizes = question.arch, question.demand, question.sizes
    largest = max(kind.rank for kind in question.kinds)
    budget = fleet = recommendation = None
    if question.machine is not None:
        budget = make_budget(arch, question.machine, demand, sizes, largest)
    page = budget.page if budget else page_bytes(arch, demand.block_size, sizes.kv, demand.tp)
    if question.workload is not None:
        fleet = FleetSizes.of_workload(question.workload, question.kinds, sizes.adapters)
        recommendation = recommend(question.workload, fleet, budget, question.machine)
    situation = Situation(
        arch=arch,
        kinds=question.kinds,
        sizes=sizes,
        demand=demand,
        deployment=question.deployment,
        machine=question.machine,
        budget=budget,
        workload=question.workload,
        fleet=fleet,
        recommendation=recommendation,
    )
    return Plan(
        question=question,
        page=page,
        budget=budget,
        fleet=fleet,
        recommendation=recommendation,
        others=tuple(_others(question, situation.slots)),
        lints=tuple(find_lints(situation)),
    )


def _others(question: Question, slots: int) -> Sequence[Reservation]:
    """For the largest rank there is, or a larger one that is meant to be admitted."""
    arch, tp, itemsize = question.arch, question.demand.tp, question.sizes.adapters
    rank = max(question.deployment.max_lora_rank, *(kind.rank for kind in question.kinds))
    leaves = {leaf for kind in question.kinds for leaf in kind.leaves}
    found = {
        "vllm": lambda: vllm_reservation(arch, slots, rank, itemsize, tp),
        "sglang": lambda: sglang_reservation(arch, slots, rank, leaves, itemsize, tp),
    }
    answers = [found[engine]() for engine in question.compare]
    return [answer for answer in answers if answer is not None]
