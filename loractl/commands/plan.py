"""`loractl plan`: what adapters of a base model cost, before anything is bought or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loractl.output import reported

_ADAPTERS, _MACHINE, _TRAFFIC = "Model and adapters", "Machine and load", "Traffic"
_CHECKED, _OUTPUT = "Settings to check", "Output"


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="Base model: a directory, a config.json, a name such as llama-3.1-8b from the "
            "built-in catalogue, or a hub id (its config.json alone is fetched).",
            rich_help_panel=_ADAPTERS,
        ),
    ],
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Rank of the adapters, 1 to 512; several are a mix in equal parts.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Read ranks and targets from a PEFT adapter, or from every adapter in a "
            "directory, instead of --rank. May be given several times.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    spectrum: Annotated[
        bool,
        typer.Option(
            "--spectrum",
            help="Read the tensors of --adapters of rank 64 and more, and say what rank they need.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = False,
    targets: Annotated[
        str,
        typer.Option(
            help="Linears with --rank, joined by commas: qv, qkv, attn, mlp, all-linear (as PEFT "
            "has it), names; with experts also router, experts, experts-3d, experts-merged.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = "all-linear",
    dtype: Annotated[
        str,
        typer.Option(
            help="Weights and adapters as served: bfloat16, float16 or float32.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = "bfloat16",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="KV cache: auto (as --dtype), bfloat16, float16, float32 or fp8.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = "auto",
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU by name: h100-80g, h200, a100-80g, l40s, l4, ... (an unknown one lists all).",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the GPU as CUDA reports it, such as 79.1GiB, instead of --gpu.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    slab: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes for pages alone, as memory.slab_bytes on a CPU, instead of --gpu.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    host_ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory for cached adapters.", rich_help_panel=_MACHINE
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=1.0,
            help="Share of the GPU's memory the daemon may use.",
            rich_help_panel=_MACHINE,
        ),
    ] = 0.9,
    disk_gb_s: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Speed of the version store, in 10^9 bytes per second.",
            rich_help_panel=_MACHINE,
        ),
    ] = 1.5,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per sequence, prompt and answer (default: of --tokens, else 8192).",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=_MACHINE),
    ] = 32,
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            help="GPUs the model is split over; figures are per GPU.",
            rich_help_panel=_MACHINE,
        ),
    ] = 1,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(min=1, max=2**17, help="Tokens of one step.", rich_help_panel=_MACHINE),
    ] = 8192,
    fleet: Annotated[
        int | None,
        typer.Option(min=1, help="How many adapters there are.", rich_help_panel=_TRAFFIC),
    ] = None,
    popularity: Annotated[
        str | None,
        typer.Option(
            help="Who is asked for: uniform, zipf:EXPONENT, slora:ALPHA (1 is uniform, 0.1 very "
            "skewed) or file:COUNTS.csv with adapter,count lines (default: zipf:1.0).",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    rate: Annotated[
        float,
        typer.Option(min=0.0, help="Requests per second.", rich_help_panel=_TRAFFIC),
    ] = 0.0,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT:OUTPUT",
            help="Tokens of a usual request; their sum is the default of --context.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A CSV of time,adapter lines to replay exactly, instead of --popularity.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    miss: Annotated[
        str,
        typer.Option(
            help="Share of requests that may find their adapter off the device.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "5%",
    max_loras: Annotated[
        int,
        typer.Option(
            min=0,
            help="Slots you mean to set (default: as recommended).",
            show_default=False,
            rich_help_panel=_CHECKED,
        ),
    ] = 0,
    max_cpu_loras: Annotated[
        int,
        typer.Option(
            min=0,
            help="Adapters in host memory you mean to set.",
            show_default=False,
            rich_help_panel=_CHECKED,
        ),
    ] = 0,
    max_lora_rank: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest rank you mean to admit.",
            show_default=False,
            rich_help_panel=_CHECKED,
        ),
    ] = 0,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Model processes that serve these adapters today.",
            rich_help_panel=_CHECKED,
        ),
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(min=1, help="Replicas behind one address.", rich_help_panel=_CHECKED),
    ] = 1,
    routing: Annotated[
        str,
        typer.Option(
            help="How requests reach a replica: affinity (by adapter) or random.",
            rich_help_panel=_CHECKED,
        ),
    ] = "affinity",
    speculation: Annotated[
        str,
        typer.Option(
            help="Speculative decoding you mean to use: eagle, medusa or ngram.",
            show_default=False,
            rich_help_panel=_CHECKED,
        ),
    ] = "",
    compare: Annotated[
        str,
        typer.Option(
            metavar="ENGINE[,ENGINE]",
            help="What vllm and sglang would reserve for the same adapters.",
            show_default=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = "",
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show each formula with its numbers.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(help="Vary one quantity: rank, slots or context.", rich_help_panel=_OUTPUT),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|term",
            help="Draw memory by rank and hits by slots: a .svg, .html or .png file (png needs "
            "matplotlib), or term for the terminal.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            help="Print settings instead of the plan: lorad (a lorad.toml), vllm or sglang "
            "(flags), or k8s (a Deployment, and a Service that hashes on the adapter).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare with the running daemon, to the byte, instead of planning; exit 1 if "
            "anything differs.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    socket: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            envvar="LORAD_SOCKET",
            help="Admin socket of the daemon, for --check.",
            show_default=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document.", rich_help_panel=_OUTPUT),
    ] = False,
) -> None:
    """Size the memory for a base model and its adapters, and choose the settings.

    Exact where a formula is exact, an interval where none is. Works offline.

    Exits with 0 if everything fits, 1 if it does not, 2 for wrong usage.
    """
    from loractl.plan_inputs import PlanOptions
    from loractl.plan_output import show_plan

    if check:
        from loractl.plan_check import show_check

        with reported(json):
            equal = show_check(model, socket, as_json=json)
        raise typer.Exit(0 if equal else 1)
    with reported(json):
        options = PlanOptions(
            model=model,
            rank=rank,
            adapters=tuple(adapters or ()),
            spectrum=spectrum,
            targets=targets,
            dtype=dtype,
            kv_dtype=kv_dtype,
            gpu=gpu,
            vram=vram,
            slab=slab,
            host_ram=host_ram,
            utilization=gpu_memory_utilization,
            disk_gb_s=disk_gb_s,
            context=context,
            concurrency=concurrency,
            tp=tp,
            max_num_batched_tokens=max_num_batched_tokens,
            fleet=fleet,
            popularity=popularity,
            rate=rate,
            tokens=tokens,
            trace=trace,
            miss=miss,
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            max_lora_rank=max_lora_rank,
            processes=processes,
            replicas=replicas,
            routing=routing,
            speculation=speculation,
            compare=compare,
        )
        fits = show_plan(options, explain=explain, sweep=sweep, plot=plot, emit=emit, as_json=json)
    raise typer.Exit(0 if fits else 1)
