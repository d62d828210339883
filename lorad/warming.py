"""What a start brings into memory: before the daemon is ready, and after it."""

from __future__ import annotations

import asyncio
import logging

from lorad.engine.async_engine import AsyncEngine
from lorad.engine.messages import GenerationRequest, SamplingParams
from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer
from lorad.registry.registry import Registry
from lorad.registry.warm_list import read_warm_list, write_warm_list
from lorad.server.traffic import Traffic

log = logging.getLogger(__name__)

_WARM_LIST_SECONDS = 30.0  # between two looks at what has been used


async def warm_up(engine: AsyncEngine, registry: Registry, tokenizer: Tokenizer) -> None:
    """Prove that the base model answers, and bring pinned adapters to the device."""
    prompt = tokenizer.encode("Hello") or [0]
    request = GenerationRequest("warm-up", tuple(prompt), SamplingParams(2, temperature=0.0))
    async for _ in engine.generate(request):
        pass
    for ref in registry.pinned():
        try:
            await engine.load_adapter(ref, pin=True)
        except LoradError as error:
            log.warning("pinned %s is not loaded: %s", ref, error.message)


async def keep_warm(engine: AsyncEngine, registry: Registry, traffic: Traffic, most: int) -> None:
    """Load what an earlier life used last, then keep the list of this one."""
    refs = await asyncio.to_thread(read_warm_list, registry.state, registry)
    traffic.remember(refs)
    for ref in refs[:most]:
        stats = engine.stats()
        if stats.free_pages * 2 < stats.total_pages:
            break
        try:
            await engine.load_adapter(ref)
        except LoradError as error:
            log.warning("%s is not loaded again: %s", ref, error.message)
    written = refs
    try:
        while True:
            await asyncio.sleep(_WARM_LIST_SECONDS)
            if (used := traffic.last_used()) != written:
                await asyncio.to_thread(write_warm_list, registry.state, used)
                written = used
    finally:
        write_warm_list(registry.state, traffic.last_used())
