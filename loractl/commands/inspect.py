"""`loractl inspect`: what an adapter is, and whether it would be served right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from loractl.hub import is_hub_id, read_hub_adapter
from loractl.inspect_report import inspect_report, print_report
from loractl.model_source import load_config
from loractl.output import print_json, reported
from lorad.adapters.peft_format import ByteSource, PeftAdapter, open_adapter, served_digest
from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

_STRICT_EXIT = 6  # as for an adapter that is refused


def inspect(
    path: Annotated[str, typer.Argument(help="Adapter directory as PEFT writes it, or a hub id.")],
    base: Annotated[
        str | None,
        typer.Option(help="Base model to check against: directory, config.json or hub id."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as refusals.")] = False,
    max_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Refuse a rank above this, the server's limit.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors: NaN, zero deltas, norms, digest.")
    ] = False,
    spectrum: Annotated[
        bool, typer.Option("--spectrum", help="Also singular values: which rank would do.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check an adapter from its two headers alone: ranks, scalings, targets, bytes."""
    with reported(json):
        shape = ModelShape.from_config(*load_config(base)) if base else None
        if is_hub_id(path):
            _refuse_reading(path, stats or spectrum)
            report = inspect_report(
                read_hub_adapter(path, shape, max_lora_rank=max_lora_rank), shape, base
            )
        else:
            directory = Path(path).expanduser()
            with open_adapter(directory, shape, max_lora_rank=max_lora_rank) as opened:
                if stats or spectrum:
                    report = _measured_report(*opened, shape, base, spectrum)
                else:
                    report = inspect_report(opened[0], shape, base)
    if json:
        print_json("lorad/inspect/v1", report)
    else:
        print_report(report)
    if strict and report["warnings"]:
        raise typer.Exit(_STRICT_EXIT)


def _refuse_reading(hub_id: str, tensors: bool) -> None:
    if tensors:
        raise LoradError(
            "usage.invalid",
            "--stats and --spectrum read every tensor, so they need a local directory",
            hint=f"hf download {hub_id} --local-dir DIR",
        )


def _measured_report(
    adapter: PeftAdapter,
    weights: ByteSource,
    shape: ModelShape | None,
    base: str | None,
    spectrum: bool,
) -> dict[str, Any]:
    from lorad.adapters.spectrum import measure

    stats, found = measure(adapter.modules, weights, spectrum=spectrum)
    adapter = replace(adapter, warnings=(*adapter.warnings, *found))
    return inspect_report(adapter, shape, base, stats, served_digest(adapter, weights))
