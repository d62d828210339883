"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorad.engine.messages import RequestOutput
from lorad.model.tokenizer import Tokenizer
from lorad.server.answer import Answer, Job, new_id, respond
from lorad.server.body import read_object
from lorad.server.logprobs import CompletionLogprobs
from lorad.server.prompt_fields import Prompt
from lorad.server.prompts import answer_limit, prompt_tokens
from lorad.server.protocol import CompletionBody, parse_completion
from lorad.server.request_context import tell_adapter, tell_ignored
from lorad.server.serving import caller, serving_of


async def completions(request: Request) -> Response:
    serving = serving_of(request)
    tenant = serving.api_keys.tenant(request)
    body = parse_completion(
        await read_object(request, serving.limits.max_body_bytes), serving.limits
    )
    tell_ignored(request, body.options.ignored)
    adapter = serving.resolve(body.options.model, tenant, caller(request, body.options.user))
    tell_adapter(request, adapter)
    prompts = await prompt_tokens(serving, body.prompts)
    job = Job(
        id=new_id("cmpl"),
        options=body.options,
        adapter=adapter,
        tenant=tenant,
        prompts=tuple(prompts),
        max_tokens=tuple(
            answer_limit(body.options, len(ids), serving.limits, chat=False) for ids in prompts
        ),
    )
    return await respond(request, serving, job, CompletionForm(serving.tokenizer, body))


class CompletionForm:
    """The JSON of one request's choices. With `echo` each answer begins with its prompt."""

    object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody) -> None:
        self._wanted = body.options.sampling.logprobs is not None
        answers = len(body.prompts) * body.options.n
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in range(answers)]
        self._echoed = _echoed(tokenizer, body.prompts, body.options.n) if body.echo else None

    def opening(self, index: int) -> dict[str, Any] | None:
        if self._echoed is None:
            return None
        return {"text": self._echoed[index], "logprobs": None}

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        wanted = self._wanted and output.logprobs
        logprobs = self._logprobs[index].of(output.logprobs) if wanted else None
        return {"text": output.text, "logprobs": logprobs}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs = self._logprobs[index].of(answer.logprobs) if self._wanted else None
        prompt = "" if self._echoed is None else self._echoed[index]
        return {"text": prompt + answer.text, "logprobs": logprobs}


def _echoed(tokenizer: Tokenizer, prompts: Sequence[Prompt], n: int) -> list[str]:
    texts = [
        prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
        for prompt in prompts
    ]
    return [text for text in texts for _ in range(n)]
