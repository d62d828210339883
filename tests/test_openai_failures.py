"""What a client of the public port sees of the engine's errors, before and in mid-answer."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from lorad.errors import LoradError
from openai_site import BASE, Site, error_of, wait_for
from openai_site import module_site as module_site
from openai_site import site as site


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (
            LoradError("queue.full", "full", details={"retry_after_ms": 700}),
            openai.RateLimitError,
            429,
        ),
        (LoradError("daemon.stopping", "bye"), openai.InternalServerError, 503),
        (LoradError("adapter.load_failed", "gone"), openai.InternalServerError, 500),
        (LoradError("version.failed", "bytes altered"), openai.InternalServerError, 500),
    ],
)
def test_an_error_before_the_first_token_is_an_http_status(
    site: Site, stream: bool, n: int, error: LoradError, kind: Any, status: int
) -> None:
    site.engine.refuse = error
    with pytest.raises(kind, match=error.message) as caught:
        site.client().completions.create(model="poet", prompt="x", stream=stream, n=n)  # type: ignore[call-overload]
    headers = caught.value.response.headers
    assert caught.value.status_code == status
    assert headers["x-lorad-adapter"] == "default/poet@v2"
    if status == 429:
        assert (headers["retry-after-ms"], headers["retry-after"]) == ("700", "1")
    if status == 503:
        assert 0 < int(headers["retry-after"]) <= 120


def test_the_sdk_comes_back_after_a_full_queue(site: Site) -> None:
    site.engine.refuse = LoradError("queue.full", "full", details={"retry_after_ms": 300})
    timer = threading.Timer(0.1, lambda: setattr(site.engine, "refuse", None))
    timer.start()
    answer = site.client(retries=2).completions.create(model=BASE, prompt="x", max_tokens=4)
    assert answer.choices[0].text == "base"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (LoradError("engine.failed", "a kernel failed"), "engine.failed"),
        (RuntimeError("secret detail"), "daemon.error"),
    ],
)
def test_a_failure_in_mid_stream_is_an_event(
    site: Site, failure: Exception, code: str, n: int
) -> None:
    site.engine.fail_at = {4: failure}
    stream = site.client().completions.create(model=BASE, prompt="x", stream=True, n=n)
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            text += chunk.choices[0].text
    assert sorted(text) == sorted("base" * n)
    assert caught.value.code == code
    assert "secret" not in str(caught.value)
    wait_for(lambda: site.engine.running == 0)


@pytest.mark.parametrize(
    "failure", [LoradError("engine.failed", "a kernel failed"), RuntimeError("secret detail")]
)
def test_a_failure_in_mid_answer_is_a_500(site: Site, failure: Exception) -> None:
    site.engine.fail_at = {4: failure}
    response = site.post("/v1/completions", json={"model": BASE, "prompt": "x", "n": 2})
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert response.headers["x-lorad-adapter"] == "base"
    assert site.engine.running == 0


def test_an_answer_that_just_ends_is_an_error_not_a_short_answer(site: Site) -> None:
    site.engine.silent_end = True
    response = site.post("/v1/completions", json={"model": BASE, "prompt": "x"})
    assert (response.status_code, error_of(response)["code"]) == (500, "engine.failed")
    with pytest.raises(openai.APIError, match="complete"):
        list(site.client().completions.create(model=BASE, prompt="x", stream=True))
