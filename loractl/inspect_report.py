"""What `loractl inspect` says about an adapter: once as data, and from that as a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from loractl.output import cell, console, human_bytes
from lorad.adapters.peft_format import FUSED_LEAVES, LoraModule, PeftAdapter, modules_present
from lorad.sizing.adapter_size import pack_adapter
from lorad.sizing.model_shape import ModelShape

if TYPE_CHECKING:
    from rich.table import Table

SERVED_ITEMSIZE = 2  # bfloat16 or float16
# vLLM rounds the largest rank of its adapters up to one of these.
VLLM_RANK_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def inspect_report(
    adapter: PeftAdapter, shape: ModelShape | None, base: str | None
) -> dict[str, Any]:
    """The document of `loractl inspect --json`, without its schema. Sizes in bytes."""
    return {
        "path": str(adapter.directory),
        "base_model_name": adapter.base_model_name,
        "base": base,
        "file_bytes": adapter.file_bytes,
        "dtypes": list(adapter.dtypes),
        "rslora": bool(adapter.config.get("use_rslora")),
        "targets": list(adapter.targets),
        "max_lora_rank": adapter.max_rank,
        "vllm_max_lora_rank": vllm_rank_bucket(adapter.max_rank),
        "modules_matched": len(adapter.modules),
        "modules_present": None if shape is None else modules_present(shape),
        "served_bytes": sum(map(served_bytes, adapter.modules)),
        "allocated_bytes": _allocated_bytes(adapter, shape),
        "groups": list(_groups(adapter.modules)),
        "modules": {module.path: _module(module) for module in adapter.modules},
        "warnings": [
            {"code": found.code, "message": found.message, "details": found.details}
            for found in adapter.warnings
        ],
    }


def vllm_rank_bucket(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM that takes this rank."""
    return next(bucket for bucket in VLLM_RANK_BUCKETS if bucket >= rank)


def served_bytes(module: LoraModule) -> int:
    """Bytes of both factors in a 16-bit dtype; a fused A is there once for every slice."""
    slices = len(FUSED_LEAVES.get(module.leaf, (module.leaf,)))
    (rank, width), (height, _) = module.a.shape, module.b.shape
    return rank * (slices * width + height) * SERVED_ITEMSIZE


def _allocated_bytes(adapter: PeftAdapter, shape: ModelShape | None) -> int | None:
    if shape is None:
        return None
    return pack_adapter(shape, adapter.module_ranks(), SERVED_ITEMSIZE).nbytes


def _module(module: LoraModule) -> dict[str, Any]:
    return {
        "rank": module.rank,
        "alpha": module.alpha,
        "scaling": module.scaling,
        "dtypes": [module.a.dtype, module.b.dtype],
        "shape": [module.b.shape[0], module.a.shape[1]],
    }


def _groups(modules: Sequence[LoraModule]) -> Iterator[dict[str, Any]]:
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
    out = console()
    for name, value in _summary_lines(report):
        out.print(cell(f"{name:<17}", "bold"), cell(value), sep="")
    out.print(_group_table(report["groups"]))
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


def _group_table(groups: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("target")
    table.add_column("layers")
    for name in ("rank", "alpha", "scaling", "dtype", "in file", "served"):
        table.add_column(name, justify="right")
    for group in groups:
        values = (
            group["target"],
            layer_ranges(group["layers"]),
            group["rank"],
            f"{group['alpha']:g}",
            f"{group['scaling']:.6g}",
            ", ".join(group["dtypes"]),
            human_bytes(group["file_bytes"]),
            human_bytes(group["served_bytes"]),
        )
        table.add_row(*map(cell, values))
    return table
