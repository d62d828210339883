"""From text to token ids, away from the event loop when the text is long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from lorad.errors import LoradError
from lorad.server.fields import invalid
from lorad.server.limits import Limits, context_error
from lorad.server.prompt_fields import Prompt
from lorad.server.protocol import Options
from lorad.server.serving import Serving

T = TypeVar("T")

_LONG = 8192  # characters: more than this takes longer than the way to a worker thread
_DEFAULT_COMPLETION_TOKENS = 16


async def _away(size: int, work: Callable[[], T]) -> T:
    return work() if size < _LONG else await anyio.to_thread.run_sync(work)


async def prompt_tokens(serving: Serving, prompts: tuple[Prompt, ...]) -> list[tuple[int, ...]]:
    """Token ids of each prompt; the tokenizer adds a start token if the model wants one."""
    encode = serving.tokenizer.encode
    tokens = [
        await _away(len(prompt), partial(encode, prompt)) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    return [_checked(ids, serving.limits, "prompt") for ids in tokens]


async def chat_tokens(serving: Serving, messages: tuple[dict[str, Any], ...]) -> tuple[int, ...]:
    """Token ids of the conversation as the model's chat template writes it."""
    template = serving.chat_template
    if template is None:
        raise LoradError(
            "request.invalid",
            "this model has no chat template",
            hint="use /v1/completions, or add a chat_template.jinja to the model directory",
            details={"param": "messages"},
        )
    if not template.mentions("developer"):
        messages = tuple(map(_developer_as_system, messages))

    def work() -> list[int]:
        return serving.tokenizer.encode(template.render(messages), add_special_tokens=False)

    size = sum(len(message["content"]) for message in messages)
    return _checked(await _away(size, work), serving.limits, "messages")


def _developer_as_system(message: dict[str, Any]) -> dict[str, Any]:
    """`developer` is OpenAI's newer word for `system`; most templates know only the older."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _checked(ids: list[int] | tuple[int, ...], limits: Limits, param: str) -> tuple[int, ...]:
    if not ids:
        raise invalid(param, "has no tokens: the model needs at least one")
    if max(ids) >= limits.vocab_size:
        raise invalid(param, f"has token {max(ids)}, for which the model has no embedding")
    return tuple(ids)


def answer_limit(options: Options, prompt_size: int, limits: Limits, *, chat: bool) -> int:
    """How many tokens the answer may have; `request.context_length` when they do not fit.

    When the request does not say, a chat answer may fill the context, a completion has 16.
    """
    room, asked = limits.max_model_len - prompt_size, options.max_tokens
    if room < 1 or (asked is not None and asked > room):
        raise context_error(limits, prompt_size, asked, "messages" if chat else "prompt")
    if asked is not None:
        return asked
    return room if chat else min(room, _DEFAULT_COMPLETION_TOKENS)
