"""Bytes of the registry's store that were altered or cannot be read."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from lorad.adapter_ref import AdapterRef
from lorad.daemon import store_reader
from lorad.errors import LoradError
from lorad.registry.records import Action
from lorad.registry.registry import Registry
from registry_on_disk import ME, SHAPE, TINKER, code, push
from registry_on_disk import adapters as adapters
from registry_on_disk import registry as registry
from registry_on_disk import state as state


def flip_last_byte(registry: Registry, ref: AdapterRef) -> None:
    weights = registry.directory(ref) / "adapter_model.safetensors"
    weights.chmod(0o600)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def test_altered_bytes_are_never_served_until_pushed_again(
    registry: Registry, adapters: list[Path]
) -> None:
    ref = push(registry, adapters[0]).version.ref
    registry.promote(TINKER, "v1", who=ME)
    assert registry.verify(ref) == registry.directory(ref)
    flip_last_byte(registry, ref)
    with pytest.raises(LoradError) as caught:
        registry.verify(ref)
    assert code(caught) == "store.digest_mismatch"
    for ask in ("tinker", "tinker@v1"):
        with pytest.raises(LoradError) as refused:
            registry.resolve(ask)
        assert code(refused) == "version.failed"
    assert registry.live_adapters() == []
    with pytest.raises(LoradError):
        registry.promote(TINKER, "v1", who=ME)
    assert push(registry, adapters[0]).outcome == "restored"
    assert registry.resolve("tinker") == ref
    assert registry.verify(ref)
    assert [e.action for e in registry.history(TINKER)][:2] == [Action.RESTORE, Action.FAIL]


def test_a_load_of_altered_bytes_marks_the_version(
    registry: Registry, adapters: list[Path]
) -> None:
    """The daemon proves the bytes that it packs, in one pass, and leaves the verdict to verify."""
    ref = push(registry, adapters[0]).version.ref
    registry.promote(TINKER, "v1", who=ME)
    read = store_reader(registry, SHAPE)
    assert read(ref, SHAPE, torch.float32).digest == ref.digest
    flip_last_byte(registry, ref)
    with pytest.raises(LoradError) as caught:
        read(ref, SHAPE, torch.float32)
    assert code(caught) == "store.digest_mismatch"
    with pytest.raises(LoradError) as refused:
        registry.resolve("tinker")
    assert code(refused) == "version.failed"


def test_files_that_cannot_be_opened_just_now_are_not_taken_for_lost(
    registry: Registry, adapters: list[Path]
) -> None:
    ref = push(registry, adapters[0]).version.ref
    registry.promote(TINKER, "v1", who=ME)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(LoradError) as caught:
            registry.verify(ref)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code(caught) == "store.unavailable"
    assert registry.verify(ref)
    assert registry.resolve("tinker") == ref
