"""Arguments and options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Adapter: name or tenant/name.", show_default=False)
]
RefArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME[@VERSION]",
        help="Adapter, or one version of it: name, tenant/name or tenant/name@v3.",
        show_default=False,
    ),
]
SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket", envvar="LORAD_SOCKET", help="Admin socket of the daemon.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the daemon.")
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Change nothing; exit 1 if the command would change something."),
]
DetachOption = Annotated[
    bool,
    typer.Option(
        "--detach/--wait", help="Print the operation's id and go, instead of waiting for its end."
    ),
]
GenerationOption = Annotated[
    int | None,
    typer.Option(
        "--if-generation",
        min=0,
        help="Refuse, with exit 7, unless the adapter is still at this generation.",
        show_default=False,
    ),
]
ReasonOption = Annotated[
    str, typer.Option("--reason", "-r", help="Why, for the history.", show_default=False)
]
WatchOption = Annotated[
    bool,
    typer.Option("--watch", "-w", help="Print again and again; with --json one line each time."),
]
IntervalOption = Annotated[
    float, typer.Option("--interval", min=0.1, help="Seconds between two looks of --watch.")
]
