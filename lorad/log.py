"""Log lines on stderr: time, level, where, what. One line an event, safe to grep."""

from __future__ import annotations

import logging
import sys
from typing import ClassVar


class _OneLine(logging.Formatter):
    """Foreign text (a model name, a path) can neither break a line nor drive a terminal."""

    _ESCAPES: ClassVar[dict[int, str]] = {c: f"\\x{c:02x}" for c in (*range(32), 127)}

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(self._ESCAPES)
        return super().formatMessage(record)


def set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their info lines are about one connection or one download each.
    for noisy in ("uvicorn", "uvicorn.error", "asyncio", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
