"""What the checks on a device found and measured, and how it is told."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from lorad_kernels import auto

# Of one rounding, relative to the magnitudes that were summed.
UNIT = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
_TRACEBACK_LINES = 6


@dataclass
class Report:
    """What was checked and what was measured, within `limit` seconds.

    The files are written anew after each section, so that what ends the check early, a time limit
    from outside or a fault of the device, loses no more than the section it is in.
    """

    device: str
    limit: float
    markdown_file: Path | None = None
    json_file: Path | None = None
    failures: list[str] = field(default_factory=list)
    checks: int = 0
    steps: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sections: dict[str, float] = field(default_factory=dict)  # seconds of each
    started: float = field(default_factory=time.perf_counter)
    device_lost: bool = False

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def section(self, name: str, work: Callable[[], None], seconds: float = 0.0) -> None:
        """Do a part of the check that takes about so many seconds; what it raises is a failure."""
        if self.device_lost or not self._has_time(seconds, name):
            return
        started = time.perf_counter()
        try:
            work()
            synchronize()
        except Exception:
            lines = traceback.format_exc().strip().splitlines()[-_TRACEBACK_LINES:]
            self.check(False, f"{name}: {' / '.join(map(str.strip, lines))}")
            self._look_after_the_device(name)
        self.sections[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {self.sections[name]} s", flush=True)
        self.write()

    def check(self, right: bool, what: str) -> None:
        self.checks += 1
        if not right:
            self.failures.append(what)
            print(f"FAILED {what}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def step(self, row: dict[str, object]) -> None:
        """A measured step."""
        self.steps.append(row)
        print(row, flush=True)
        self.write()

    def write(self) -> None:
        """Both files, as far as the check has come."""
        if self.markdown_file:
            self.markdown_file.write_text(self.markdown())
        if self.json_file:
            names = ("device", "seconds", "checks", "failures", "steps", "notes", "sections")
            values = {name: getattr(self, name) for name in names}
            self.json_file.write_text(json.dumps(values, indent=1) + "\n")

    def markdown(self) -> str:
        lines = [
            f"# Check of the kernels on {self.device}",
            "",
            f"{self.checks} checks, {len(self.failures)} failed, {self.seconds:.0f} s.",
            "",
            *[f"- {line}" for line in (*self.failures, *self.notes)],
            "",
            "| section | s |",
            "|---|---|",
            *[f"| {name} | {seconds} |" for name, seconds in self.sections.items()],
            "",
            "| model | batch | adapters | mode | ms a step | of base | GB/s |",
            "|---|---|---|---|---|---|---|",
            *[f"| {' | '.join(str(value) for value in step.values())} |" for step in self.steps],
        ]
        return "\n".join(lines) + "\n"

    def _has_time(self, seconds: float, what: str) -> bool:
        """Whether that many seconds are left; if not, the report says what was left out."""
        left = self.limit - self.seconds
        if left < seconds:
            self.note(f"left out, {left:.0f} s were left: {what}")
            self.write()
        return left >= seconds

    def _look_after_the_device(self, name: str) -> None:
        """After the fault of a CUDA kernel every later call fails: nothing more can be checked."""
        try:
            synchronize()
        except RuntimeError:
            self.device_lost = True
            self.note(f"the device is lost since {name}; the rest was left out")


def synchronize() -> None:
    """Wait for the device, which tells of a kernel's fault only then."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def only(implementation: ModuleType) -> Iterator[None]:
    """All ops of every device through one implementation."""
    chosen = auto._for_type
    auto._for_type = lambda _: implementation  # type: ignore[assignment]
    try:
        yield
    finally:
        auto._for_type = chosen
