"""`loractl plan`: what adapters of a base model cost, before anything is bought or loaded."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loractl.model_source import load_config
from loractl.output import human_bytes, print_json, reported
from lorad.sizing.adapter_size import lora_elements, pack_adapter, uniform_modules
from lorad.sizing.memory_plan import page_bytes, pages_for, weight_bytes
from lorad.sizing.model_shape import ModelShape
from lorad.sizing.targets import resolve_targets

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_SIZE = 16


def plan(
    model: Annotated[str, typer.Option(help="Directory, config.json or hub id of the base model.")],
    rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of the adapters.")],
    targets: Annotated[
        str, typer.Option(help="qv, qkv, attn, mlp, all-linear, or names joined by commas.")
    ] = "all-linear",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the exact bytes of one adapter on a base model."""
    with reported(json):
        config, where = load_config(model)
        shape = ModelShape.from_config(config, where)
        leaves = resolve_targets(targets, shape)
        report = _report(shape, leaves, rank, ITEMSIZES[dtype])
    if json:
        print_json("lorad/plan/v1", {"model": where, **report})
    else:
        _print(report)


def _report(shape: ModelShape, leaves: tuple[str, ...], rank: int, itemsize: int) -> dict[str, Any]:
    layout = pack_adapter(shape, uniform_modules(shape, leaves, rank), itemsize)
    page = page_bytes(shape, BLOCK_SIZE, itemsize)
    per_linear = {
        leaf: lora_elements(rank, *shape.linears[leaf]) * itemsize * shape.num_layers
        for leaf in leaves
    }
    return {
        "adapter": {
            "rank": rank,
            "targets": list(leaves),
            "bytes": layout.weight_nbytes,
            "bytes_by_target": per_linear,
            "allocated_bytes": layout.nbytes,
            "pages": pages_for(layout.nbytes, page),
        },
        "page_bytes": page,
        "weight_bytes": weight_bytes(shape, itemsize),
    }


def _print(report: dict[str, Any]) -> None:
    adapter = report["adapter"]
    for leaf, nbytes in adapter["bytes_by_target"].items():
        typer.echo(f"{leaf:<12}{nbytes:>16,} B")
    typer.echo(f"{'adapter':<12}{adapter['bytes']:>16,} B  {human_bytes(adapter['bytes'])}")
    typer.echo(f"{'pages':<12}{adapter['pages']:>16,} of {report['page_bytes']:,} B")
