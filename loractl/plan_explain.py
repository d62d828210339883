"""`loractl plan --explain`: each formula with the numbers of this plan put in."""

from __future__ import annotations

from collections.abc import Iterator

from loractl.output import human_bytes, printable
from lorad.sizing.architecture import Architecture, LayerGroup
from lorad.sizing.budget import Budget
from lorad.sizing.fleet import AdapterKind, TargetSize
from lorad.sizing.memory_plan import Scratch, pages_for
from lorad.sizing.other_engines import Reservation
from lorad.sizing.planner import Plan
from lorad.sizing.recommend import Recommendation, Workload


def explain_lines(made: Plan) -> Iterator[str]:
    """Formulas in the order of the screen, indented for it."""
    yield from _adapter(made, made.question.kinds[0])
    yield from _page(made)
    yield from _weights(made)
    if made.budget:
        yield from _slab(made, made.budget)
    if made.recommendation and made.question.workload:
        yield from _cache(made, made.recommendation, made.question.workload)
    for other in made.others:
        yield from _other(made, other)


def _adapter(made: Plan, kind: AdapterKind) -> Iterator[str]:
    itemsize = made.question.sizes.adapters
    yield "  One adapter: over its linears, layers x rank x (in + out) x bytes per element"
    width = max(len(size.name) for size in kind.sizes) + 2
    for size in kind.sizes:
        yield f"    {size.name:<{width}}{_product(size, itemsize)} = {size.nbytes(itemsize):,}"
    yield f"    {kind.label} = {made.kind_bytes(kind):,} B"
    yield from _rule_of_thumb(made, kind)
    allocated = kind.allocated(itemsize)
    page = made.page
    yield f"    in the slab: each matrix on a 64-byte line = {allocated:,} B, rounded up to"
    yield f"    {pages_for(allocated, page):,} pages of {page:,} B, one after the other"


def _product(size: TargetSize, itemsize: int) -> str:
    copies = f" x {size.copies} experts" if size.copies > 1 else ""
    widths = f"({size.in_features} + {size.out_features})"
    return f"{size.layers}{copies} x {size.rank} x {widths} x {itemsize}"


def _rule_of_thumb(made: Plan, kind: AdapterKind) -> Iterator[str]:
    """The usual short cut takes every linear for a square of the hidden size."""
    hidden, itemsize = made.question.arch.hidden_size, made.question.sizes.adapters
    rough = sum(s.layers * s.copies * 2 * s.rank * hidden * itemsize for s in kind.sizes)
    exact = made.kind_bytes(kind)
    if rough != exact:
        off = (rough - exact) / exact
        yield f"    (2 x rank x hidden x layers per matrix would say {rough:,} B: {off:+.0%})"


def _page(made: Plan) -> Iterator[str]:
    arch, demand, kv = made.question.arch, made.question.demand, made.question.sizes.kv
    yield f"  A page: K and V of {demand.block_size} tokens in all layers ({arch.attention})"
    for group in arch.groups:
        yield f"    {_kv_formula(arch, group, demand.tp, kv)}"
    per_token = made.page // demand.block_size
    yield f"    {demand.block_size} tokens x {per_token:,} B = {made.page:,} B"
    windows = [group for group in arch.groups if group.window]
    for group in windows:
        yield (
            f"    {group.count} of the layers look back {group.window:,} tokens only; a page "
            "holds all layers all the same"
        )


