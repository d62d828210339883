"""Settings: flags over LORAD_* variables over lorad.toml over defaults.

Each section is a frozen dataclass with its defaults beside the fields; a field's `help` is what
the manual page says. An unknown key or a value of the wrong kind is an error that names the
file and the line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lorad.errors import LoradError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
LEVELS = ("debug", "info", "warning", "error")
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)?")
_HEADER = re.compile(r"\s*\[+([^\]]+)\]")
_KEY = re.compile(r"""\s*([\w."'-]+)\s*=""")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def option(default: Any, help: str, **limits: Any) -> Any:
    """A setting with its help; limits are `choices`, `low`, `high`, or `size=True` (bytes).

    `reloads=True`: it can change while the daemon runs.
    """
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class ServerSection:
    host: str = option("127.0.0.1", "Address of the public OpenAI-compatible API.")
    port: int = option(8000, "Its TCP port; 0 takes a free one.", low=0, high=65535)
    api_keys: str = option(
        "",
        "File of bearer keys, one `key tenant` a line. Empty: no key is asked for.",
        reloads=True,
    )
    drain_timeout: float = option(
        30.0, "Seconds running requests may go on after SIGTERM.", low=0, high=3600, reloads=True
    )


@dataclass(frozen=True)
class AdminSection:
    socket: str = option("", "Path of the admin socket. Empty: the runtime directory.")
    group: str = option("", "Group that may use the admin socket beside the daemon's user.")
    read_group: str = option(
        "",
        "Group that may read over the admin socket and change nothing. With both groups, the "
        "members of `group` must be in this one too, to reach the socket.",
    )


@dataclass(frozen=True)
class ModelSection:
    path: str = option("", "Directory of the base model, or its id on the hub.")
    name: str = option("", "Name of the base model in the API. Empty: the last part of the path.")
    dtype: str = option("auto", "Serving dtype; auto takes the checkpoint's.", choices=DTYPES)
    device: str = option(
        "auto",
        "Where to run; auto takes CUDA if there is one, and does not pass over a GPU that it "
        "cannot use.",
        choices=DEVICES,
    )
    max_model_len: int = option(
        0, "Longest prompt and answer together, in tokens. 0: the model's own.", low=0, high=2**24
    )


@dataclass(frozen=True)
class EngineSection:
    max_num_seqs: int = option(64, "Sequences that run at once.", low=1, high=4096)
    # Far more than a step has use for; the GPU's kernels count its partial sums in 32 bits.
    max_num_batched_tokens: int = option(2048, "Tokens computed in one step.", low=16, high=2**17)
    max_queued: int = option(
        1024,
        "Requests running and waiting; beyond it a request gets status 429.",
        low=1,
        high=2**20,
        reloads=True,
    )
    max_loras: int = option(
        32, "Different adapters in one step. Reserves nothing.", low=1, high=4096
    )
    max_lora_rank: int = option(64, "Largest rank accepted. Reserves nothing.", low=1, high=512)
    max_cpu_loras: int = option(256, "Adapters kept in host memory.", low=1, high=2**20)
    adapter_wait: float = option(
        5.0, "Seconds after which a request takes an adapter's place in the step.", low=0, high=3600
    )
    threads: int = option(0, "CPU threads of the engine. 0: all cores.", low=0, high=1024)
    cuda_graphs: bool = option(
        True,
        "On CUDA: capture decode steps at the start and replay them. Their memory is set aside "
        "either way.",
    )
    step_timeout: float = option(
        0.0,
        "Seconds after which a step that has not ended counts as one that hangs: /health and new "
        "requests fail, and the watchdog is told no more. 0: 120 on CUDA, 1200 on a CPU.",
        low=0,
        high=86400,
    )


@dataclass(frozen=True)
class MemorySection:
    slab_bytes: int = option(
        0,
        "Size of the slab of pages for KV and adapters. 0: from gpu_memory_utilization on CUDA, "
        "a quarter of the available memory on a CPU: of what the system has, and what the limits "
        "of its cgroups leave.",
        size=True,
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of the GPU's memory that lorad may fill.", low=0.05, high=0.99
    )
    block_size: int = option(16, "Tokens of KV in a page.", low=1, high=1024)
    adapter_floor: float = option(
        0.0, "Share of the pages that KV leaves to adapters, however many run.", low=0, high=0.9
    )
    adapter_ceiling: float = option(
        1.0, "Share of the pages that adapters may take.", low=0.01, high=1
    )
    host_cache_bytes: int = option(
        0,
        "Bytes of adapters kept in host memory. 0: a quarter of the available memory. On CUDA up "
        "to an eighth more is page-locked, for those that are on their way.",
        size=True,
    )


@dataclass(frozen=True)
class RegistrySection:
    path: str = option(
        "", "Directory of the registry and the version store. Empty: the state directory."
    )
    store: str = option(
        "",
        "Where versions lie: a directory, or s3://BUCKET/PREFIX (needs the extra s3). Empty: "
        "`store` in the registry's directory.",
    )
    cache_bytes: int = option(
        16 << 30, "With a store in S3: bytes of it kept on the local disk.", size=True
    )
    warm: int = option(
        64,
        "Versions loaded again after a restart, the last used first, as long as half of the "
        "pages stay free.",
        low=0,
        high=4096,
    )
    keep: int = option(
        0,
        "Newest versions of an adapter that stay after a promote, beside those that something "
        "refers to. 0: all.",
        low=0,
        high=10**6,
        reloads=True,
    )


@dataclass(frozen=True)
class LogSection:
    level: str = option("info", "How much to log.", choices=LEVELS, reloads=True)


@dataclass(frozen=True)
class Config:
    server: ServerSection = field(default_factory=ServerSection)
    admin: AdminSection = field(default_factory=AdminSection)
    model: ModelSection = field(default_factory=ModelSection)
    engine: EngineSection = field(default_factory=EngineSection)
    memory: MemorySection = field(default_factory=MemorySection)
    registry: RegistrySection = field(default_factory=RegistrySection)
    log: LogSection = field(default_factory=LogSection)

    def items(self) -> list[tuple[str, Any]]:
        """("server.port", 8000) and so on, in the order of the manual page."""
        return [
            (f"{section.name}.{key.name}", getattr(getattr(self, section.name), key.name))
            for section in fields(self)
            for key in fields(getattr(self, section.name))
        ]


@dataclass(frozen=True)
class LoadedConfig:
    """The effective settings, and where each came from."""

    config: Config
    origins: dict[
        str, str
    ]  # "server.port" -> "default", "lorad.toml:3", "LORAD_SERVER_PORT", "flag"


SETTINGS = {
    f"{section.name}.{key.name}": key
    for section in fields(Config())
    for key in fields(getattr(Config(), section.name))
}


def environment_name(setting: str) -> str:
    """`server.port` -> `LORAD_SERVER_PORT`; the socket's is shorter, and loractl reads it too."""
    if setting == "admin.socket":
        return "LORAD_SOCKET"
    return "LORAD_" + setting.replace(".", "_").upper()


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each LORAD_* variable that means nothing: most likely it is misspelt.

    No error, since other programs may have variables of that name.
    """
    known = [*map(environment_name, SETTINGS), "LORAD_CONFIG"]
    found = []
    for name in sorted(environment):
        if name.startswith("LORAD_") and name not in known:
            close = get_close_matches(name, known, 1, 0.7)
            found.append(f"{name} is no setting" + (f"; is {close[0]} meant?" if close else ""))
    return found


def load_config(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> LoadedConfig:
    """Merge the sources; `flags` are {"server.port": 8001}, None meaning not given."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")

    def take(setting: str, raw: Any, origin: str) -> None:
        values[setting] = _checked(setting, raw, origin)
        origins[setting] = origin

    if file is not None:
        for setting, raw, line in _read_toml(file):
            take(setting, raw, f"{file}:{line}")
    for setting in SETTINGS:
        if (name := environment_name(setting)) in environment:
            take(setting, _parsed(environment[name], type(SETTINGS[setting].default)), name)
    for setting, raw in flags.items():
        if raw is not None:
            take(setting, raw, "flag")
    return LoadedConfig(_build(values), origins)


