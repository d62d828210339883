"""From the options of `loractl plan` to the question it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loractl.model_source import load_config
from lorad.errors import LoradError
from lorad.sizing.architecture import Architecture
from lorad.sizing.budget import Demand, Itemsizes, Machine
from lorad.sizing.families import architecture
from lorad.sizing.fleet import AdapterKind, kind_of_rank
from lorad.sizing.gpus import DEFAULT_HOST_LINK_GB_S, find_gpu, parse_size
from lorad.sizing.lints import Deployment
from lorad.sizing.model_shape import ModelShape
from lorad.sizing.planner import Question
from lorad.sizing.popularity import Popularity, parse_popularity, uniform
from lorad.sizing.recommend import Workload
from lorad.sizing.targets import Targets, resolve_targets
from lorad.sizing.traces import Trace, read_trace

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_ITEMSIZES = {**_ITEMSIZES, "fp8": 1}
_ENGINES = ("vllm", "sglang")
_DEFAULT_CONTEXT = 8192
_MAX_RANK = 512


@dataclass(frozen=True)
class PlanOptions:
    """The command line as typed; `commands/plan.py` documents each option."""

    model: str
    rank: str | None
    adapters: tuple[Path, ...]
    spectrum: bool
    targets: str
    dtype: str
    kv_dtype: str
    gpu: str | None
    vram: str | None
    slab: str | None
    host_ram: str | None
    utilization: float
    disk_gb_s: float
    context: int | None
    concurrency: int
    tp: int
    max_num_batched_tokens: int
    fleet: int | None
    popularity: str | None
    rate: float
    tokens: str | None
    trace: Path | None
    miss: str
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    processes: int
    replicas: int
    routing: str
    speculation: str
    compare: str


def build_question(options: PlanOptions) -> Question:
    """Read the model, the adapters and the traffic; raises `usage.*`, `model.*`, `path.*`."""
    config, where = load_config(options.model)
    arch = architecture(config, where)
    kinds = _kinds(options, arch, config, where)
    demand = _demand(options, arch)
    workload = _workload(options, kinds)
    kv = options.dtype if options.kv_dtype == "auto" else options.kv_dtype
    return Question(
        model=options.model,
        arch=arch,
        kinds=tuple(kinds),
        sizes=Itemsizes(
            weights=_itemsize("--dtype", options.dtype, _ITEMSIZES),
            kv=_itemsize("--kv-dtype", kv, _KV_ITEMSIZES),
            adapters=_itemsize("--dtype", options.dtype, _ITEMSIZES),
        ),
        demand=demand,
        deployment=_deployment(options),
        machine=_machine(options),
        workload=workload,
        compare=_choices("--compare", options.compare, _ENGINES),
    )


def targets_of(options: PlanOptions, arch: Architecture) -> Targets:
    return resolve_targets(options.targets, arch)


def _itemsize(option: str, name: str, known: dict[str, int]) -> int:
    if name not in known:
        raise LoradError(
            "usage.invalid", f"{option} {name!r} is not known", hint=f"use {', '.join(known)}"
        )
    return known[name]


def _choices(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(filter(None, (part.strip() for part in text.split(","))))
    for part in chosen:
        if part not in known:
            raise LoradError(
                "usage.invalid", f"{option} {part!r} is not known", hint=f"use {', '.join(known)}"
            )
    return chosen


def _kinds(
    options: PlanOptions, arch: Architecture, config: dict[str, object], where: str
) -> list[AdapterKind]:
    if bool(options.rank) == bool(options.adapters):
        raise LoradError(
            "usage.invalid",
            "give either --rank or --adapters",
            hint="--rank 16, --rank 8,16,64 for a mix, or --adapters DIR to read real ones",
        )
    if options.spectrum and not options.adapters:
        raise LoradError(
            "usage.invalid", "--spectrum reads tensors", hint="give the adapters: --adapters DIR"
        )
    if options.rank:
        targets = targets_of(options, arch)
        ranks = [_rank(part) for part in options.rank.split(",")]
        return [kind_of_rank(arch, targets, rank, options.tp) for rank in ranks]
    from loractl.plan_adapters import adapter_kinds

    shape = ModelShape.from_config(config, where) if arch.served else None
    return adapter_kinds(options.adapters, arch, shape, options.tp, spectrum=options.spectrum)


def _rank(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= _MAX_RANK:
        raise LoradError(
            "usage.invalid", f"--rank {text!r} is no whole number from 1 to {_MAX_RANK}"
        )
    return int(text)


def _demand(options: PlanOptions, arch: Architecture) -> Demand:
    context = options.context
    if context is None and options.tokens:
        context = sum(_tokens(options.tokens))
    if context is None:
        context = min(arch.max_position or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    return Demand(
        context=context,
        concurrency=options.concurrency,
        max_num_batched_tokens=options.max_num_batched_tokens,
        tp=options.tp,
    )


def _tokens(text: str) -> tuple[int, int]:
    prompt, _, output = text.partition(":")
    if not (prompt.isdecimal() and output.isdecimal() and int(prompt) + int(output) > 0):
        raise LoradError(
            "usage.invalid",
            f"--tokens {text!r} is not PROMPT:OUTPUT",
            hint="for example --tokens 512:128",
        )
    return int(prompt), int(output)


def _machine(options: PlanOptions) -> Machine | None:
    given = [name for name in ("gpu", "vram", "slab") if getattr(options, name)]
    if not given:
        return None
    if len(given) > 1:
        raise LoradError(
            "usage.invalid",
            f"--{given[0]} and --{given[1]} exclude each other",
            hint="--vram is a GPU's memory, --slab the pages alone (as on a CPU)",
        )
    gpu = find_gpu(options.gpu) if options.gpu else None
    total = gpu.total_bytes if gpu else parse_size(options.vram, "--vram") if options.vram else 0
    return Machine(
        label=gpu.name if gpu else f"--{given[0]} {getattr(options, given[0])}",
        total=total,
        slab=parse_size(options.slab, "--slab") if options.slab else 0,
        utilization=options.utilization,
        host_ram=parse_size(options.host_ram, "--host-ram") if options.host_ram else 0,
        host_link_gb_s=gpu.host_link_gb_s if gpu else DEFAULT_HOST_LINK_GB_S,
        disk_gb_s=options.disk_gb_s,
    )


def _workload(options: PlanOptions, kinds: Sequence[AdapterKind]) -> Workload | None:
    trace = read_trace(options.trace) if options.trace else None
    popularity = _popularity(options, trace, kinds)
    if popularity is None:
        return None
    return Workload(
        popularity=popularity,
        rate=options.rate or (trace.rate if trace else 0.0),
        batch=options.concurrency,
        miss=_miss(options.miss),
        trace=trace,
    )


def _popularity(
    options: PlanOptions, trace: Trace | None, kinds: Sequence[AdapterKind]
) -> Popularity | None:
    if trace is not None:
        if options.popularity or options.fleet:
            raise LoradError(
                "usage.invalid",
                "--trace says how popular each adapter is",
                hint="leave out --popularity and --fleet",
            )
        return trace.popularity()
    fleet = options.fleet or (len(kinds) if options.adapters else None)
    if options.popularity:
        return parse_popularity(options.popularity, fleet)
    if options.fleet:
        return parse_popularity("zipf:1.0", options.fleet)
    return uniform(len(kinds)) if options.adapters and options.rate else None


def _miss(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise LoradError(
            "usage.invalid",
            f"--miss {text!r} is no share of requests",
            hint="write it like 5% or 0.05",
        )
    return value


def _deployment(options: PlanOptions) -> Deployment:
    routing = _choices("--routing", options.routing, ("affinity", "random"))
    speculation = _choices("--speculation", options.speculation, ("eagle", "medusa", "ngram"))
    return Deployment(
        max_loras=options.max_loras,
        max_cpu_loras=options.max_cpu_loras,
        max_lora_rank=options.max_lora_rank,
        processes=options.processes,
        replicas=options.replicas,
        routing="".join(routing),
        speculation="".join(speculation),
    )
