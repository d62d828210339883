"""From a checked body to the response: one path for completions and chat, streamed or whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorad.adapter_ref import AdapterRef
from lorad.engine.messages import GenerationRequest, RequestOutput, TokenLogprob
from lorad.server.disconnect import until_disconnect
from lorad.server.generation import generate_all
from lorad.server.protocol import Options
from lorad.server.request_context import adapter_label
from lorad.server.sampling_fields import choice_seed
from lorad.server.serving import Serving
from lorad.server.sse import EventStream

_CLIENT_GONE = 499  # nobody reads it; it is for the log


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine. `prompts` and `max_tokens` go together."""

    id: str  # "cmpl-..." or "chatcmpl-..."
    options: Options
    adapter: AdapterRef | None
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    tenant: str | None
    created: int = field(default_factory=lambda: int(time.time()))

    def requests(self) -> list[GenerationRequest]:
        """n requests per prompt, in the order of the choices' indexes."""
        n, sampling = self.options.n, self.options.sampling
        return [
            GenerationRequest(
                request_id=f"{self.id}-{place * n + choice}",
                prompt_token_ids=prompt,
                sampling=replace(
                    sampling, max_tokens=limit, seed=choice_seed(sampling.seed, choice)
                ),
                adapter=self.adapter,
                # Never from the client: whoever shares a cache can time what is in it.
                cache_salt=self.tenant or "",
            )
            for place, (prompt, limit) in enumerate(zip(self.prompts, self.max_tokens, strict=True))
            for choice in range(n)
        ]

    def usage(self, completion_tokens: list[int], cached_tokens: list[int]) -> dict[str, Any]:
        """From the numbers of each answer. A prompt counts once, however many answers it has."""
        n, prompt_tokens = self.options.n, sum(map(len, self.prompts))
        # Computed for one of its answers is computed.
        cached = sum(min(cached_tokens[i : i + n]) for i in range(0, len(cached_tokens), n))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(completion_tokens),
            "total_tokens": prompt_tokens + sum(completion_tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass
class Answer:
    """One choice, put together from the engine's outputs."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.logprobs += output.logprobs
        self.completion_tokens = output.completion_tokens
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


class Form(Protocol):
    """The JSON of one route. Choices come without `index`, `finish_reason`, `stop_reason`."""

    object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice of one answer, before any of its tokens."""
        ...

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any]: ...

    def whole(self, index: int, answer: Answer) -> dict[str, Any]: ...


async def respond(request: Request, serving: Serving, job: Job, form: Form) -> Response:
    """Runs the job; errors of the engine before the first token are raised."""
    if job.options.stream:
        return EventStream(_chunks(serving, job, form))
    body = await until_disconnect(request.receive, _whole(serving, job, form))
    return Response(status_code=_CLIENT_GONE) if body is None else JSONResponse(body)


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": kind,
        "created": job.created,
        "model": job.options.model,
        "system_fingerprint": adapter_label(job.adapter),
    }


async def _whole(serving: Serving, job: Job, form: Form) -> dict[str, Any]:
    requests = job.requests()
    answers = [Answer() for _ in requests]
    async with aclosing(generate_all(serving.engine, requests)) as outputs:
        async for index, output in outputs:
            answers[index].add(output)
    choices = [_choice(i, form.whole(i, answer), answer) for i, answer in enumerate(answers)]
    usage = job.usage([a.completion_tokens for a in answers], [a.cached_tokens for a in answers])
    return {**_head(job, form.object), "choices": choices, "usage": usage}


def _choice(index: int, content: dict[str, Any], end: Answer | RequestOutput) -> dict[str, Any]:
    return {
        "index": index,
        **content,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
    }


async def _chunks(serving: Serving, job: Job, form: Form) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream. `usage` is in them only when the client asked for it."""
    requests = job.requests()
    head = _head(job, form.chunk_object)
    usage = {"usage": None} if job.options.include_usage else {}
    counts, cached = [0] * len(requests), [0] * len(requests)
    opened: set[int] = set()
    async with aclosing(generate_all(serving.engine, requests)) as outputs:
        async for index, output in outputs:
            if index not in opened and (opening := form.opening(index)) is not None:
                choice = {"index": index, **opening, "finish_reason": None}
                yield {**head, "choices": [choice], **usage}
            opened.add(index)
            counts[index], cached[index] = output.completion_tokens, output.cached_tokens
            if output.text or output.logprobs or output.finish_reason:
                choice = _choice(index, form.chunk(index, output), output)
                yield {**head, "choices": [choice], **usage}
    if job.options.include_usage:
        yield {**head, "choices": [], "usage": job.usage(counts, cached)}
