"""How `lorad` and `loractl` end when nobody can read what they print."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from lorad.errors import LoradError

_CLOSED_PIPE = 141  # what a shell says of a program that SIGPIPE ended
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run_program(app: Callable[[], object]) -> None:
    """Run a command line to its SystemExit.

    A reader that has gone away (`| head`) ends it silently, with the status of SIGPIPE; output
    that cannot be written ends it with a line on stderr and the status of `output.failed`.
    """
    try:
        app()
    except SystemExit as end:
        # Click ends with 1 here, which would mean a negative answer.
        if isinstance(end.__context__, BrokenPipeError):
            _end(_CLOSED_PIPE)
        raise
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        failure = LoradError(
            "output.failed",
            f"the output cannot be written: {error.strerror}",
            hint="a change that was asked for is made all the same",
        )
        with suppress(OSError):
            print(f"error: {failure.message} [{failure.code}]", file=sys.stderr)
            print(f"hint:  {failure.hint}", file=sys.stderr, flush=True)
        _end(failure.kind.exit_code)


def _end(status: int) -> None:
    """Python flushes stdout once more at its end, which must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    raise SystemExit(status) from None
