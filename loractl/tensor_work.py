"""What the commands that read tensors, and so take seconds, have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from loractl.output import console

T = TypeVar("T")


def use_one_thread() -> None:
    """Call before numpy is imported. A user's own setting stays.

    An adapter's matrices are tall and thin: OpenBLAS gains nothing from more threads on them, and
    on a busy machine they wait for each other (QR of 4096 x 64: 15 ms with one, 100 ms and
    more with two).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def with_progress(items: Sequence[T]) -> Iterable[T]:
    """`items`, with a bar on stderr that goes away at the end, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return items
    from rich.progress import track

    return track(items, "reading tensors", console=console(stderr=True), transient=True)
