"""How the registry resolves what a request names, and what it lists as live."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorad.adapter_ref import AdapterName
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from registry_on_disk import ME, TINKER, code, push
from registry_on_disk import adapters as adapters
from registry_on_disk import registry as registry
from registry_on_disk import state as state


def test_resolve_names_what_it_cannot_find(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    registry.promote(TINKER, "v1", who=ME)
    assert registry.resolve("default/tinker") == registry.resolve("tinker@v1")
    for model in ("nobody", "acme/tinker", "GPT-4", "../etc/passwd", "", "a" * 1_000_000, "\0"):
        with pytest.raises(LoradError) as caught:
            registry.resolve(model)
        assert code(caught) == "adapter.not_found"
        assert len(caught.value.message) < 200
    with pytest.raises(LoradError) as caught:
        registry.resolve("tinker@v2")
    assert code(caught) == "version.not_found"
    assert "v1" in caught.value.hint


def test_unknown_names_leave_no_trace_in_memory(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    for number in range(10_000):
        with pytest.raises(LoradError):
            registry.resolve(f"name-{number}")
    assert len(registry.adapters()) == 1


def test_live_adapters_are_what_models_lists(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0], "zeta")
    push(registry, adapters[1], "alpha")
    push(registry, adapters[2], "unpromoted")
    for name in ("zeta", "alpha"):
        registry.promote(AdapterName.parse(name), "v1", who=ME)
    assert [str(entry.ref) for entry in registry.live_adapters()] == [
        "default/alpha@v1",
        "default/zeta@v1",
    ]
