"""A plan as a screen: aligned plain text, for a terminal and for a pipe alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from loractl.output import human_bytes, printable
from lorad.sizing.budget import Budget
from lorad.sizing.fleet import AdapterKind
from lorad.sizing.other_engines import Reservation
from lorad.sizing.planner import Plan
from lorad.sizing.recommend import Recommendation, Workload

_LABEL = 26
_SHOWN_KINDS = 12
_WIDTH = 100


def screen_lines(made: Plan) -> Iterator[str]:
    """The whole screen, without --explain and --sweep."""
    yield _model_line(made)
    yield ""
    yield from _adapter_lines(made)
    if made.budget:
        yield ""
        yield from _budget_lines(made, made.budget)
        yield ""
        yield from _buys_lines(made, made.budget)
    if made.recommendation and made.question.workload:
        yield ""
        yield from _recommendation_lines(made, made.recommendation, made.question.workload)
    if made.question.compare:
        yield ""
        yield from _compare_lines(made)
    yield from lint_lines(made)


def _row(label: str, value: str, note: str = "") -> str:
    return f"  {label:<{_LABEL}}{value:>12}   {note}".rstrip()


def _model_line(made: Plan) -> str:
    arch = made.question.arch
    group = arch.groups[-1]
    heads = "one latent" if arch.attention == "MLA" else f"{group.kv_heads} KV heads"
    return (
        f"{printable(made.question.model)}: {arch.model_type}, {arch.elements:,} parameters, "
        f"{arch.num_layers} layers, {heads} ({arch.attention})"
    )


def _adapter_lines(made: Plan) -> Iterator[str]:
    kinds = made.question.kinds
    split = f", per GPU of {made.question.demand.tp}" if made.question.demand.tp > 1 else ""
    yield f"Adapters (exact{split})"
    for kind in kinds[:_SHOWN_KINDS]:
        yield _kind_line(made, kind)
    if len(kinds) > _SHOWN_KINDS:
        yield f"  and {len(kinds) - _SHOWN_KINDS} more, {human_bytes(made.mean_bytes)} on average"


def _kind_line(made: Plan, kind: AdapterKind) -> str:
    nbytes = made.kind_bytes(kind)
    every = set(kind.targets) == set(made.question.arch.leaves)
    targets = "all linear layers" if every else ", ".join(kind.targets)
    note = f"{nbytes:,} B, {_count(made.kind_pages(kind), 'page')}; {targets}"
    return _row(printable(kind.label), human_bytes(nbytes), note)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _budget_lines(made: Plan, budget: Budget) -> Iterator[str]:
    machine = made.question.machine
    yield f"Memory of {printable(machine.label) if machine else ''}"
    if machine and machine.total:
        share = f"exact: {machine.utilization:.0%} of {human_bytes(machine.total)}"
        yield _row("usable", human_bytes(budget.usable), share)
    beside = "exact" if budget.scratch else "exact; beside the slab"
    yield _row("weights", human_bytes(budget.weights), beside)
    if budget.scratch:
        low, high = human_bytes(budget.scratch.low), human_bytes(budget.scratch.high)
        note = f"reserved; activations, LoRA rows and graphs use {low} to {high}"
        yield _row("scratch", human_bytes(budget.scratch.reserved), note)
    pages = f"exact: {_count(budget.pages, 'page')} of {human_bytes(budget.page)}"
    yield _row("slab", human_bytes(budget.slab), pages if budget.slab > 0 else "does not fit")
    yield from _slab_lines(made, budget)


def _slab_lines(made: Plan, budget: Budget) -> Iterator[str]:
    demand, rec = made.question.demand, made.recommendation

    def part(label: str, pages: int) -> str:
        return _row(f"  {label}", human_bytes(pages * budget.page), _count(pages, "page"))

    yield part(f"KV, {demand.concurrency} x {demand.context:,}", budget.kv_pages)
    if rec is None:
        yield part("left for adapters", budget.adapter_pages)
        return
    wanted = min(budget.adapter_pages, int(rec.max_loras * made.mean_pages))
    yield part(f"adapters, {rec.max_loras:,}", wanted)
    yield part("free, caches more of them", budget.adapter_pages - wanted)
    host = f"{rec.max_cpu_loras:,} adapters in host memory"
    yield _row("host cache", human_bytes(rec.max_cpu_loras * made.mean_bytes), host)


def _buys_lines(made: Plan, budget: Budget) -> Iterator[str]:
    demand, machine = made.question.demand, made.question.machine
    yield "What it buys" if made.fits else "It does not fit"
    per_token = human_bytes(budget.kv_per_token)
    tokens = budget.pages * demand.block_size
    yield _row("KV tokens", f"{tokens:,}", f"{per_token} a token, with no adapter resident")
    sequences = budget.pages // budget.kv_per_sequence_pages
    yield _row(f"sequences of {demand.context:,}", f"{sequences:,}", "with no adapter resident")
    resident = int(budget.adapter_pages / made.mean_pages)
    yield _row("resident adapters", f"{resident:,}", f"beside {demand.concurrency} full sequences")
    if machine and machine.host_ram:
        host = int(machine.host_ram / made.mean_bytes)
        yield _row("adapters in host memory", f"{host:,}", f"of {human_bytes(machine.host_ram)}")
    if not made.fits:
        short = budget.kv_pages + made.batch_pages - budget.pages
        missing = human_bytes(short * budget.page - min(0, budget.slab))
        yield _row("short by", missing, "for KV and the adapters of one batch")
        most = f"{made.fitting_sequences:,}"
        yield _row("it would fit", most, f"sequences of {demand.context:,} and these adapters")


def _recommendation_lines(made: Plan, rec: Recommendation, workload: Workload) -> Iterator[str]:
    fleet = len(workload.popularity)
    rate = f", {workload.rate:g} requests/s" if workload.rate else ""
    label = printable(workload.popularity.label)
    yield f"Recommended for {_count(fleet, 'adapter')}, {label}{rate}, batches of {workload.batch}"
    misses = f"{rec.at_max_loras.miss:.1%} miss with {_count(rec.max_loras, 'place')}"
    yield _row("max_loras", f"{rec.max_loras:,}", f"set by {rec.binds}; {misses}")
    yield _row("max_cpu_loras", f"{rec.max_cpu_loras:,}", _hour_note(rec, fleet))
    yield _row("max_lora_rank", f"{rec.max_lora_rank}", "the largest real rank")
    yield f"What {'this GPU' if made.budget else 'that'} gives"
    spread = f"on average; over {rec.distinct.high} in one batch of forty"
    yield _row("adapters in one batch", f"{rec.distinct.mean:.1f}", spread)
    held = f"{rec.resident:,.0f} adapters resident ({rec.device.method})"
    yield _row("found on the device", f"{rec.device.rate:.1%}", held)
    yield _row("loaded from host memory", f"{rec.host:.1%}", f"{rec.device_load_ms:.1f} ms each")
    yield _row("loaded from the store", f"{rec.disk:.1%}", f"{rec.disk_load_ms:.1f} ms more each")
    if rec.load_utilization is not None:
        yield _row("loader busy", f"{rec.load_utilization:.1%}", "one loader; keep below 70 %")
    gain = f"{rec.pinned_gain * 100:+.1f} points"
    yield _row("pinning instead of LRU", gain, f"the {rec.max_loras:,} most popular")


def _hour_note(rec: Recommendation, fleet: int) -> str:
    if rec.unique_last_hour is None:
        return "the whole fleet; --rate says how many an hour needs"
    used = f"{rec.unique_last_hour:,.0f} of {fleet:,} are used in an hour"
    return used if rec.max_cpu_loras >= fleet else f"{used}; a fifth more, as memory allows"


def _compare_lines(made: Plan) -> Iterator[str]:
    yield f"Reserved at start by others for the same {_count(made.slots, 'slot')}"
    true = made.slots * made.mean_bytes
    yield _row("lorad", "0 B", f"{human_bytes(true)} of pages once all are loaded, at true rank")
    for other in made.others:
        yield from _other_lines(made, other, true)
    named = {other.engine for other in made.others}
    for engine in made.question.compare:
        if engine not in named:
            yield _row(engine, "-", "does not serve this rank or this kind of attention")


def _other_lines(made: Plan, other: Reservation, true: float) -> Iterator[str]:
    size = human_bytes(other.high)
    if other.low != other.high:
        size = f"{human_bytes(other.low)} to {size}"
    parts = [f"rank {other.rank}", f"{human_bytes(other.per_slot)} a slot"]
    if other.embeddings_high:
        parts.append(f"{human_bytes(other.embeddings_high)} of it embeddings and head")
    if other.experts:
        parts.append(f"{human_bytes(other.experts)} of it experts")
    yield _row(f"{other.engine} {other.version}", size, "; ".join(parts))
    tokens = other.high // (made.page // made.question.demand.block_size)
    ratio = f"{other.high / true:.1f}x the adapters' own bytes; as much as {tokens:,} tokens of KV"
    yield _row("", "", ratio)
    if other.engine == "sglang":
        yield _row("", "", "a request for the base model takes a slot too")
    if other.engine == "vllm" and made.recommendation:
        copies = made.recommendation.max_cpu_loras
        host = human_bytes(copies * made.mean_bytes)
        yield _row("", "", f"and {host} of host memory for {copies:,} copies, one more as it loads")


def lint_lines(made: Plan) -> Iterator[str]:
    """Findings with code and cost; nothing when there are none."""
    if made.lints:
        yield ""
        yield "Findings"
    for lint in made.lints:
        costs = []
        if lint.cost_bytes is not None:
            costs.append(human_bytes(lint.cost_bytes))
        if lint.cost_ms is not None:
            costs.append(f"{lint.cost_ms:.2f} ms")
        cost = f" (costs {', '.join(costs)})" if costs else ""
        yield from _wrapped(f"{lint.code}: {lint.message}{cost}", "  ")
        yield from _wrapped(f"-> {lint.hint}", "      ")


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(
        printable(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def sweep_lines(sweep: str, rows: Sequence[Any]) -> Iterator[str]:
    """The table of one sweep."""
    heads, cells = _TABLES[sweep]
    table = [list(heads), *([_shown(cell) for cell in cells(row)] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    for line in table:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _shown(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _bytes(count: int | None) -> str | None:
    return None if count is None else human_bytes(count)


_TABLES: dict[str, Any] = {
    "rank": (
        ("rank", "adapter", "bytes", "pages", "resident", "vLLM slot"),
        lambda r: (r.rank, _bytes(r.nbytes), r.nbytes, r.pages, r.resident, _bytes(r.vllm_slot)),
    ),
    "slots": (
        ("slots", "LRU hits", "pinned", "true bytes", "vLLM reserves"),
        lambda r: (r.slots, f"{r.lru:.1%}", f"{r.pinned:.1%}", _bytes(r.nbytes), _bytes(r.vllm)),
    ),
    "context": (
        ("context", "KV a sequence", "sequences", "adapters beside"),
        lambda r: (r.context, _bytes(r.kv_per_sequence), r.sequences, r.resident),
    ),
}
