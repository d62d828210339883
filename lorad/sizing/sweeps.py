"""One quantity varied, the rest of a plan held: the rows of `loractl plan --sweep`."""

from __future__ import annotations

from dataclasses import dataclass

from lorad.sizing.fleet import AdapterKind, kind_of_rank
from lorad.sizing.memory_plan import pages_for
from lorad.sizing.other_engines import vllm_reservation
from lorad.sizing.planner import Plan
from lorad.sizing.recommend import slots_curve
from lorad.sizing.targets import Targets

RANKS = (1, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class RankRow:
    """One adapter of this rank."""

    rank: int
    nbytes: int
    pages: int
    resident: int | None  # that fit beside KV; None without a machine
    vllm_slot: int | None  # bytes of one slot


@dataclass(frozen=True, slots=True)
class SlotsRow:
    """A number of adapters on the device."""

    slots: int
    lru: float
    pinned: float
    nbytes: int  # of that many average adapters
    vllm: int | None  # bytes reserved for as many slots


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A context length."""

    context: int
    kv_per_sequence: int
    sequences: int  # that fit with no adapter resident
    resident: int  # adapters beside the KV of all concurrent sequences


def sweep_ranks(plan: Plan, targets: Targets) -> list[RankRow]:
    question = plan.question
    return [
        _rank_row(plan, kind_of_rank(question.arch, targets, rank, question.demand.tp))
        for rank in RANKS
    ]


def _rank_row(plan: Plan, kind: AdapterKind) -> RankRow:
    question, budget = plan.question, plan.budget
    pages = plan.kind_pages(kind)
    vllm = vllm_reservation(
        question.arch, 1, kind.rank, question.sizes.adapters, question.demand.tp
    )
    return RankRow(
        kind.rank,
        plan.kind_bytes(kind),
        pages,
        budget.adapter_pages // pages if budget else None,
        vllm.high if vllm else None,
    )


def sweep_slots(plan: Plan) -> list[SlotsRow]:
    """Needs a workload; slots double up to the fleet, with the recommended number among them."""
    workload, question = plan.question.workload, plan.question
    if workload is None:
        return []
    fleet = len(workload.popularity)
    doubling = [1 << n for n in range(fleet.bit_length()) if 1 << n < fleet]
    slots = sorted({*doubling, plan.slots, fleet})
    rank = max(kind.rank for kind in question.kinds)
    rows = []
    for count, lru, pinned in slots_curve(workload, [n for n in slots if n <= fleet]):
        vllm = vllm_reservation(
            question.arch, count, rank, question.sizes.adapters, question.demand.tp
        )
        nbytes = int(count * plan.mean_bytes)
        rows.append(SlotsRow(count, lru, pinned, nbytes, vllm.high if vllm else None))
    return rows


def sweep_contexts(plan: Plan) -> list[ContextRow]:
    """Needs a machine; contexts double from 1024 to the model's own limit."""
    budget, demand = plan.budget, plan.question.demand
    if budget is None:
        return []
    most = max(plan.question.arch.max_position, demand.context)
    contexts = [1 << n for n in range(10, most.bit_length()) if 1 << n <= most]
    rows = []
    for context in sorted({*contexts, demand.context}):
        pages = pages_for(context, demand.block_size)
        left = max(0, budget.pages - demand.concurrency * pages)
        resident = int(left / plan.mean_pages)
        rows.append(ContextRow(context, pages * budget.page, budget.pages // pages, resident))
    return rows