def _kv_formula(arch: Architecture, group: LayerGroup, tp: int, itemsize: int) -> str:
    total = group.kv_elements(tp) * itemsize
    if arch.attention == "MLA":
        parts = f"{group.count} layers x {group.kv_head_elements} (latent and rope) x {itemsize}"
        return f"{parts} = {total:,} B a token; tensor parallelism does not divide a latent"
    heads = -(-group.kv_heads // tp)
    head_dim = group.kv_head_elements // 2
    shared = f" of {group.kv_heads}" if tp > 1 else ""
    return (
        f"{group.count} layers x 2 x {heads} KV heads{shared} x {head_dim} x {itemsize} "
        f"= {total:,} B a token"
    )


def _weights(made: Plan) -> Iterator[str]:
    arch, itemsize = made.question.arch, made.question.sizes.weights
    kinds = "embedding, which is lm_head too" if arch.tied else "embedding and lm_head"
    yield "  Weights: every matrix, norm and bias of the checkpoint"
    yield f"    layers and norms {arch.decoder_elements:,} elements"
    yield f"    {kinds} {arch.embedding_elements:,} elements"
    if arch.vision_elements:
        yield f"    vision tower and projector {arch.vision_elements:,} elements"
    yield f"    {arch.elements:,} x {itemsize} = {arch.elements * itemsize:,} B"
    tp = made.question.demand.tp
    if tp > 1:
        each = arch.elements_per_gpu(tp) * itemsize
        yield f"    on each of {tp} GPUs {each:,} B: norms and replicated linears are on all"


def _slab(made: Plan, budget: Budget) -> Iterator[str]:
    machine, demand = made.question.machine, made.question.demand
    if machine and budget.scratch:
        yield from _scratch(made, budget.scratch)
        yield "  The slab: usable memory less weights and the scratch reserve"
        yield (
            f"    {machine.total:,} x {machine.utilization:g} - {budget.weights:,} - "
            f"{budget.scratch.reserved:,} = {budget.slab:,} B"
        )
    else:
        yield "  The slab: as given"
    yield f"    {budget.slab:,} // {budget.page:,} = {budget.pages:,} pages"
    yield (
        f"    KV {demand.concurrency} x ceil({demand.context} / {demand.block_size}) "
        f"= {budget.kv_pages:,} pages; {budget.adapter_pages:,} left"
    )


def _scratch(made: Plan, scratch: Scratch) -> Iterator[str]:
    demand = made.question.demand
    low, reserved, high = (human_bytes(part) for part in scratch.context)
    yield "  Scratch: an estimate, so an interval"
    yield (
        f"    activations of {demand.max_num_batched_tokens:,} tokens in one layer "
        f"{scratch.activations:,} B"
    )
    yield f"    logits of {demand.concurrency} rows {scratch.logits:,} B"
    yield f"    shrunk LoRA rows, float32 {scratch.lora:,} B"
    yield f"    K and V of {demand.context:,} tokens in one layer {scratch.prefill:,} B"
    yield f"    rotary tables of {demand.context:,} positions {scratch.rotary:,} B"
    yield f"    buffers and pool of the decode graphs {scratch.graphs:,} B"
    yield f"    CUDA context, workspaces and kernels {low} to {high}, {reserved} reserved"
    yield (
        "    reserved: the tensors of a step and half as much again, tables and graphs = "
        f"{scratch.reserved:,} B"
    )


def _cache(made: Plan, rec: Recommendation, workload: Workload) -> Iterator[str]:
    label, fleet = printable(workload.popularity.label), len(workload.popularity)
    yield f"  Hits: {label}, shares p_i of {fleet:,} adapters"
    if rec.device.method == "replayed":
        yield "    the trace replayed with LRU eviction, exactly"
    elif rec.device.method == "che":
        yield "    Che: T solves sum s_i (1 - exp(-p_i T)) = room; hits = sum p_i (1 - exp(-p_i T))"
    else:
        yield f"    {_METHODS[rec.device.method]}"
    if made.budget:
        room = f"{made.budget.adapter_pages:,} pages, {made.mean_pages:,.1f} an adapter"
        yield f"    room = {room}: {rec.resident:,.1f} resident, {rec.device.rate:.2%} hit"
    yield (
        f"    max_loras: {rec.slots_for_miss:,} places for misses of {workload.miss:.1%}; "
        f"sum 1 - (1 - p_i)^{workload.batch} = {rec.distinct.mean:.1f} in a batch"
    )
    if rec.unique_last_hour is not None and not workload.trace:
        yield (
            f"    max_cpu_loras: sum 1 - exp(-p_i x {workload.rate:g}/s x 3600 s) "
            f"= {rec.unique_last_hour:,.0f}, x 1.2"
        )
    if rec.load_utilization is not None:
        yield (
            f"    loader: {workload.rate:g}/s x ({rec.host:.4f} x {rec.device_load_ms:.2f} ms + "
            f"{rec.disk:.4f} x {rec.device_load_ms + rec.disk_load_ms:.2f} ms) "
            f"= {rec.load_utilization:.1%}"
        )


_METHODS = {
    "all fit": "all adapters fit: nothing is ever evicted",
    "exact": "the exact stationary law of LRU",
    "simulated": "fewer than four adapters fit: LRU simulated on 200,000 drawn requests",
}


def _other(made: Plan, other: Reservation) -> Iterator[str]:
    itemsize, tp = made.question.sizes.adapters, made.question.demand.tp
    scope = "every linear of the model" if other.engine == "vllm" else "the adapters' targets"
    yield f"  {other.engine} {other.version}: slots x bytes x sum over {scope}, at one rank"
    yield (
        f"    {other.slots:,} slots x {itemsize} x rank {other.rank} x (in + out): "
        f"linears {other.linears:,} B"
    )
    if other.experts:
        yield f"    experts {other.experts:,} B"
    if other.embeddings_high:
        arch = made.question.arch
        yield (
            f"    embed_tokens and lm_head {other.slots:,} x {itemsize} x {other.rank} x 2 x "
            f"({arch.vocab_size} + {arch.hidden_size}) = {other.embeddings_high:,} B"
        )
    if tp > 1:
        yield (
            f"    of {tp} GPUs each holds all of A of q, k, v, gate and up and all of B of o and "
            "down: not divided"
        )
    yield f"    together {human_bytes(other.high)}"
