"""Bodies of the generation routes: what they mean, and an error that names the bad field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.errors import ERROR_CODES, LoradError
from lorad.server.errors import error_body, error_response, public_error
from lorad.server.fields import parse_object
from lorad.server.limits import Limits
from lorad.server.prompts import answer_limit
from lorad.server.protocol import REFUSED, parse_chat, parse_completion

LIMITS = Limits(max_model_len=100, vocab_size=50, max_choices=8, max_messages=4)
USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "p", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def refusal(parse: Any, body: dict[str, Any]) -> LoradError:
    with pytest.raises(LoradError) as caught:
        parse(body, LIMITS)
    assert caught.value.code == "request.invalid"
    assert caught.value.details["param"] in caught.value.message
    return caught.value


# --- what the fields mean -----------------------------------------------------------------


def test_defaults() -> None:
    body = parse_completion(completion(), LIMITS)
    options, sampling = body.options, body.options.sampling
    assert (options.model, options.n, options.stream, options.include_usage) == ("m", 1, False, 0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.seed, sampling.stop, sampling.logprobs, sampling.logit_bias) == (
        None,
        (),
        None,
        (),
    )
    assert (body.echo, options.ignored, options.max_tokens) == (False, (), None)


def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"4": -100, "49": 1.5},
    }
    for body in (
        parse_completion(completion(**fields, logprobs=2), LIMITS),
        parse_chat(chat(**fields, logprobs=True, top_logprobs=2), LIMITS),
    ):
        sampling = body.options.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 7)
        assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 11, ("a", "b"))
        assert (sampling.stop_token_ids, sampling.ignore_eos) == ((3,), True)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
        assert (sampling.repetition_penalty, sampling.logprobs) == (1.5, 2)
        assert sampling.logit_bias == ((4, -100.0), (49, 1.5))
        assert body.options.ignored == ()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert parse_completion(completion(prompt=prompt), LIMITS).prompts == expected


def test_null_means_absent_and_minus_one_means_all_for_top_k() -> None:
    nulls = dict.fromkeys(["n", "stop", "seed", "logit_bias", "stream", "tools", "max_tokens"])
    assert parse_completion(completion(**nulls), LIMITS) == parse_completion(completion(), LIMITS)
    assert parse_completion(completion(top_k=-1), LIMITS).options.sampling.top_k == 0


def test_a_negative_seed_is_a_seed() -> None:
    sampling = parse_completion(completion(seed=-1), LIMITS).options.sampling
    assert sampling.seed == 2**63 - 1


def test_the_newer_name_of_max_tokens_wins() -> None:
    both = parse_chat(chat(max_tokens=5, max_completion_tokens=7), LIMITS)
    older = parse_chat(chat(max_tokens=5), LIMITS)
    assert (both.options.max_tokens, older.options.max_tokens) == (7, 5)


def test_text_parts_are_joined_by_lines_and_roles_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts, "name": "x", "tool_calls": None, "audio": None},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "refusal": None},
        {"role": "user", "content": []},
    ]
    assert parse_chat(chat(messages=messages), LIMITS).messages == (
        {"role": "developer", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": "c", "reasoning_content": "r"},
        {"role": "user", "content": ""},
    )


def test_fields_without_effect_are_listed() -> None:
    body = chat(
        user="u",
        metadata={"a": 1},
        service_tier="auto",
        made_up=0,
        absent=None,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    options = parse_chat(body, LIMITS).options
    assert options.include_usage
    assert options.user == "u"  # which a canary looks at
    assert sorted(options.ignored) == [
        "made_up",
        "metadata",
        "service_tier",
        "stream_options.include_obfuscation",
    ]


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "none", "functions": []},
        {"response_format": {"type": "text"}},
        {"suffix": "", "best_of": 1},
        {"modalities": ["text"], "chat_template_kwargs": {}},
        {"use_beam_search": False, "min_tokens": 0, "bad_words": [], "skip_special_tokens": True},
    ],
)
def test_unserved_fields_that_ask_for_nothing_are_accepted(harmless: dict[str, Any]) -> None:
    assert parse_chat(chat(**harmless), LIMITS).options.ignored == ()


# --- what is refused, by name -------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None),
        ("model", 7),
        ("model", "\ud800"),
        ("n", 0),
        ("n", 9),
        ("n", 10**6),
        ("n", True),
        ("n", 1.0),
        ("best_of", 2),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 101),
        ("max_tokens", 2**40),
        ("max_tokens", "5"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 51),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("stop[1]", ["a", ""]),
        ("stop[0]", [None]),
        ("stop_token_ids[0]", [50]),
        ("logit_bias", [1]),
        ("logit_bias", {"50": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("logit_bias.1", {"1": 101}),
        ("logit_bias.1", {"1": None}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("chat_template", "{{ x }}"),
        ("chat_template_kwargs", {"a": 1}),
        ("cache_salt", "x"),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
        ("min_tokens", 5),
        ("prompt_logprobs", 0),
        ("continue_final_message", True),
        ("skip_special_tokens", False),
    ],
)
def test_bad_values_are_named_on_both_routes(field: str, value: Any) -> None:
    name = field.partition("[")[0].partition(".")[0]
    for parse, body in ((parse_completion, completion()), (parse_chat, chat())):
        assert refusal(parse, {**body, name: value}).details["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", {}),
        ("prompt", "\udfff"),
        ("prompt[1]", ["a", 5]),
        ("prompt[1]", [1, "a"]),
        ("prompt[1]", [1, True]),
        ("prompt[0]", [50]),
        ("prompt[0]", [None]),
        ("prompt[1][0]", [[1], [-1]]),
        ("prompt[0][0]", [[[1]]]),
        ("prompt", ["x"] * 9),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", "yes"),
        ("suffix", "end"),
    ],
)
def test_bad_completion_fields(field: str, value: Any) -> None:
    name = field.partition("[")[0]
    assert refusal(parse_completion, completion(**{name: value})).details["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [USER] * 5),
        ("messages[0]", ["hi"]),
        ("messages[0].role", [{"content": "x"}]),
        ("messages[0].role", [{"role": {}, "content": "x"}]),
        ("messages[1].role", [USER, {"role": "tool", "content": "x"}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "user", "content": 5}]),
        ("messages[0].content", [{"role": "user", "content": "\ud800"}]),
        ("messages[0].content[0]", [{"role": "user", "content": ["x"]}]),
        ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
        (
            "messages[0].content[1].type",
            [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}],
        ),
        ("messages[0].tool_calls", [{"role": "assistant", "content": "", "tool_calls": [{}]}]),
        ("messages[0].name", [{**USER, "name": {}}]),
        ("logprobs", 1),
    ],
)
def test_bad_chat_fields(field: str, value: Any) -> None:
    name = field.partition("[")[0]
    assert refusal(parse_chat, chat(**{name: value})).details["param"] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_fields_that_only_chat_has(fields: dict[str, Any], param: str) -> None:
    assert refusal(parse_chat, chat(**fields)).details["param"] == param


def test_prompts_times_n_is_bounded() -> None:
    parse_completion(completion(prompt=["a"] * 4, n=2), LIMITS)
    assert refusal(parse_completion, completion(prompt=["a"] * 5, n=2)).details["param"] == "n"


def test_echo_with_logprobs_is_refused_rather_than_half_answered() -> None:
    body = completion(echo=True, logprobs=0)
    assert refusal(parse_completion, body).details["param"] == "logprobs"


def test_a_long_token_prompt_is_refused_by_its_length_alone() -> None:
    with pytest.raises(LoradError, match="100 tokens, but the prompt has 1000000") as caught:
        parse_completion(completion(prompt=[10**9] * 10**6), LIMITS)
    assert caught.value.code == "request.context_length"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [
    *("model", "prompt", "messages", "n", "best_of", "echo", "logprobs", "top_logprobs"),
    *("stop", "seed", "logit_bias", "stream", "stream_options", "max_tokens", "tools", "suffix"),
]


@given(fields=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_body_is_either_accepted_or_refused_cleanly(fields: dict[str, Any]) -> None:
    for parse, body in ((parse_completion, completion()), (parse_chat, chat())):
        try:
            parse({**body, **fields}, LIMITS)
        except LoradError as error:
            assert error_response(error).status_code == 400


def test_every_refused_field_is_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs/openai-api.md").read_text("utf-8")
    assert len(REFUSED) > 20
    assert [name for name in REFUSED if f"`{name}" not in text] == []


# --- the JSON itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'"x"', "JSON object"),
        (b"null", "JSON object"),
        (b'{"a": 1, "b": 2, "a": 3}', '"a": is given twice'),
        (b'{"a": {"\\ud800": 1, "\\ud800": 2}}', "given twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "UTF-8 at byte 7"),
        (b'{"a": ' + b"[" * 100_000, "nested"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": 1} trailing', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
    ],
)
def test_malformed_json(raw: bytes, words: str) -> None:
    with pytest.raises(LoradError, match=words) as caught:
        parse_object(raw)
    assert caught.value.code == "request.invalid"
    json.dumps(error_body(caught.value)).encode()
    assert error_response(caught.value).status_code == 400


def test_numbers_too_large_for_a_float_are_refused_where_they_are_used() -> None:
    body = parse_object(b'{"model": "m", "prompt": "p", "temperature": 1e999}')
    assert refusal(parse_completion, body).details["param"] == "temperature"


# --- how many tokens the answer may have --------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "prompt", "chat_route", "expected"),
    [
        (None, 10, False, 16),
        (None, 90, False, 10),
        (None, 10, True, 90),
        (5, 10, False, 5),
        (90, 10, True, 90),
    ],
)
def test_answer_limit(asked: int | None, prompt: int, chat_route: bool, expected: int) -> None:
    options = parse_completion(completion(max_tokens=asked), LIMITS).options
    assert answer_limit(options, prompt, LIMITS, chat=chat_route) == expected


@pytest.mark.parametrize(("asked", "prompt"), [(None, 100), (None, 5000), (91, 10), (1, 100)])
def test_what_does_not_fit_is_refused_with_the_numbers(asked: int | None, prompt: int) -> None:
    options = parse_completion(completion(max_tokens=asked), LIMITS).options
    with pytest.raises(LoradError) as caught:
        answer_limit(options, prompt, LIMITS, chat=False)
    public = public_error(caught.value)
    assert (public.status, public.code) == (400, "context_length_exceeded")
    for number in (100, prompt, asked):
        assert number is None or str(number) in caught.value.message


# --- errors on the public port ------------------------------------------------------------


@pytest.mark.parametrize("code", ERROR_CODES)
def test_no_error_is_ever_a_conflict_or_a_timeout_lock(code: str) -> None:
    """OpenAI's clients repeat a request that gets 408 or 409, as if someone held a lock."""
    response = error_response(LoradError(code, "x"))
    assert response.status_code in (400, 401, 403, 404, 405, 413, 429, 500, 503, 504)
    if response.status_code in (429, 503):
        assert int(response.headers["retry-after-ms"]) > 0
        assert 0 < int(response.headers["retry-after"]) <= 120


