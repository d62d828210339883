"""The JSON of the admin API, shared by the daemon and loractl. Standard library only.

Within one API version fields may be added and never removed or renamed, so that either side
may be the older one: a reader takes what it knows and leaves the rest.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict
from urllib.parse import quote

API_VERSION = 1
API_HEADER = "lorad-api"  # on every response of the admin socket
REQUEST_ID_HEADER = "x-request-id"
PREFIX = f"/v{API_VERSION}"

# The two files of an adapter: nothing else is ever uploaded, stored or read.
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
CONFIG_LIMIT = 1 << 20  # bytes

HEALTHZ = f"{PREFIX}/healthz"
STATUS = f"{PREFIX}/status"
CONFIG = f"{PREFIX}/config"
METRICS = f"{PREFIX}/metrics"
STEPS = f"{PREFIX}/steps"
ADAPTERS = f"{PREFIX}/adapters"
UPLOADS = f"{PREFIX}/uploads"
SHUTDOWN = f"{PREFIX}/shutdown"
# vLLM's names, so that scripts written for it work with `curl --unix-socket`.
VLLM_LOAD = f"{PREFIX}/load_lora_adapter"
VLLM_UNLOAD = f"{PREFIX}/unload_lora_adapter"

# After an adapter's path these are routes, so an adapter inside a tenant cannot have the name.
ROUTE_WORDS = ("versions", "history")


def adapter_path(name: str) -> str:
    return f"{ADAPTERS}/{quote(name, safe='')}"


def version_path(name: str, label: str) -> str:
    return f"{adapter_path(name)}/versions/{quote(label, safe='')}"


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


class AdapterInfo(TypedDict):
    """`name` as people write it; `model` is what a request puts into its model field."""

    name: str
    generation: int
    live: str | None
    live_since: float | None
    created_at: float
    versions: list[VersionInfo]


class AdapterList(TypedDict):
    adapters: list[AdapterInfo]


class EventInfo(TypedDict):
    id: int
    at: float
    who: WhoInfo
    action: str
    from_version: str | None
    to_version: str | None
    generation: int
    reason: str


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


class MemoryInfo(TypedDict):
    """messages.MemoryStats: counts since the start."""

    lookups: dict[str, int]  # requests by the tier that held their adapter
    loads: dict[str, int]
    cancelled_loads: int
    load_seconds: float  # all loads together
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


class StatusInfo(TypedDict):
    daemon_version: str
    api_version: int
    pid: int
    uid: int
    started_at: float
    base_model: str
    adapters: int
    live_adapters: int
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