def reloaded(running: Config, wanted: Config) -> Config:
    """`running` with those settings of `wanted` that can change while the daemon runs."""
    new = {key: value for key, value in wanted.items() if SETTINGS[key].metadata.get("reloads")}
    return _build({**dict(running.items()), **new})


def _build(values: Mapping[str, Any]) -> Config:
    sections = {}
    for section in fields(Config()):
        kind = type(getattr(Config(), section.name))
        given = {k.name: values.get(f"{section.name}.{k.name}", k.default) for k in fields(kind)}
        sections[section.name] = kind(**given)
    return Config(**sections)


def _read_toml(file: Path) -> list[tuple[str, Any, int]]:
    """(setting, value, line) of every key; unknown sections and keys are errors."""
    try:
        text = file.read_text("utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError:
        raise LoradError("path.not_found", f"there is no configuration file {file}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LoradError("config.invalid", f"{file}: {error}") from None
    found = []
    for section, keys in document.items():
        line = _line_of(text, section)
        if not isinstance(keys, dict) or not any(s.startswith(f"{section}.") for s in SETTINGS):
            raise _unknown(f"{file}:{line}", f"[{section}]", [s.split(".")[0] for s in SETTINGS])
        for key, value in keys.items():
            line = _line_of(text, f"{section}.{key}")
            if f"{section}.{key}" not in SETTINGS:
                known = [s.split(".")[1] for s in SETTINGS if s.startswith(f"{section}.")]
                raise _unknown(f"{file}:{line}", f"{section}.{key}", known)
            found.append((f"{section}.{key}", value, line))
    return found


def _unknown(where: str, what: str, known: list[str]) -> LoradError:
    return LoradError(
        "config.unknown_key",
        f"{where}: {what} is not a setting",
        hint=f"known here: {', '.join(dict.fromkeys(known))}",
        details={"key": what},
    )


def _line_of(text: str, name: str) -> int:
    """Line where `section` or `section.key` first appears; tomllib does not tell.

    A key of an inline table is on its table's line.
    """
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            found = section = _unquoted(header[1])
        elif key := _KEY.match(line):
            found = f"{section}.{_unquoted(key[1])}".lstrip(".")
        else:
            continue
        if f"{found}.".startswith(f"{name}."):
            return number
    return _line_of(text, name.rpartition(".")[0]) if "." in name else 1


def _unquoted(name: str) -> str:
    return re.sub(r"[\s\"']", "", name)


def _checked(setting: str, raw: Any, origin: str) -> Any:
    known = SETTINGS[setting]
    try:
        value = _convert(raw, type(known.default), known.metadata)
    except ValueError as error:
        raise LoradError(
            "config.invalid",
            f"{origin}: {setting} {error}",
            hint=known.metadata["help"],
            details={"key": setting},
        ) from None
    return value


def _convert(raw: Any, kind: type, metadata: Mapping[str, Any]) -> Any:
    if metadata.get("size"):
        return parse_size(raw)
    value = _as_kind(raw, kind)
    choices = metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"is {value!r}, not one of {', '.join(choices)}")
    if "low" in metadata and not metadata["low"] <= value <= metadata["high"]:
        raise ValueError(f"is {value}, not within {metadata['low']} to {metadata['high']}")
    return value


def _parsed(text: str, kind: type) -> Any:
    """A variable's text as the number or truth it is to be, or as it is when it is none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text


def _as_kind(raw: Any, kind: type) -> Any:
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if type(raw) is not kind:
        raise ValueError(f"is {raw!r}, not of type {kind.__name__}")
    return raw


def parse_size(raw: Any) -> int:
    """Bytes: a whole number, or text such as "2GiB". Raises ValueError."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise ValueError(f'is {raw!r}, not a size such as 1073741824 or "1GiB"')
    return int(match[1]) * _UNITS[match[2] or "B"]
