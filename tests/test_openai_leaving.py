"""A client that leaves: what it asked for is aborted at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from lorad.engine.messages import GenerationRequest, SamplingParams
from lorad.server.generation import generate_all
from lorad.server.sse import EventStream
from openai_site import BASE, HELLO, EngineDouble, Site, wait_for
from openai_site import module_site as module_site
from openai_site import site as site


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_in_mid_stream_aborts(site: Site, n: int) -> None:
    site.engine.endless, site.engine.delay = True, 0.01
    body = {"model": BASE, "prompt": "x", "stream": True, "n": n, "max_tokens": 300}
    with httpx.stream("POST", f"{site.url}/v1/completions", json=body) as response:
        received = response.iter_bytes()
        next(received)
        wait_for(lambda: site.engine.running == n)
    wait_for(lambda: site.engine.running == 0)
    assert len(site.engine.aborted) == n


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_while_a_whole_answer_is_made_aborts(site: Site, n: int) -> None:
    site.engine.endless, site.engine.delay = True, 0.01
    body = {"model": BASE, "prompt": "x", "n": n, "max_tokens": 300}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{site.url}/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: site.engine.running == 0)
    assert len(site.engine.aborted) == n


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(site: Site, stream: bool) -> None:
    """A request that waits in the queue or for its adapter must not outlive its client."""
    site.engine.delay = 30
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{site.url}/v1/chat/completions",
            json={"model": BASE, "messages": HELLO, "stream": stream},
            timeout=0.2,
        )
    wait_for(lambda: site.engine.running == 0)
    assert len(site.engine.aborted) == 1


def test_the_sdk_closing_a_stream_aborts(site: Site) -> None:
    site.engine.endless, site.engine.delay = True, 0.01
    stream = site.client().completions.create(model=BASE, prompt="x", stream=True, max_tokens=300)
    next(iter(stream))
    stream.close()
    wait_for(lambda: site.engine.running == 0)
    assert len(site.engine.aborted) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_closing_ends_the_generation_at_once_not_when_it_is_collected(n: int) -> None:
    async def scenario() -> None:
        engine = EngineDouble(endless=True)
        sampling = SamplingParams(max_tokens=300)
        requests = [GenerationRequest(f"r{i}", (1, 2), sampling) for i in range(n)]
        outputs = generate_all(engine, requests)
        await anext(outputs)
        await outputs.aclose()
        assert engine.running == 0
        assert set(engine.aborted) == {f"r{i}" for i in range(n)}

    asyncio.run(scenario())


def test_a_reader_that_stalls_and_then_leaves_ends_the_stream() -> None:
    """The server is held up in sending, not in waiting for a token."""
    closed = []

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        try:
            while True:
                yield {"a": 1}
        finally:
            closed.append(True)

    async def scenario() -> None:
        stalled = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                stalled.set()
                await asyncio.Event().wait()

        async def receive() -> Message:
            await stalled.wait()
            return {"type": "http.disconnect"}

        await EventStream(chunks())({"type": "http"}, receive, send)
        assert closed == [True]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_an_answer_that_ended_is_not_aborted(site: Site) -> None:
    list(site.client().completions.create(model=BASE, prompt="x", stream=True))
    site.client().completions.create(model=BASE, prompt="x", n=2)
    assert site.engine.running == 0 and site.engine.aborted == []
