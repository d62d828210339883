"""What crosses between the API side and the engine: values only, nothing shared.

The engine could run in a process of its own behind these messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lorad.adapter_ref import AdapterRef
from lorad.errors import LoradError

FinishReason = Literal["stop", "length", "abort", "error"]
Residency = Literal["disk", "loading", "host", "device", "failed"]
# Why an adapter is read: a request that could run, one further back, an operator's command.
LoadReason = Literal["request", "prefetch", "command"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Already validated: the server refuses bad values by name.

    `temperature` 0 is greedy. `logprobs` is the number of alternatives to report per token
    (0 = only the chosen token), or None for no log-probabilities at all.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `adapter` None is the base model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    # Requests share cached K and V only under the same salt. Set by the server, per tenant.
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one generated token, and of its likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request, as `AsyncEngine.generate` yields it.

    `text` is the new text that is safe to show: bytes of an unfinished character and the
    possible beginning of a stop string are held back until they are decided. `token_ids` and
    `logprobs` are the new tokens. The last output has a `finish_reason`.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    completion_tokens: int  # so far
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    cached_tokens: int = 0  # of the prompt, whose K and V were in the prefix cache


# --- API side -> engine -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The client has gone: give its pages back. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Bring an adapter onto the device; answered by AdapterLoaded or CommandFailed.

    `pin` True keeps it there, False lets it be evicted when idle, None leaves that as it is.
    """

    command_id: str
    adapter: AdapterRef
    pin: bool | None = None


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """Compare what the engine adds for an adapter with what the version's files say.

    Brings it onto the device, and runs one forward pass of the tokens, a dozen or so, between
    two steps. Answered by AdapterProbed, or by CommandFailed (`selftest.failed` when they differ).
    """

    command_id: str
    adapter: AdapterRef
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Let running requests finish, then free the device pages and the host copy.

    Answered by AdapterUnloaded, or by CommandFailed (`drain.timeout`) when requests are
    still running after `drain_timeout` seconds; then nothing has changed.
    """

    command_id: str
    adapter: AdapterRef
    drain_timeout: float


# --- engine -> API side -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one request, or its end. `error` goes with finish_reason "error"."""

    request_id: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    error: LoradError | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    command_id: str
    pages: int
    bytes: int
    seconds: float  # from the command to residency on the device


@dataclass(frozen=True, slots=True)
class AdapterProbed:
    """Every delta is what the files say, but for rounding.

    `error` is the largest difference of a module's delta, in norm, relative to that delta.
    """

    command_id: str
    modules: int  # that the adapter has factors for
    error: float
    seconds: float  # for which the steps waited


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    command_id: str
    freed_device_bytes: int
    freed_host_bytes: int
    drained_requests: int


@dataclass(frozen=True, slots=True)
class CommandFailed:
    command_id: str
    error: LoradError


# --- what the engine tells about itself ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdapterState:
    """Where one adapter's bytes are. `host_bytes` and `device_bytes` are 0 when not there."""

    digest: str
    residency: Residency
    rank: int = 0
    device_pages: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    pinned: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step: which rows it ran for whom. The evidence for "in the same batch"."""

    step: int
    started_at: float  # seconds since the epoch
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    # Rows per adapter, by "tenant/name@version"; base rows under "base".
    rows: dict[str, int] = field(default_factory=dict)
    requests: tuple[str, ...] = ()
    cached_tokens: int = 0  # of the prompts that began in this step


class Histogram:
    """Counts of durations, in seconds, by fixed bounds."""

    BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)  # the last is above every bound
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Histogram:
        copied = Histogram()
        copied.counts, copied.sum = list(self.counts), self.sum
        return copied


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What the memory has done since the start: counts, and seconds where it says so."""

    lookups: Mapping[str, int] = field(default_factory=dict)  # requests by tier of their adapter
    loads: Mapping[LoadReason, int] = field(default_factory=dict)
    cancelled_loads: int = 0
    load_seconds: Histogram = field(default_factory=Histogram)
    # ("prefix" or "adapter", "kv", "adapter" or "unload"): what left the device, for whom.
    evictions: Mapping[tuple[str, str], int] = field(default_factory=dict)
    host_evictions: int = 0
    moved_pages: int = 0
    moved_adapters: int = 0
    move_seconds: float = 0.0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine for `status`, `top` and metrics.

    The pages are free, `kv` (in a sequence's block table), `cached` (K and V that nobody reads
    now) or `adapter` (or being cleared for one); together they are all.
    """

    steps: int
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    total_pages: int
    free_pages: int
    kv_pages: int
    adapter_pages: int
    page_bytes: int
    host_cache_bytes: int
    adapters: tuple[AdapterState, ...] = ()
    cached_pages: int = 0
    weight_bytes: int = 0  # of the base model on the device
    memory: MemoryStats = field(default_factory=MemoryStats)
