"""The JSON of the admin API, shared by the daemon and loractl. Standard library only.

Within one API version fields may be added and never removed or renamed, so that either side
may be the older one: a reader takes what it knows and leaves the rest.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict
from urllib.parse import quote

from lorad.errors import LoradError

API_VERSION = 1
API_HEADER = "lorad-api"  # on every response of the admin socket
REQUEST_ID_HEADER = "x-request-id"
PREFIX = f"/v{API_VERSION}"

# The two files of an adapter: nothing else is ever uploaded, stored or read.
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
CONFIG_LIMIT = 1 << 20  # bytes
TEXT_LIMIT = 2000  # characters of a message or a reason

HEALTHZ = f"{PREFIX}/healthz"
STATUS = f"{PREFIX}/status"
CONFIG = f"{PREFIX}/config"
METRICS = f"{PREFIX}/metrics"
STEPS = f"{PREFIX}/steps"
OPENAPI = f"{PREFIX}/openapi.json"
ADAPTERS = f"{PREFIX}/adapters"
UPLOADS = f"{PREFIX}/uploads"
OPERATIONS = f"{PREFIX}/operations"
EVENTS = f"{PREFIX}/events"
GC = f"{PREFIX}/gc"
DRAIN = f"{PREFIX}/drain"
RESUME = f"{PREFIX}/resume"
SHUTDOWN = f"{PREFIX}/shutdown"
# vLLM's names, so that scripts written for it work with `curl --unix-socket`.
VLLM_LOAD = f"{PREFIX}/load_lora_adapter"
VLLM_UNLOAD = f"{PREFIX}/unload_lora_adapter"

# After an adapter's path these are routes, so an adapter inside a tenant cannot have the name.
ROUTE_WORDS = ("versions", "history")
# What `x-lorad-adapter`, steps and metrics say of requests without an adapter.
BASE_WORD = "base"


def check_text(key: str, text: str) -> str:
    """A message or a reason, on either side; raises `request.invalid` when it is too long."""
    if len(text) > TEXT_LIMIT:
        raise LoradError(
            "request.invalid",
            f"{key!r} has {len(text):,} characters; at most {TEXT_LIMIT:,} are kept",
            hint="shorten it, and say where the rest is",
            details={"field": key, "length": len(text), "limit": TEXT_LIMIT},
        )
    return text


def adapter_path(name: str) -> str:
    return f"{ADAPTERS}/{quote(name, safe='')}"


def version_path(name: str, label: str) -> str:
    return f"{adapter_path(name)}/versions/{quote(label, safe='')}"


def operation_path(operation_id: str) -> str:
    return f"{OPERATIONS}/{quote(operation_id, safe='')}"


def upload_file_path(upload_id: str, file: str) -> str:
    return f"{UPLOADS}/{quote(upload_id, safe='')}/files/{file}"


class WhoInfo(TypedDict):
    uid: int
    pid: int


class ResidencyInfo(TypedDict):
    """Where a version's bytes are in memory; `tier` is messages.Residency."""

    tier: str
    device_bytes: int
    host_bytes: int
    running_requests: int
    waiting_requests: int
    error: str


class WarningInfo(TypedDict):
    code: str
    message: str


class VersionInfo(TypedDict):
    version: str
    digest: str
    live: bool
    state: str  # available | failed
    failure: str
    pinned: bool
    rank: int
    modules: int
    targets: list[str]
    bytes: int  # of both files
    trained_on: str
    warnings: list[WarningInfo]
    message: str
    created_at: float
    created_by: WhoInfo
    residency: ResidencyInfo


class CountsInfo(TypedDict):
    """One version's requests since the canary began; `ttft_seconds` is a sum over first_tokens."""

    requests: int
    errors: int
    nonfinite: int
    prompt_tokens: int
    generated_tokens: int
    first_tokens: int
    ttft_seconds: float


class CanaryInfo(TypedDict):
    version: str
    percent: float
    auto_rollback: bool
    since: float
    counts: dict[str, CountsInfo]  # of the live version and of the canary, by label


class AdapterInfo(TypedDict):
    """`name` as people write it; `model` is what a request puts into its model field."""

    name: str
    generation: int
    live: str | None
    live_since: float | None
    canary: CanaryInfo | None
    created_at: float
    versions: list[VersionInfo]


class AdapterList(TypedDict):
    cursor: int  # id of the last event that the list knows
    adapters: list[AdapterInfo]


class EventInfo(TypedDict):
    id: int
    name: str
    at: float
    who: WhoInfo
    action: str
    from_version: str | None
    to_version: str | None
    generation: int
    reason: str
    percent: float | None  # that a canary got


class History(TypedDict):
    name: str
    events: list[EventInfo]


