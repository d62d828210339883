"""How a canary does beside the live version: counters for the two, and when to give it up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.errors import ErrorClass, LoradError
from lorad.registry.records import Adapter, Canary

_WINDOW = 50  # the last requests of each version that the verdict looks at
_LEAST_FAILURES = 3
_WORST_RATE = 0.1
_TIMES_LIVE = 2.0

# Said to a request before any version had a part in it, or to all of them alike.
_NOT_THE_VERSIONS = (
    "queue.full",
    "daemon.stopping",
    "daemon.draining",
    "engine.device_fault",
    "engine.hung",
)


@dataclass
class Counts:
    """What became of one version's requests since the canary began. Times in seconds."""

    requests: int = 0  # that have ended
    errors: int = 0
    nonfinite: int = 0  # of the errors: NaN or infinity met while computing
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0  # requests that got one
    ttft_seconds: float = 0.0  # the sum of their times to it
    recent_failures: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def failed_lately(self) -> int:
        return sum(self.recent_failures)

    @property
    def failure_rate(self) -> float:
        """Of the last requests; 0 before the first."""
        return self.failed_lately / len(self.recent_failures) if self.recent_failures else 0.0


@dataclass
class Tally:
    """One request on its way: enters its version's counts as things happen."""

    counts: Counts
    ended: Callable[[], None]
    started: float = field(default_factory=time.monotonic)
    _generated: int = 0

    def output(self, prompt_tokens: int, completion_tokens: int) -> None:
        if not self._generated and completion_tokens:
            self.counts.first_tokens += 1
            self.counts.ttft_seconds += time.monotonic() - self.started
            self.counts.prompt_tokens += prompt_tokens
        self.counts.generated_tokens += completion_tokens - self._generated
        self._generated = completion_tokens

    def end(self, error: LoradError | None = None) -> None:
        """`error` None: it came to its own end, or its client left."""
        if error is not None and not is_the_versions(error):
            return
        self.counts.requests += 1
        self.counts.errors += error is not None
        self.counts.nonfinite += error is not None and error.code == "engine.nonfinite_logits"
        self.counts.recent_failures.append(error is not None)
        self.ended()


def is_the_versions(error: LoradError) -> bool:
    """Whether a failure says something about the version, not about the client or the load."""
    return error.kind is not ErrorClass.USAGE and error.code not in _NOT_THE_VERSIONS


@dataclass
class Comparison:
    """The live version and the canary of one adapter, by label."""

    canary: Canary
    counts: dict[str, Counts]
    given_up: bool = False


GiveUp = Callable[[AdapterName, str, str], None]  # adapter, canary's version, reason


class CanaryWatch:
    """Keeps counts only for adapters that have a canary, for its two versions alone.

    Used on one event loop. What clients send cannot make it grow.
    """

    def __init__(self, give_up: GiveUp) -> None:
        """`give_up` is called once for a canary with auto-rollback that fails too often."""
        self._give_up = give_up
        self._comparisons: dict[AdapterName, Comparison] = {}

    def counts(self, adapter: Adapter) -> dict[str, Counts]:
        """By version label; empty for an adapter without a canary."""
        found = self._comparison(adapter)
        return found.counts if found else {}

    def tally(self, adapter: Adapter | None, ref: AdapterRef) -> Tally | None:
        """For a new request of `ref`; None when it is not one of two versions compared."""
        found = self._comparison(adapter) if adapter else None
        counts = found.counts.get(ref.version) if found else None
        if found is None or counts is None:
            return None
        return Tally(counts, lambda: self._judge(ref.name, found))

    def _comparison(self, adapter: Adapter) -> Comparison | None:
        """Begins anew when the canary, or the version it is compared with, is another one."""
        name, canary = adapter.name, adapter.canary
        if canary is None or adapter.live is None:
            self._comparisons.pop(name, None)
            return None
        found = self._comparisons.get(name)
        labels = {adapter.live, canary.version}
        if found is None or found.canary.since != canary.since or set(found.counts) != labels:
            found = Comparison(canary, {label: Counts() for label in sorted(labels)})
            self._comparisons[name] = found
        found.canary = canary
        return found

    def _judge(self, name: AdapterName, found: Comparison) -> None:
        if not found.canary.auto_rollback or found.given_up:
            return
        reason = next(_faults(found), None)
        if reason is not None and self._comparisons.get(name) is found:
            found.given_up = True
            self._give_up(name, found.canary.version, reason)


def _faults(found: Comparison) -> Iterator[str]:
    """Why the canary should end: failures that are not few, and that live does not have too."""
    canary = found.counts[found.canary.version]
    live = next(c for label, c in found.counts.items() if label != found.canary.version)
    if canary.failed_lately < _LEAST_FAILURES or canary.failure_rate < _WORST_RATE:
        return
    if canary.failure_rate > _TIMES_LIVE * live.failure_rate:
        seen = len(canary.recent_failures)
        nonfinite = f", {canary.nonfinite} by NaN" if canary.nonfinite else ""
        yield f"auto-rollback: {canary.failed_lately} of its last {seen} requests failed{nonfinite}"
