"""What the checks on a device found and measured, and how it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from lorad_kernels import auto

# Of one rounding, relative to the magnitudes that were summed.
UNIT = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass
class Report:
    """What was checked and what was measured, within `limit` seconds."""

    device: str
    limit: float
    failures: list[str] = field(default_factory=list)
    checks: int = 0
    steps: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def check(self, right: bool, what: str) -> None:
        self.checks += 1
        if not right:
            self.failures.append(what)
            print(f"FAILED {what}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether that many seconds are left; if not, the report says what was left out."""
        left = self.limit - (time.perf_counter() - self.started)
        if left < seconds:
            self.note(f"left out, {left:.0f} s were left: {what}")
        return left >= seconds

    def markdown(self) -> str:
        lines = [
            f"# Check of the kernels on {self.device}",
            "",
            f"{self.checks} checks, {len(self.failures)} failed, {self.seconds:.0f} s.",
            "",
            *[f"- {line}" for line in (*self.failures, *self.notes)],
            "",
            "| model | batch | adapters | mode | ms a step | of base | GB/s |",
            "|---|---|---|---|---|---|---|",
            *[f"| {' | '.join(str(value) for value in step.values())} |" for step in self.steps],
        ]
        return "\n".join(lines) + "\n"


@contextmanager
def only(implementation: ModuleType) -> Iterator[None]:
    """All ops of every device through one implementation."""
    chosen = auto._for_type
    auto._for_type = lambda _: implementation  # type: ignore[assignment]
    try:
        yield
    finally:
        auto._for_type = chosen
