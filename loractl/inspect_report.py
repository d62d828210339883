"""What `loractl inspect` says about an adapter: once as data, and from that as a screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median_high
from typing import TYPE_CHECKING, Any

import typer

from loractl.output import cell, console, human_bytes, printable
from lorad.adapters.peft_format import FUSED_LEAVES, LoraModule, PeftAdapter, modules_present
from lorad.sizing.adapter_size import pack_adapter
from lorad.sizing.model_shape import ModelShape
from lorad.sizing.other_engines import vllm_rank

if TYPE_CHECKING:
    from rich.table import Table

    from lorad.adapters.spectrum import ModuleStats

ENERGIES = (0.9, 0.99)  # shares of the squared norm at which ranks are reported
SERVED_ITEMSIZE = 2  # bfloat16 or float16
# vLLM rounds the largest rank of its adapters up to one of these.


def inspect_report(
    adapter: PeftAdapter,
    shape: ModelShape | None,
    base: str | None,
    measured: Sequence[ModuleStats] = (),
    digest: str | None = None,
) -> dict[str, Any]:
    """The document of `loractl inspect --json`, without its schema. Sizes in bytes.

    `measured` and `digest` are there when the tensors were read.
    """
    stats = {one.module.path: one for one in measured}
    report = {
        "path": str(adapter.directory),
        "base_model_name": adapter.base_model_name,
        "base": base,
        "digest": digest,
        "file_bytes": adapter.file_bytes,
        "dtypes": list(adapter.dtypes),
        "rslora": bool(adapter.config.get("use_rslora")),
        "targets": list(adapter.targets),
        "max_lora_rank": adapter.max_rank,
        "vllm_max_lora_rank": vllm_rank(adapter.max_rank),
        "modules_matched": len(adapter.modules),
        "modules_present": None if shape is None else modules_present(shape),
        "served_bytes": sum(map(served_bytes, adapter.modules)),
        "allocated_bytes": _allocated_bytes(adapter, shape),
        "groups": list(_groups(adapter.modules, stats)),
        "modules": {m.path: _module(m, stats.get(m.path)) for m in adapter.modules},
        "warnings": [
            {"code": found.code, "message": found.message, "details": found.details}
            for found in adapter.warnings
        ],
    }
    if any(one.singular_values for one in measured):
        report["resized"] = [_resized(measured, energy) for energy in ENERGIES]
    return report


def served_bytes(module: LoraModule) -> int:
    """Bytes of both factors in a 16-bit dtype; a fused A is there once for every slice."""
    slices = len(FUSED_LEAVES.get(module.leaf, (module.leaf,)))
    (rank, width), (height, _) = module.a.shape, module.b.shape
    return rank * (slices * width + height) * SERVED_ITEMSIZE


def _allocated_bytes(adapter: PeftAdapter, shape: ModelShape | None) -> int | None:
    if shape is None:
        return None
    return pack_adapter(shape, adapter.module_ranks(), SERVED_ITEMSIZE).nbytes


def _module(module: LoraModule, stats: ModuleStats | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "rank": module.rank,
        "alpha": module.alpha,
        "scaling": module.scaling,
        "dtypes": [module.a.dtype, module.b.dtype],
        "shape": [module.b.shape[0], module.a.shape[1]],
    }
    if stats:
        data["norm"] = stats.norm
    if stats and stats.singular_values:
        data["singular_values"] = [float(f"{value:.6g}") for value in stats.singular_values]
        data["ranks"] = {str(energy): stats.effective_rank(energy) for energy in ENERGIES}
    return data


def _groups(
    modules: Sequence[LoraModule], stats: Mapping[str, ModuleStats]
) -> Iterator[dict[str, Any]]:
    """Modules that differ in their layer alone, as one row."""

    def key(module: LoraModule) -> tuple[str, int, float, float, tuple[str, str]]:
        dtypes = (module.a.dtype, module.b.dtype)
        return (module.leaf, module.rank, module.alpha, module.scaling, dtypes)

    for (leaf, rank, alpha, scaling, dtypes), members in groupby(sorted(modules, key=key), key):
        group = list(members)
        yield {
            "target": leaf,
            "rank": rank,
            "alpha": alpha,
            "scaling": scaling,
            "layers": sorted(module.layer for module in group),
            "dtypes": sorted(set(dtypes)),
            "file_bytes": sum(module.a.nbytes + module.b.nbytes for module in group),
            "served_bytes": sum(map(served_bytes, group)),
            **_group_stats([stats[module.path] for module in group if module.path in stats]),
        }


def _group_stats(stats: Sequence[ModuleStats]) -> dict[str, Any]:
    if not stats:
        return {}
    data: dict[str, Any] = {"norm": sum(one.norm**2 for one in stats) ** 0.5}
    if stats[0].singular_values:
        for energy in ENERGIES:
            ranks = [one.effective_rank(energy) for one in stats]
            data[f"rank_{energy:.0%}".replace("%", "")] = {
                "median": median_high(ranks),
                "max": max(ranks),
            }
    return data


def _resized(measured: Sequence[ModuleStats], energy: float) -> dict[str, Any]:
    """What is left when every module is re-ranked to keep this share of its delta's energy."""
    ranks = [max(1, one.effective_rank(energy)) for one in measured]
    return {
        "energy": energy,
        "max_lora_rank": max(ranks),
        "served_bytes": sum(
            served_bytes(one.module) * rank // one.module.rank
            for one, rank in zip(measured, ranks, strict=True)
        ),
    }


