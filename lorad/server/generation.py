"""Runs the sequences of one HTTP request and merges what they produce."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from lorad.engine.messages import GenerationRequest, RequestOutput
from lorad.errors import LoradError
from lorad.server.serving import GeneratesText

Indexed = tuple[int, RequestOutput]


async def generate_all(
    engine: GeneratesText, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Indexed, None]:
    """(index, output) of all requests as they come; each ends with a `finish_reason`.

    One failure ends all of them. Closing this generator aborts whatever still runs.
    """
    if len(requests) == 1:
        async with aclosing(_outputs(engine, requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    async with _running(engine, requests) as queue:
        unfinished = len(requests)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item[1].finish_reason is not None
            yield item


@asynccontextmanager
async def _running(
    engine: GeneratesText, requests: Sequence[GenerationRequest]
) -> AsyncIterator[asyncio.Queue[Indexed | Exception]]:
    """One task per request, all into one queue that holds them up when nobody reads."""
    queue: asyncio.Queue[Indexed | Exception] = asyncio.Queue(maxsize=len(requests))

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(_outputs(engine, request)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        yield queue
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _outputs(
    engine: GeneratesText, request: GenerationRequest
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs; an end that is not the text's own end becomes an error."""
    outputs = engine.generate(request)
    finish = None
    try:
        async for output in outputs:
            finish = output.finish_reason
            if finish in ("abort", "error"):
                break
            yield output
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
    if finish not in ("stop", "length"):
        raise LoradError("engine.failed", "the engine ended this answer before it was complete")
