"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorad.engine.messages import RequestOutput
from lorad.model.tokenizer import Tokenizer
from lorad.server.answer import Answer, Job, new_id, respond
from lorad.server.body import read_object
from lorad.server.logprobs import chat_logprobs
from lorad.server.prompts import answer_limit, chat_tokens
from lorad.server.protocol import parse_chat
from lorad.server.request_context import tell_adapter, tell_ignored
from lorad.server.serving import caller, serving_of


async def chat_completions(request: Request) -> Response:
    serving = serving_of(request)
    tenant = serving.api_keys.tenant(request)
    body = parse_chat(await read_object(request, serving.limits.max_body_bytes), serving.limits)
    tell_ignored(request, body.options.ignored)
    adapter = serving.resolve(body.options.model, tenant, caller(request, body.options.user))
    tell_adapter(request, adapter)
    prompt = await chat_tokens(serving, body.messages)
    job = Job(
        id=new_id("chatcmpl"),
        options=body.options,
        adapter=adapter,
        tenant=tenant,
        prompts=(prompt,),
        max_tokens=(answer_limit(body.options, len(prompt), serving.limits, chat=True),),
    )
    wanted = body.options.sampling.logprobs is not None
    return await respond(request, serving, job, ChatForm(serving.tokenizer, wanted))


class ChatForm:
    """The JSON of one request's choices; in a stream the role comes first, on its own."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._wanted = wants_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"content": output.text} if output.text else {}
        wanted = self._wanted and output.logprobs
        logprobs = chat_logprobs(self._tokenizer, output.logprobs) if wanted else None
        return {"delta": delta, "logprobs": logprobs}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text}
        logprobs = chat_logprobs(self._tokenizer, answer.logprobs) if self._wanted else None
        return {"message": message, "logprobs": logprobs}