def layer_ranges(layers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; `layers` is sorted."""
    runs = []
    for _, members in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in members]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)


def print_report(report: dict[str, Any]) -> None:
    """The same document for a person, on stdout."""
    for name, value in _summary_lines(report):
        typer.echo(f"{name:<17}{printable(value)}")  # Rich, for the tables, takes time to load
    out = console()
    out.print(_group_table(report["groups"], _COLUMNS))
    if "norm" in report["groups"][0]:
        measured = [column for column in _MEASURED_COLUMNS if column[1] in report["groups"][0]]
        out.print(_group_table(report["groups"], measured))
    if "resized" in report:
        out.print("rank for a share of the energy: median / largest over the layers")
    for one in report.get("resized", ()):
        out.print(cell(_resize_line(one, report["served_bytes"])))
    for warning in report["warnings"]:
        out.print(cell(f"warning: {warning['message']} [{warning['code']}]", "yellow"))


def _summary_lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    rank, bucket = report["max_lora_rank"], report["vllm_max_lora_rank"]
    present = report["modules_present"]
    yield "adapter", report["path"]
    yield "trained on", report["base_model_name"] or "(not named)"
    yield "checked against", report["base"] or "no base model; give one with --base"
    yield "file", f"{human_bytes(report['file_bytes'])}, {', '.join(report['dtypes'])}"
    yield "served", f"{human_bytes(report['served_bytes'])} in a 16-bit dtype"
    yield "rank", f"needs max_lora_rank {rank}; in vLLM {bucket}"
    yield "modules", f"{report['modules_matched']}" + (f" of {present} matched" if present else "")


def _resize_line(resized: dict[str, Any], served: int) -> str:
    saved = 1 - resized["served_bytes"] / served
    return (
        f"resize --energy {resized['energy']:g}: largest rank {resized['max_lora_rank']}, "
        f"{human_bytes(resized['served_bytes'])} served, {saved:.0%} less"
    )


def _group_table(groups: list[dict[str, Any]], columns: Sequence[Column]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title, key, _ in columns:
        left = key in ("target", "layers")
        table.add_column(title, justify="left" if left else "right", no_wrap=key != "layers")
    for group in groups:
        table.add_row(*(cell(show(group[key])) for _, key, show in columns))
    return table


def _rank_range(ranks: Mapping[str, int]) -> str:
    return f"{ranks['median']} / {ranks['max']}"


# Title, key of a group, and how its value is written.
Column = tuple[str, str, Callable[[Any], str]]
_COLUMNS: tuple[Column, ...] = (
    ("target", "target", str),
    ("layers", "layers", layer_ranges),
    ("rank", "rank", str),
    ("alpha", "alpha", "{:g}".format),
    ("scaling", "scaling", "{:.6g}".format),
    ("dtype", "dtypes", "+".join),
    ("in file", "file_bytes", human_bytes),
    ("served", "served_bytes", human_bytes),
)
_MEASURED_COLUMNS: tuple[Column, ...] = (
    ("target", "target", str),
    ("layers", "layers", layer_ranges),
    ("rank", "rank", str),
    ("norm of delta", "norm", "{:.4g}".format),
    ("rank for 90 %", "rank_90", _rank_range),
    ("rank for 99 %", "rank_99", _rank_range),
)
