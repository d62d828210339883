"""The `loractl` command: one file per command under loractl/commands/."""

from __future__ import annotations

import typer

from loractl.commands.canary import canary
from loractl.commands.delete import delete
from loractl.commands.doctor import doctor
from loractl.commands.drain import drain, resume
from loractl.commands.events import events
from loractl.commands.gc import gc
from loractl.commands.history import history
from loractl.commands.inspect import inspect
from loractl.commands.list import list_adapters
from loractl.commands.load import load, unload
from loractl.commands.operation import operation
from loractl.commands.pin import pin, unpin
from loractl.commands.plan import plan
from loractl.commands.promote import promote, rollback
from loractl.commands.push import push
from loractl.commands.resize import resize
from loractl.commands.show import show
from loractl.commands.status import status
from loractl.commands.top import top
from loractl.commands.version import version
from lorad.program import run_program

app = typer.Typer(
    name="loractl",
    help="Size, inspect and manage LoRA adapters and their versions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is plain text: loading Rich for it would double its time
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(plan)
app.command()(inspect)
app.command()(resize)
app.command()(push)
app.command()(promote)
app.command()(rollback)
app.command()(canary)
app.command("list")(list_adapters)
app.command()(show)
app.command()(history)
app.command()(status)
app.command()(top)
app.command()(doctor)
app.command()(load)
app.command()(unload)
app.command()(pin)
app.command()(unpin)
app.command()(delete)
app.command()(gc)
app.command()(drain)
app.command()(resume)
app.command()(events)
app.command()(operation)
app.command()(version)


def main() -> None:
    run_program(app)


if __name__ == "__main__":
    main()
