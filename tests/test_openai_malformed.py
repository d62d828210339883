"""Malformed, too large and too long requests to the public port; fields that are ignored."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from lorad.model.chat_template import ChatTemplate
from lorad.model.tokenizer import Tokenizer
from openai_site import BASE, TEMPLATE, TOKENIZER, Site, error_of, serve
from openai_site import module_site as module_site
from openai_site import site as site


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", {}),
        (b"{", {}),
        (b"[1]", {}),
        (b'{"model": "\xff"}', {}),
        (b'{"model": "a", "model": "b"}', {}),
        (b"[" * 50_000, {}),
        (b'{"model": "a"}', {"content-type": "application/x-www-form-urlencoded"}),
        (b'{"model": "a"}', {"content-type": "text/plain"}),
    ],
)
def test_malformed_bodies(site: Site, path: str, content: bytes, headers: dict[str, str]) -> None:
    sent = {"content-type": "application/json", **headers}
    response = site.post(path, content=content, headers=sent)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_the_bad_field_is_in_param(site: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: must be a number") as caught:
        site.client().completions.create(model=BASE, prompt="x", temperature=9)
    assert caught.value.param == "temperature"


def test_the_content_type_may_be_absent_or_have_parameters(site: Site) -> None:
    content = json.dumps({"model": BASE, "prompt": "x"}).encode()
    for headers in ({}, {"content-type": "application/json; charset=utf-8"}):
        response = site.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [100_001, 5_000_000])
def test_a_body_over_the_limit_is_413(site: Site, size: int, chunked: bool) -> None:
    content = b'{"model": "' + b"x" * size
    sent: Any = iter([content[i : i + 65536] for i in range(0, size, 65536)])
    response = site.post("/v1/completions", content=sent if chunked else content)
    assert (response.status_code, error_of(response)["code"]) == (413, "request.too_large")


def test_a_prompt_over_the_context_is_refused_with_both_numbers(site: Site) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 500}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 482}]}),
        ("/v1/completions", {"prompt": "x" * 300, "max_tokens": 101}),
        ("/v1/completions", {"prompt": [1] * 500}),
    ):
        response = site.post(path, json={"model": BASE, **body})
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "400" in error["message"] and (
            "500" in error["message"] or "300" in error["message"]
        )
    assert site.engine.requests == []


def test_long_texts_are_tokenized_away_from_the_event_loop() -> None:
    """A prompt of a megabyte takes seconds, in which all other streams would stand still."""
    threads: dict[int, str] = {}

    class Watched(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            threads[len(text)] = threading.current_thread().name
            return super().encode(text, add_special_tokens=add_special_tokens)

    for other in serve(tokenizer=Watched(TOKENIZER.backend), chat_template=ChatTemplate(TEMPLATE)):
        loop = {thread.name for thread in threading.enumerate()}
        for size in (10, 90_000):
            other.post("/v1/completions", json={"model": BASE, "prompt": "x" * size})
            messages = [{"role": "user", "content": "x" * size}]
            other.post("/v1/chat/completions", json={"model": BASE, "messages": messages})
    short = {name for size, name in threads.items() if size < 1000}
    long = {name for size, name in threads.items() if size > 1000}
    assert len(threads) == 4
    assert short <= loop and not long & loop


def test_an_empty_prompt_has_nothing_to_continue(site: Site) -> None:
    response = site.post("/v1/completions", json={"model": BASE, "prompt": ""})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")


def test_ignored_fields_are_told_and_cannot_break_the_header(site: Site) -> None:
    body = {
        "model": BASE,
        "prompt": "x",
        "user": "u",
        "made_up": 1,
        "bad\r\nx-evil: 1": 1,
        "naïve": 1,
        **{f"f{i}": 0 for i in range(100)},
    }
    response = site.post("/v1/completions", json=body)
    told = response.headers["x-lorad-ignored-fields"].split(", ")
    assert told[:2] == ["made_up", "f0"] and len(told) == 32
    assert "x-evil" not in response.headers
    plain = site.post("/v1/completions", json={"model": BASE, "prompt": "x"})
    assert "x-lorad-ignored-fields" not in plain.headers
