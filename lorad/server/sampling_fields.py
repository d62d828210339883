"""The fields of a request body that say how tokens are chosen and when to stop."""

from __future__ import annotations

from typing import Any

from lorad.engine.messages import SamplingParams
from lorad.server.fields import (
    Fields,
    integer_of,
    invalid,
    list_of,
    number_of,
    object_of,
    shown,
    text_of,
)
from lorad.server.limits import Limits

_SEEDS = 2**63


def read_sampling(fields: Fields, limits: Limits, logprobs: int | None) -> SamplingParams:
    """SamplingParams with max_tokens 0, which the caller sets once the prompt is known."""
    return SamplingParams(
        max_tokens=0,
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=_top_p(fields),
        top_k=max(0, fields.integer("top_k", -1, limits.vocab_size) or 0),
        min_p=fields.number("min_p", 0.0, 0, 1),
        seed=_seed(fields),
        stop=_stop(fields.raw("stop"), limits),
        stop_token_ids=_stop_token_ids(fields.raw("stop_token_ids"), limits),
        ignore_eos=fields.boolean("ignore_eos"),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        logit_bias=_logit_bias(fields.raw("logit_bias"), limits),
        logprobs=logprobs,
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of n answers: each its own, the first the one that was given."""
    return None if seed is None else (seed + choice) % _SEEDS


def _top_p(fields: Fields) -> float:
    value = fields.number("top_p", 1.0, 0, 1)
    if value == 0:
        raise invalid("top_p", "must be above 0; temperature 0 asks for the likeliest token")
    return value


def _seed(fields: Fields) -> int | None:
    value = fields.integer("seed", -_SEEDS, _SEEDS - 1)
    return None if value is None else value % _SEEDS


def _stop(value: Any, limits: Limits) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (_stop_string(value, "stop", limits),)
    entries = list_of(value, "stop", limits.max_stop)
    return tuple(_stop_string(text, f"stop[{i}]", limits) for i, text in enumerate(entries))


def _stop_string(value: Any, param: str, limits: Limits) -> str:
    text = text_of(value, param)
    if not 0 < len(text) <= limits.max_stop_chars:
        raise invalid(param, f"must have 1 to {limits.max_stop_chars} characters, not {len(text)}")
    return text


def _stop_token_ids(value: Any, limits: Limits) -> tuple[int, ...]:
    if value is None:
        return ()
    entries = list_of(value, "stop_token_ids", limits.max_stop)
    return tuple(
        integer_of(token, f"stop_token_ids[{i}]", 0, limits.vocab_size - 1)
        for i, token in enumerate(entries)
    )


def _logit_bias(value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    entries = object_of(value, "logit_bias")
    if len(entries) > limits.max_logit_bias:
        raise invalid(
            "logit_bias", f"has {len(entries)} entries, more than {limits.max_logit_bias}"
        )
    return tuple(
        (_token_key(key, limits), number_of(bias, f"logit_bias.{key[:20]}", -100, 100))
        for key, bias in entries.items()
    )


def _token_key(key: str, limits: Limits) -> int:
    """A member name is a token id in plain decimal digits."""
    plain = key.isascii() and key.isdigit() and len(key) <= 10
    if not plain or int(key) >= limits.vocab_size:
        raise invalid(
            "logit_bias", f"{shown(key)} is not a token id from 0 to {limits.vocab_size - 1}"
        )
    return int(key)