class UploadRequest(TypedDict):
    name: str
    version: NotRequired[str | None]
    message: NotRequired[str]


class UploadInfo(TypedDict):
    id: str
    files: list[str]
    max_bytes: int


class FileInfo(TypedDict):
    file: str
    bytes: int
    sha256: str


class PushResult(TypedDict):
    """`changed` is false when nothing was (or, in a dry run, would be) done."""

    name: str
    outcome: Literal["created", "restored", "unchanged"]
    changed: bool
    dry_run: bool
    version: VersionInfo


class MoveResult(TypedDict):
    """What promote, rollback or retire did to the live version of a name."""

    name: str
    from_version: str | None
    to_version: str | None
    generation: int
    changed: bool
    dry_run: bool


class SelfTestInfo(TypedDict):
    """`effect`: the largest change of a log-probability against the base model, in nats.

    `delta_error`: the largest difference between the delta that the engine adds to a module and
    the one that the version's files give, in norm, relative to the latter.
    """

    prompts: int
    effect: float
    delta_error: float


class PromoteResult(MoveResult):
    """`self_test` is None when nothing was tried: a dry run, or it was live already."""

    self_test: NotRequired[SelfTestInfo | None]
    checks: NotRequired[int]  # that were passed


class CanaryResult(TypedDict):
    """The canary of a name afterwards; `version` is None and `percent` 0 when there is none."""

    name: str
    from_version: str | None
    version: str | None
    percent: float
    auto_rollback: bool
    generation: int
    changed: bool
    dry_run: bool


class LoadResult(TypedDict):
    name: str
    version: str
    pages: int
    bytes: int
    seconds: float
    changed: bool
    dry_run: bool


class UnloadResult(TypedDict):
    name: str
    version: str
    freed_device_bytes: int
    freed_host_bytes: int
    drained_requests: int
    changed: bool
    dry_run: bool


class PinResult(TypedDict):
    name: str
    version: str
    pinned: bool
    changed: bool
    dry_run: bool


class DeleteResult(TypedDict):
    name: str
    deleted: list[str]
    changed: bool
    dry_run: bool


class SkippedInfo(TypedDict):
    ref: str  # name@version
    why: str


class GcResult(TypedDict):
    """`deleted` are name@version; with `dry_run`, those that would be."""

    keep: int
    deleted: list[str]
    skipped: list[SkippedInfo]
    freed_bytes: int
    changed: bool
    dry_run: bool


class DrainResult(TypedDict):
    draining: bool
    running: int  # requests, those that wait among them
    changed: bool
    dry_run: bool


class OperationInfo(TypedDict):
    """A change that was asked for with `Prefer: respond-async`."""

    id: str
    action: str
    target: str
    state: str  # running | succeeded | failed
    who: WhoInfo
    started_at: float
    ended_at: float | None
    result: dict[str, Any] | None  # what the change answers, once it has succeeded
    error: dict[str, Any] | None  # the error object, once it has failed


class OperationAccepted(TypedDict):
    operation: OperationInfo


class OperationList(TypedDict):
    operations: list[OperationInfo]


class MemoryInfo(TypedDict):
    """messages.MemoryStats: counts since the start."""

    lookups: dict[str, int]  # requests by the tier that held their adapter
    loads: dict[str, int]
    cancelled_loads: int
    load_seconds: float  # all loads together
    loads_done: NotRequired[int]  # that those seconds are of
    evictions: dict[str, int]  # "prefix for kv", "adapter for adapter", ...
    host_evictions: int
    moved_pages: int
    moved_adapters: int
    move_seconds: float
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    preemptions: int


class EngineInfo(TypedDict):
    """messages.EngineStats without the list of adapters."""

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
    cached_pages: int
    weight_bytes: int
    memory: MemoryInfo


class StoreInfo(TypedDict):
    """The disk of the registry."""

    path: str
    free_bytes: int
    total_bytes: int


class TtftInfo(TypedDict):
    """Times to the first token of the last requests, in seconds; "base" among the versions."""

    requests: int
    p50: float | None
    p99: float | None
    p50_by_version: dict[str, float]


class StatusInfo(TypedDict):
    daemon_version: str
    api_version: int
    pid: int
    uid: int
    started_at: float
    base_model: str
    adapters: int
    live_adapters: int
    canaries: int
    draining: bool
    role: str  # of the asking peer: admin | read
    store: StoreInfo
    ttft: TtftInfo
    failed_versions: int
    tiers: dict[str, int]  # residency -> number of adapter contents the engine knows
    engine: EngineInfo


class StepInfo(TypedDict):
    step: int
    started_at: float
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    rows: dict[str, int]
    requests: list[str]


class StepList(TypedDict):
    steps: list[StepInfo]


class ConfigInfo(TypedDict):
    config: dict[str, Any]
