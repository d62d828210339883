"""How often a version's bytes are read on its way onto the device: once, by whoever must."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.engine.messages import AdapterState
from lorad.server.admin_changes import bring_to_device

REF = AdapterRef(AdapterName("default", "cats"), "v1", "sha256:cats")


class Parts:
    """Registry and engine; the engine's loader reads what is not in memory, as the real one."""

    def __init__(self, tier: str | None) -> None:
        self.tier, self.reads = tier, 0

    def verify(self, ref: AdapterRef) -> None:
        assert ref == REF
        self.reads += 1

    def stats(self) -> Any:
        adapters = [AdapterState(REF.digest, self.tier)] if self.tier else []
        return SimpleNamespace(adapters=adapters)

    async def load_adapter(self, ref: AdapterRef, *, pin: bool | None) -> None:
        if self.tier not in ("host", "device"):
            self.verify(ref)


@pytest.mark.parametrize("tier", [None, "disk", "loading", "failed", "host", "device"])
@pytest.mark.parametrize("trusted", [False, True])
def test_bytes_are_read_once(tier: str | None, trusted: bool) -> None:
    parts = Parts(tier)
    ctx: Any = SimpleNamespace(registry=parts, engine=parts)
    version: Any = SimpleNamespace(ref=REF, servable=True, pinned=False)
    asyncio.run(bring_to_device(ctx, version, trusted=trusted))
    in_memory = tier in ("host", "device")
    assert parts.reads == (0 if trusted and in_memory else 1)
