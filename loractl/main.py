"""The `loractl` command: one file per command under loractl/commands/."""

from __future__ import annotations

import typer

from loractl.commands.inspect import inspect
from loractl.commands.plan import plan
from loractl.commands.resize import resize

app = typer.Typer(
    name="loractl",
    help="Size, inspect and manage LoRA adapters and their versions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(inspect)
app.command()(plan)
app.command()(resize)


@app.callback()
def loractl() -> None:
    """Keeps `loractl` a group of commands, however many there are."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
