"""A plan as one JSON document (schema lorad/plan/v1). All sizes are bytes, per GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lorad.sizing.fleet import AdapterKind
from lorad.sizing.other_engines import Reservation
from lorad.sizing.planner import Plan


def plan_document(made: Plan, rows: list[Any], sweep: str | None) -> dict[str, Any]:
    """The document of `loractl plan --json`, without its schema."""
    question = made.question
    document: dict[str, Any] = {
        "model": _model(made),
        "adapters": [_kind(made, kind) for kind in question.kinds],
        "demand": asdict(question.demand),
        "page_bytes": made.page,
        "fits": made.fits,
        "budget": asdict(made.budget) if made.budget else None,
        "buys": _buys(made),
        "traffic": _traffic(made),
        "recommended": _recommended(made),
        "compare": [_reservation(made, other) for other in made.others],
        "lints": [asdict(lint) for lint in made.lints],
    }
    if sweep:
        document["sweep"] = {"over": sweep, "rows": [asdict(row) for row in rows]}
    return document


def _model(made: Plan) -> dict[str, Any]:
    arch, sizes = made.question.arch, made.question.sizes
    return {
        "given": made.question.model,
        "model_type": arch.model_type,
        "attention": arch.attention,
        "layers": arch.num_layers,
        "parameters": arch.elements,
        "weight_bytes": arch.elements * sizes.weights,
        "kv_bytes_per_token": arch.kv_elements_per_token * sizes.kv,
        "max_position": arch.max_position,
        "served_by_lorad": arch.served,
    }


def _kind(made: Plan, kind: AdapterKind) -> dict[str, Any]:
    itemsize = made.question.sizes.adapters
    by_target: dict[str, int] = {}
    for size in kind.sizes:
        by_target[size.name] = by_target.get(size.name, 0) + size.nbytes(itemsize)
    return {
        "label": kind.label,
        "rank": kind.rank,
        "targets": list(kind.targets),
        "bytes": made.kind_bytes(kind),
        "bytes_by_target": by_target,
        "allocated_bytes": kind.allocated(itemsize),
        "pages": made.kind_pages(kind),
    }


def _buys(made: Plan) -> dict[str, Any] | None:
    budget, machine = made.budget, made.question.machine
    if budget is None or machine is None:
        return None
    block = made.question.demand.block_size
    return {
        "kv_tokens": budget.pages * block,
        "sequences": budget.pages // budget.kv_per_sequence_pages,
        "resident_adapters": int(budget.adapter_pages / made.mean_pages),
        "host_adapters": int(machine.host_ram / made.mean_bytes),
    }


def _traffic(made: Plan) -> dict[str, Any] | None:
    workload = made.question.workload
    if workload is None:
        return None
    return {
        "popularity": workload.popularity.label,
        "fleet": len(workload.popularity),
        "rate": workload.rate,
        "batch": workload.batch,
        "miss_target": workload.miss,
    }


def _recommended(made: Plan) -> dict[str, Any] | None:
    return asdict(made.recommendation) if made.recommendation else None


def _reservation(made: Plan, other: Reservation) -> dict[str, Any]:
    return {
        **asdict(other),
        "low_bytes": other.low,
        "high_bytes": other.high,
        "slot_bytes": other.per_slot,
        "true_bytes": int(other.slots * made.mean_bytes),
        "ratio": other.high / (other.slots * made.mean_bytes),
    }
