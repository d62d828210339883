"""What is worth a person's attention in an adapter that can be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorad.adapters.peft_config import LoraSettings

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning: a stable code, a sentence, and plain JSON values."""

    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)


def config_findings(settings: LoraSettings, trained_paths: Sequence[str]) -> Iterator[Finding]:
    """What the config says that the tensors do not bear out, or does not say at all."""
    if settings.base_model_name is None:
        yield Finding("base_name_missing", "the config does not name a base model")
    if settings.unknown:
        yield _listing("unknown_config_keys", "unknown keys, at neutral values", settings.unknown)
    if settings.defaulted:
        yield _listing("config_default_used", "not given, so PEFT's 8 is used", settings.defaulted)
    task = settings.raw.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        message = f"trained for the task {str(task)[:60]}, served as CAUSAL_LM"
        yield Finding("task_type_differs", message, {"task_type": str(task)[:60]})
    for table in (settings.rank_pattern, settings.alpha_pattern):
        unused = table.unused(trained_paths)
        if unused:
            yield _listing("pattern_unused", f"{table.where} keys that match no module", unused)
    absent = _targets_without_tensors(settings.raw.get("target_modules"), trained_paths)
    if absent:
        yield _listing("target_without_tensors", "target_modules without a tensor", absent)


def _targets_without_tensors(targets: object, trained_paths: Sequence[str]) -> list[str]:
    """Names in a `target_modules` list that no tensor belongs to; a regex is left alone."""
    if not isinstance(targets, list):
        return []
    names = {str(target): f".{target}" for target in targets[:1000]}
    dotted = [f".{path}" for path in trained_paths]
    return [name for name, tail in names.items() if not any(path.endswith(tail) for path in dotted)]


def _listing(code: str, what: str, names: Sequence[str]) -> Finding:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    listed = ", ".join(name[:80] for name in names[:_SHOWN])
    return Finding(code, f"{what}: {listed}{more}", {"names": [name[:80] for name in names[:50]]})
