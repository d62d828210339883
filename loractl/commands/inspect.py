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
from loractl.tensor_work import use_one_thread, with_progress
from lorad.adapters.peft_format import (
    ByteSource,
    PeftAdapter,
    base_name_finding,
    open_adapter,
    served_digest,
)
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
        report = _report(path, shape, base, max_lora_rank, stats or spectrum, spectrum)
    if json:
        print_json("lorad/inspect/v1", report)
    else:
        print_report(report)
    if strict and report["warnings"]:
        raise typer.Exit(_STRICT_EXIT)


def _report(
    path: str,
    shape: ModelShape | None,
    base: str | None,
    max_lora_rank: int | None,
    tensors: bool,
    spectrum: bool,
) -> dict[str, Any]:
    if is_hub_id(path):
        if tensors:
            raise _needs_download(path)
        adapter = read_hub_adapter(path, shape, max_lora_rank=max_lora_rank)
        return inspect_report(_with_name_check(adapter, base), shape, base)
    directory = Path(path).expanduser()
    with open_adapter(directory, shape, max_lora_rank=max_lora_rank) as (adapter, weights):
        adapter = _with_name_check(adapter, base)
        if not tensors:
            return inspect_report(adapter, shape, base)
        return _measured_report(adapter, weights, shape, base, spectrum)


def _with_name_check(adapter: PeftAdapter, base: str | None) -> PeftAdapter:
    """A hub id is a name that can be compared; a path is not."""
    if base is None or not is_hub_id(base):
        return adapter
    found = base_name_finding(adapter.base_model_name, base)
    return adapter if found is None else replace(adapter, warnings=(*adapter.warnings, found))


def _needs_download(hub_id: str) -> LoradError:
    return LoradError(
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
    use_one_thread()
    from lorad.adapters.spectrum import measure

    stats, found = measure(with_progress(adapter.modules), weights, spectrum=spectrum)
    adapter = replace(adapter, warnings=(*adapter.warnings, *found))
    return inspect_report(adapter, shape, base, stats, served_digest(adapter, weights))
