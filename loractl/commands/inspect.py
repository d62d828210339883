"""`loractl inspect`: what an adapter is, and whether it would be served right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loractl.inspect_report import inspect_report, print_report
from loractl.model_source import load_config
from loractl.output import print_json, reported
from lorad.adapters.peft_format import read_adapter
from lorad.sizing.model_shape import ModelShape

STRICT_EXIT = 6  # as an adapter that is refused


def inspect(
    path: Annotated[str, typer.Argument(help="Adapter directory as PEFT writes it.")],
    base: Annotated[
        str | None,
        typer.Option(help="Base model to check against: directory, config.json or hub id."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as refusals.")] = False,
    max_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Refuse a rank above the server's limit.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check an adapter from its two headers alone: ranks, scalings, targets, bytes."""
    with reported(json):
        shape = ModelShape.from_config(*load_config(base)) if base else None
        adapter = read_adapter(Path(path).expanduser(), shape, max_lora_rank=max_lora_rank)
        report = inspect_report(adapter, shape, base)
    if json:
        print_json("lorad/inspect/v1", report)
    else:
        print_report(report)
    if strict and report["warnings"]:
        raise typer.Exit(STRICT_EXIT)
