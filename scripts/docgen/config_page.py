"""man/lorad.toml.5: every setting with its type, default, limits and environment variable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field
from itertools import groupby
from typing import Any

from docgen import roff
from docgen.commands import Command
from docgen.settings import default_of, limits_of, setting_of, type_of
from lorad.config import SETTINGS, environment_name

_DESCRIPTION = (
    "`lorad` reads one TOML file: the one of `--config`, else of `LORAD_CONFIG`, else the first "
    "that exists of ~/.config/lorad/lorad.toml and /etc/lorad/lorad.toml. Without any, the "
    "defaults below hold.",
    "An environment variable goes before the file, and an option of `lorad start` before both. "
    "An unknown section or key, or a value of the wrong kind, is an error that names the line. "
    "`lorad check-config` prints every effective value and where it came from.",
    "A size is a whole number of bytes, or text with a unit: B, KiB, MiB, GiB or TiB.",
)
_EXAMPLE = """\
[model]
path = "meta-llama/Llama-3.1-8B-Instruct"
max_model_len = 8192

[server]
host = "0.0.0.0"
port = 8000
api_keys = "/etc/lorad/keys"

[admin]
group = "ml-platform"

[engine]
max_loras = 64
max_lora_rank = 32

[memory]
gpu_memory_utilization = 0.9
host_cache_bytes = "32GiB"
"""
_KEYS_FILE = """\
# key                  tenant
a-long-random-text     acme
another-one            default
"""


def config_page(start: Command, version: str) -> str:
    """`start` is the command whose options set some of the settings."""
    parts = [
        roff.title("lorad.toml", 5, f"lorad {version}"),
        roff.section("Name"),
        r"lorad.toml \- settings of the lorad daemon",
        roff.section("Description"),
        *map(roff.paragraph, _DESCRIPTION),
        roff.section("Settings"),
        *_settings({setting_of(option.name): option.name for option in start.options}),
        roff.section("Examples"),
        roff.example("A daemon on a GPU, with keys for its clients:", _EXAMPLE.splitlines()),
        roff.example("The file that `server.api_keys` names:", _KEYS_FILE.splitlines()),
        roff.section("See also"),
        f"{roff.bold('lorad')}(1), {roff.bold('loractl')}(1)",
    ]
    return roff.page(parts)


def _settings(options: dict[str | None, str]) -> Iterator[str]:
    by_section = groupby(SETTINGS.items(), key=lambda entry: entry[0].partition(".")[0])
    for section, entries in by_section:
        yield roff.subsection(f"[{section}]")
        for setting, field in entries:
            yield _setting(setting, field, options.get(setting))


def _setting(setting: str, field: Field[Any], option: str | None) -> str:
    term = f"{roff.bold(setting.partition('.')[2])} = {roff.italic(type_of(field))}"
    facts = [field.metadata["help"], f"Default: `{default_of(field)}`.", limits_of(field)]
    facts.append(f"Environment: `{environment_name(setting)}`.")
    if field.metadata.get("reloads"):
        facts.append("Changes while the daemon runs: SIGHUP.")
    if option:
        facts.append(f"Option: `{option}`.")
    return roff.item(term, " ".join(filter(None, facts)))