@pytest.mark.parametrize(
    ("code", "status", "public_code"),
    [
        ("adapter.not_found", 404, "model_not_found"),
        ("version.not_found", 404, "model_not_found"),
        ("name.invalid", 404, "model_not_found"),
        ("queue.full", 429, "rate_limit_exceeded"),
        ("daemon.stopping", 503, "daemon.stopping"),
        ("memory.no_capacity", 503, "memory.no_capacity"),
        ("version.failed", 500, "version.failed"),
        ("adapter.load_failed", 500, "adapter.load_failed"),
        ("auth.invalid_key", 401, "invalid_api_key"),
        ("operation.timeout", 504, "operation.timeout"),
    ],
)
def test_public_words_of_an_error(code: str, status: int, public_code: str) -> None:
    error = LoradError(code, "what", hint="do this", details={"param": "model"})
    assert error_response(error).status_code == status
    body = error_body(error)["error"]
    assert (body["code"], body["param"]) == (public_code, "model")
    assert body["message"] == "what (do this)"


def test_the_engine_says_when_to_come_back() -> None:
    error = LoradError("queue.full", "busy", details={"retry_after_ms": 2300})
    headers = error_response(error).headers
    assert (headers["retry-after-ms"], headers["retry-after"]) == ("2300", "3")


def test_a_failure_that_would_repeat_is_not_retried() -> None:
    assert error_response(LoradError("version.failed", "x")).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(LoradError("engine.failed", "x")).headers
