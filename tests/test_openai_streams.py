"""Streamed answers of the public port, event by event and against whole ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from openai_site import BASE, HELLO, Site
from openai_site import module_site as module_site
from openai_site import site as site


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 5},
        {"stop": ["|H"], "max_tokens": 50},
        {"max_tokens": 13},
        {"max_tokens": 3, "n": 2},
    ],
)
def test_streamed_and_whole_answers_are_the_same(site: Site, fields: dict[str, Any]) -> None:
    client = site.client()
    fields = {"max_tokens": 99, **fields}
    whole = client.completions.create(model="poet", prompt="Hi", **fields)
    stream = client.completions.create(model="poet", prompt="Hi", stream=True, **fields)
    texts, ends = [""] * len(whole.choices), {}
    for chunk in stream:
        (choice,) = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_chat_stream_event_by_event(site: Site) -> None:
    body = {"model": "poet", "messages": HELLO, "stream": True, "max_tokens": 2}
    response = site.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-lorad-adapter"] == "default/poet@v2"
    assert response.headers["x-request-id"]
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "d"},
        {"content": "e"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["model"] == "poet"
    assert not any("usage" in chunk or "error" in chunk for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_and_only_when_asked(site: Site) -> None:
    create = site.client().chat.completions.create
    chunks = list(
        create(  # type: ignore[call-overload]
            model=BASE,
            messages=HELLO,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=5,
        )
    )
    *parts, last = chunks
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in parts)
    assert last.choices == []
    prompt = len("<user>Hello\n<assistant>")
    assert last.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "total_tokens": prompt + 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    plain = create(model=BASE, messages=HELLO, stream=True)  # type: ignore[call-overload]
    assert all(chunk.choices for chunk in plain)


def test_streamed_logprobs_join_to_the_whole(site: Site) -> None:
    fields: dict[str, Any] = {"model": BASE, "prompt": "é", "logprobs": 1, "max_tokens": 99}
    whole = site.client().completions.create(**fields).choices[0].logprobs
    tokens, offsets = [], []
    for chunk in site.client().completions.create(stream=True, **fields):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            tokens += logprobs.tokens
            offsets += logprobs.text_offset
    assert whole and (tokens, offsets) == (whole.tokens, whole.text_offset)


def test_characters_are_never_cut_in_a_stream(site: Site) -> None:
    stream = site.client().completions.create(
        model=BASE, prompt="👩‍👩‍👧‍👦é", max_tokens=99, stream=True
    )
    assert all("\ufffd" not in chunk.choices[0].text for chunk in stream)


def test_many_streams_at_once_do_not_mix(site: Site) -> None:
    site.engine.delay = 0.001

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        model = ["poet", "sql", BASE, "acme/secret@v1"][number % 4]
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"number {number}"}],
            stream=True,
        )
        adapter = stream.response.headers["x-lorad-adapter"]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return text, f"{adapter}|None|<user>number {number}\n<assistant>🙂"

    async def everyone() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{site.url}/v1", api_key="x", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(40)))

    for text, expected in asyncio.run(everyone()):
        assert text == expected
