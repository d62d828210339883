"""A daemon of registry and admin API alone, with an engine that only keeps books.

Run as `python tests/admin_daemon.py STATE SOCKET`; tests take `write_adapter` and the
constants from it by runpy. Files in STATE steer the engine: `engine-full` makes loads fail,
`engine-busy` makes unloads time out, `engine-slow` makes loads take a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lorad.sizing.model_shape import ModelShape

BASE = "org/Tiny-Base"
SHAPE = ModelShape("llama", 8, 1, 2, 1, 4, 16, 32)
MAX_RANK = 16


def write_adapter(directory: Path, seed: int, *, rank: int = 2, **config: object) -> Path:
    """A PEFT directory with LoRA on q_proj of the only layer; its weights follow the seed."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    header: dict[str, object] = {}
    body = b""
    for name, shape in (("lora_A", (rank, 8)), ("lora_B", (8, rank))):
        values = [rng.uniform(-1, 1) for _ in range(shape[0] * shape[1])]
        start, body = len(body), body + struct.pack(f"<{len(values)}f", *values)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(body)]}
        header[f"{prefix}.{name}.weight"] = entry
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + body
    (directory / "adapter_model.safetensors").write_bytes(weights)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": BASE,
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def make_engine(state: Path, read: Callable[[Any], object]) -> Any:
    from lorad.adapter_ref import AdapterRef
    from lorad.engine import messages
    from lorad.errors import LoradError

    class Engine:
        """Says that it loads and unloads, and remembers what it said."""

        def __init__(self) -> None:
            self.resident: dict[str, messages.AdapterState] = {}

        async def load_adapter(
            self, ref: AdapterRef, *, pin: bool | None = None
        ) -> messages.AdapterLoaded:
            if ref.digest not in self.resident:
                await asyncio.to_thread(read, ref)  # as the loader does, which checks every byte
            if (state / "engine-full").exists():
                raise LoradError("memory.no_capacity", f"no room for {ref}", hint="unload some")
            if (state / "engine-slow").exists():
                await asyncio.sleep(1.0)
            self.resident[ref.digest] = messages.AdapterState(
                ref.digest, "device", rank=2, device_pages=1, device_bytes=4096, host_bytes=2048
            )
            return messages.AdapterLoaded("", pages=1, bytes=4096, seconds=0.001)

        async def unload_adapter(
            self, ref: AdapterRef, *, drain_timeout: float
        ) -> messages.AdapterUnloaded:
            if (state / "engine-busy").exists():
                raise LoradError("drain.timeout", f"2 requests still run on {ref}")
            known = self.resident.pop(ref.digest, None)
            freed = (4096, 2048) if known else (0, 0)
            return messages.AdapterUnloaded("", *freed, drained_requests=0)

        def stats(self) -> messages.EngineStats:
            adapters = tuple(self.resident.values())
            return messages.EngineStats(3, 1, 0, 7, 5, 64, 60, 3, 1, 4096, 2048, adapters)

        def recent_steps(self, limit: int) -> list[messages.StepRecord]:
            rows = {"base": 1, "default/tinker@v1": 2}
            steps = [
                messages.StepRecord(n, time.time(), 0.01, 0, 3, rows, ("a", "b", "c"))
                for n in range(3)
            ]
            return steps[-limit:]

    return Engine()


def serve(state: Path, path: Path) -> None:
    import uvicorn

    from lorad.adapters.spectrum import read_checked
    from lorad.registry.registry import Registry
    from lorad.server.admin import build_admin_app
    from lorad.server.admin_context import AdminLimits
    from lorad.server.admin_transport import AdminProtocol, admin_server_config
    from lorad.server.canary_watch import CanaryWatch
    from lorad.server.traffic import Traffic
    from lorad.sockets import AdminGroups, AdminSocket

    AdminProtocol.header_seconds = 1.0
    AdminProtocol.max_connections = 16
    AdminProtocol.max_of_one_process = 12
    check = partial(read_checked, shape=SHAPE, max_lora_rank=MAX_RANK)
    registry = Registry.open(state, BASE, check)
    limits = AdminLimits(max_upload_bytes=1 << 20, max_uploads=3, upload_idle=2.0, read_timeout=1.0)
    engine = make_engine(state, registry.verify)
    traffic = Traffic(engine, registry.find, CanaryWatch(lambda *_: None))
    groups = AdminGroups.named("", os.environ.get("LORAD_TEST_READ_GROUP", ""))
    with AdminSocket(path, groups) as admin:
        app = build_admin_app(
            registry,
            engine,
            traffic,
            config=lambda: {"model": {"id": BASE}},
            shutdown=lambda: setattr(server, "should_exit", True),
            limits=limits,
            groups=groups,
            stopping=lambda: server.should_exit,
        )
        server = uvicorn.Server(admin_server_config(app))
        print("ready", flush=True)
        asyncio.run(server.serve(sockets=[admin.socket]))
    registry.close()


if __name__ == "__main__":
    os.umask(0)  # the weakest there is: modes must not depend on it
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
