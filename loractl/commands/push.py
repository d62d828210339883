"""`loractl push`: make a directory the next version of an adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from loractl.options import (
    DetachOption,
    DryRunOption,
    GenerationOption,
    JsonOption,
    NameArgument,
    ReasonOption,
    SocketOption,
    TimeoutOption,
)
from loractl.output import end_dry_run, human_bytes, note, print_json, printable, reported
from loractl.sources import adapter_directory
from lorad import wire
from lorad.adapter_ref import AdapterName, check_version_label
from lorad.admin_client import AdminClient, Progress
from lorad.errors import LoradError


def push(
    name: NameArgument,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Directory as PEFT's save_pretrained writes it, hf://ORG/REPO[@REVISION], "
            "or s3://BUCKET/PREFIX.",
        ),
    ],
    version: Annotated[
        str | None,
        typer.Option("--version", help="Label; the next of v1, v2, ... if not given."),
    ] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="What this version is.")] = "",
    promote: Annotated[bool, typer.Option("--promote", help="Make it live as well.")] = False,
    reason: ReasonOption = "",
    if_generation: GenerationOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = 600.0,
    json: JsonOption = False,
) -> None:
    """Upload an adapter as a new, immutable version. Bare names serve it once it is promoted.

    The same content gives the same version again, and exit 0.
    """
    with reported(json):
        target = str(AdapterName.parse(name))
        if detach and promote:
            raise LoradError(
                "usage.invalid",
                "--detach ends with the upload, so there is nothing to promote yet",
                hint="promote in a second command",
            )
        label = check_version_label(version) if version is not None else None
        client = AdminClient(socket, timeout, detach=detach)
        if if_generation is not None:
            _check_generation(client, target, if_generation)
        with (
            adapter_directory(source) as directory,
            _progress(directory, hidden=json) as progress,
        ):
            pushed = client.push(
                directory,
                target,
                label=label,
                message=message,
                dry_run=dry_run,
                progress=progress,
            )
        if not json:
            _print_pushed(pushed)
        moved = None
        new_label = pushed["version"]["version"]
        if promote and not (dry_run and pushed["changed"]):
            moved = client.promote(
                target, new_label, reason=reason, generation=if_generation, dry_run=dry_run
            )
    if json:
        print_json("lorad/push/v1", {**pushed, "promoted": moved})
    elif moved is not None:
        typer.echo(printable(f"{moved['name']}: live is {moved['to_version']}"))
    elif not pushed["version"]["live"] and not dry_run:
        note(f"not live: loractl promote {target} {new_label}")
    changed = pushed["changed"] or (moved is not None and moved["changed"])
    end_dry_run(dry_run=dry_run, changed=changed)


def _check_generation(client: AdminClient, target: str, expected: int) -> None:
    """Before anything is uploaded; the promote that follows is checked again by the daemon."""
    try:
        generation = client.adapter(target)["generation"]
    except LoradError as error:
        if error.code != "adapter.not_found":
            raise
        generation = 0
    if generation != expected:
        raise LoradError(
            "generation.changed",
            f"{target!r} is at generation {generation}, not {expected}",
            hint="look at it again (`loractl show`), then decide again",
            details={"generation": generation},
        )


def _print_pushed(pushed: wire.PushResult) -> None:
    version = pushed["version"]
    ref = f"{pushed['name']}@{version['version']}"
    what = (
        f"rank {version['rank']}, {', '.join(version['targets'])}, {human_bytes(version['bytes'])}"
    )
    would = "would be " if pushed["dry_run"] and pushed["changed"] else ""
    typer.echo(printable(f"{ref} {would}{pushed['outcome']}: {what}, {version['digest'][:19]}"))
    for warning in version["warnings"]:
        note(f"warning: {warning['message']} [{warning['code']}]")


@contextmanager
def _progress(directory: Path, *, hidden: bool) -> Iterator[Progress]:
    """A bar on stderr while the files go out; nothing where nobody would see it."""
    if hidden or not sys.stderr.isatty():
        yield lambda sent: None
        return
    from rich.progress import Progress as Bar

    from loractl.output import console

    files = (directory / file for file in wire.ADAPTER_FILES)
    total = sum(file.stat().st_size for file in files if file.is_file())
    with Bar(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("push", total=total)
        yield lambda sent: bar.advance(task, sent)
