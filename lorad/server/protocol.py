"""What the two generation routes accept: checked bodies, limits, and refusals by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lorad.engine.messages import SamplingParams
from lorad.server.fields import Fields, integer_of, invalid, object_of, text_of
from lorad.server.limits import Limits
from lorad.server.prompt_fields import Prompt, read_messages, read_prompts
from lorad.server.sampling_fields import read_sampling

_USER_CHARS = 512


@dataclass(frozen=True, slots=True)
class Options:
    """What completions and chat have in common."""

    model: str
    user: str | None  # the caller's own name for whom it asks; only a canary looks at it
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    sampling: SamplingParams  # its max_tokens depends on the prompt and is set later
    ignored: tuple[str, ...]  # fields without effect, told in a header


@dataclass(frozen=True, slots=True)
class CompletionBody:
    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool


@dataclass(frozen=True, slots=True)
class ChatBody:
    options: Options
    messages: tuple[dict[str, Any], ...]


def parse_completion(body: dict[str, Any], limits: Limits) -> CompletionBody:
    """The body of POST /v1/completions; raises `request.invalid` naming the field."""
    fields = Fields(body)
    model = fields.text("model")
    prompts = read_prompts(fields.raw("prompt"), limits)
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", 0, limits.max_logprobs)
    if echo and logprobs is not None:
        raise invalid("logprobs", "log-probabilities of the prompt (echo) are not computed")
    max_tokens = fields.integer("max_tokens", 1, limits.max_model_len)
    options = _options(fields, limits, model, logprobs, max_tokens)
    if len(prompts) * options.n > limits.max_choices:
        raise invalid(
            "n", f"{len(prompts)} prompts x {options.n} are more than {limits.max_choices} answers"
        )
    return CompletionBody(options, prompts, echo)


def parse_chat(body: dict[str, Any], limits: Limits) -> ChatBody:
    """The body of POST /v1/chat/completions; raises `request.invalid` naming the field."""
    fields = Fields(body)
    model = fields.text("model")
    messages = read_messages(fields.raw("messages"), limits)
    logprobs = _chat_logprobs(fields, limits)
    newer = fields.integer("max_completion_tokens", 1, limits.max_model_len)
    older = fields.integer("max_tokens", 1, limits.max_model_len)
    max_tokens = older if newer is None else newer
    return ChatBody(_options(fields, limits, model, logprobs, max_tokens), messages)


def _chat_logprobs(fields: Fields, limits: Limits) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.raw("top_logprobs")
    if not wanted:
        if top:
            raise invalid("top_logprobs", "is only for requests with logprobs: true")
        return None
    return 0 if top is None else integer_of(top, "top_logprobs", 0, limits.max_logprobs)


def _options(
    fields: Fields, limits: Limits, model: str, logprobs: int | None, max_tokens: int | None
) -> Options:
    """The common fields. Comes last: a field that nobody has read by then has no effect."""
    _refuse_unserved(fields)
    stream = fields.boolean("stream")
    include_usage, unread = _stream_options(fields.raw("stream_options"), stream)
    n = fields.integer("n", 1, limits.max_choices) or 1
    best_of = fields.integer("best_of", 1, limits.max_choices)
    if best_of is not None and best_of > n:
        raise invalid("best_of", f"is {best_of}, more than n ({n}): all answers are returned")
    sampling = read_sampling(fields, limits, logprobs)
    user = _user(fields)
    ignored = (*fields.unknown(), *unread)
    return Options(model, user, n, stream, include_usage, max_tokens, sampling, ignored)


def _user(fields: Fields) -> str | None:
    """`user`, or OpenAI's newer name for it."""
    for name in ("user", "safety_identifier"):
        value = fields.raw(name)
        if value is not None:
            return text_of(value, name)[:_USER_CHARS]
    return None


def _stream_options(value: Any, stream: bool) -> tuple[bool, list[str]]:
    """(include_usage, members without effect)"""
    if value is None:
        return False, []
    if not stream:
        raise invalid("stream_options", "is only for requests with stream: true")
    fields = Fields(object_of(value, "stream_options"), "stream_options.")
    return fields.boolean("include_usage"), list(fields.unknown())


_OFF: tuple[Any, ...] = (False, 0, [], {})
_OWN_TEMPLATE = "the chat template is the model's own and cannot come with a request"
_NO_TOOLS = "tool calls are not supported"
_NO_FORMAT = "constrained decoding is not supported"

# Fields that would change the answer but are not served: to pass over them in silence would be
# wrong. With each: the values that ask for nothing, and why any other is refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat_template": ((), _OWN_TEMPLATE),
    "chat_template_kwargs": (({},), _OWN_TEMPLATE),
    "cache_salt": ((), "who may share a cache is for the server to decide"),
    "tools": (([],), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), _NO_FORMAT),
    "structured_outputs": (({},), _NO_FORMAT),
    "guided_json": ((), _NO_FORMAT),
    "guided_regex": ((), _NO_FORMAT),
    "guided_choice": ((), _NO_FORMAT),
    "guided_grammar": ((), _NO_FORMAT),
    "modalities": (([], ["text"]), "only text is produced"),
    "audio": ((), "only text is produced"),
    "web_search_options": ((), "there is no web search"),
    "suffix": (("",), "a text can only be continued, not filled in"),
    "use_beam_search": (_OFF, "beam search is not supported"),
    "min_tokens": (_OFF, "a least number of tokens is not supported"),
    "bad_words": (_OFF, "use logit_bias with token ids"),
    "allowed_token_ids": (_OFF, "use logit_bias with token ids"),
    "prompt_logprobs": ((False,), "log-probabilities of the prompt are not computed"),
    "truncate_prompt_tokens": ((), "a prompt is used whole or refused"),
    "continue_final_message": (_OFF, "use /v1/completions to continue a text"),
    "include_stop_str_in_output": (_OFF, "the text ends before the stop string"),
    "skip_special_tokens": ((True,), "special tokens are never part of the text"),
}


def _refuse_unserved(fields: Fields) -> None:
    for name, (neutral, why) in REFUSED.items():
        value = fields.raw(name)
        if value is not None and not any(
            type(value) is type(harmless) and value == harmless for harmless in neutral
        ):
            raise invalid(name, why)
