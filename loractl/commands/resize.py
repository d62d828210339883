"""`loractl resize`: the same adapter with fewer ranks, as a new PEFT directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loractl.output import cell, console, human_bytes, print_json, reported
from lorad.adapters.peft_format import PeftAdapter, open_adapter, read_adapter
from lorad.errors import LoradError

if TYPE_CHECKING:
    from lorad.adapters.resize import ResizedModule


def resize(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Adapter as PEFT writes it.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory to write.")],
    rank: Annotated[
        int | None, typer.Option(min=1, max=512, help="Largest rank any module keeps.")
    ] = None,
    energy: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of each delta's squared norm to keep: 0.99."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write an adapter with lower ranks: the best approximation of each of its deltas."""
    with reported(json):
        if (rank is None) == (energy is None):
            raise LoradError(
                "usage.invalid",
                "give one of --rank and --energy",
                hint="--rank 16 bounds the rank; --energy 0.99 finds the rank of each module",
            )
        before, resized = _resize(directory, out, rank, energy)
        report = _report(before, read_adapter(out, None), resized)
    if json:
        print_json("lorad/resize/v1", report)
    else:
        _print(report)


def _resize(
    directory: Path, out: Path, rank: int | None, energy: float | None
) -> tuple[PeftAdapter, list[ResizedModule]]:
    from lorad.adapters.resize import ranks_at_most, ranks_for_energy, resize_adapter
    from lorad.adapters.spectrum import measure

    with open_adapter(directory.expanduser(), None) as (adapter, weights):
        stats, _ = measure(adapter.modules, weights, spectrum=energy is not None)
        ranks = (
            ranks_for_energy(stats, energy)
            if energy is not None
            else ranks_at_most(adapter, rank or adapter.max_rank)
        )
        return adapter, resize_adapter(adapter, weights, ranks, out.expanduser())


def _report(
    before: PeftAdapter, after: PeftAdapter, resized: list[ResizedModule]
) -> dict[str, Any]:
    return {
        "from": str(before.directory),
        "to": str(after.directory),
        "max_lora_rank": {"before": before.max_rank, "after": after.max_rank},
        "file_bytes": {"before": before.file_bytes, "after": after.file_bytes},
        "least_energy_kept": min(one.kept for one in resized),
        "modules": {one.path: {"rank": one.rank, "energy_kept": one.kept} for one in resized},
    }


def _print(report: dict[str, Any]) -> None:
    out = console()
    ranks, sizes = report["max_lora_rank"], report["file_bytes"]
    lines = (
        ("written", report["to"]),
        ("largest rank", f"{ranks['before']} -> {ranks['after']}"),
        ("file", f"{human_bytes(sizes['before'])} -> {human_bytes(sizes['after'])}"),
        ("energy kept", f"at least {report['least_energy_kept']:.4%} of every module's delta"),
    )
    for name, value in lines:
        out.print(cell(f"{name:<14}", "bold"), cell(value), sep="")
