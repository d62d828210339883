"""`loractl canary`: try a version on a share of a name's requests before promoting it."""

from __future__ import annotations

from typing import Annotated

import typer

from loractl.options import (
    DetachOption,
    DryRunOption,
    GenerationOption,
    JsonOption,
    ReasonOption,
    RefArgument,
    SocketOption,
    TimeoutOption,
)
from loractl.output import end_dry_run, print_json, printable, reported
from loractl.refs import name_and_version
from lorad import wire
from lorad.admin_client import AdminClient
from lorad.errors import LoradError


def canary(
    ref: RefArgument,
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="Version; the newest if not given."),
    ] = None,
    percent: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, help="Share of the bare name's callers; 0 ends it.", show_default=False
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End it, as --percent 0 does.")] = False,
    auto_rollback: Annotated[
        bool,
        typer.Option("--auto-rollback", help="End it when its requests fail more than live's."),
    ] = False,
    reason: ReasonOption = "",
    if_generation: GenerationOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
) -> None:
    """Give a share of an adapter's callers a version that is not live yet.

    A caller (its `user`, else its API key, else its address) always meets the same version.
    `loractl show` compares the two; a promote ends the canary.
    """
    with reported(json):
        name, label = name_and_version(ref, version)
        if off == (percent is not None):
            raise LoradError("usage.invalid", "give either --percent or --off")
        result = AdminClient(socket, timeout, detach=detach).canary(
            str(name),
            label,
            percent or 0.0,
            auto_rollback=auto_rollback,
            reason=reason,
            generation=if_generation,
            dry_run=dry_run,
        )
    if json:
        print_json("lorad/canary/v1", result)
    else:
        typer.echo(printable(_sentence(result)))
    end_dry_run(dry_run=dry_run, changed=result["changed"])


def _sentence(result: wire.CanaryResult) -> str:
    name, generation = result["name"], f"(generation {result['generation']})"
    would = "would be " if result["dry_run"] else "is "
    if result["version"] is None:
        if not result["changed"]:
            return f"{name} has no canary"
        return f"{name}: the canary {result['from_version']} {would}over {generation}"
    if not result["changed"]:
        return f"{name}: {result['version']} has {result['percent']:g} % already"
    return f"{name}: canary {would}{result['version']} with {result['percent']:g} % {generation}"
