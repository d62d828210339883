"""Bounds on one request to the public port."""

from __future__ import annotations

from dataclasses import dataclass

from lorad.errors import LoradError


@dataclass(frozen=True, slots=True)
class Limits:
    """The first two are the model's, the others protect the daemon from a single request."""

    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int  # rows of the embedding: every token id is below it
    max_body_bytes: int = 8 << 20
    max_choices: int = 128  # prompts x n
    max_messages: int = 4096
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_logprobs: int = 20


def context_error(limits: Limits, prompt_tokens: int, asked: int | None, param: str) -> LoradError:
    """The prompt, or the prompt with the `asked` tokens of its answer, passes the context."""
    more = f" and the answer may have {asked}" if asked is not None else ""
    return LoradError(
        "request.context_length",
        f"the context length is {limits.max_model_len} tokens, but the prompt has"
        f" {prompt_tokens} tokens{more}",
        hint="shorten the prompt or ask for fewer tokens",
        details={
            "param": param,
            "prompt_tokens": prompt_tokens,
            "max_model_len": limits.max_model_len,
        },
    )
