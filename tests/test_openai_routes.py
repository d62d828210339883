"""The routes of the public port, those it does not have, and its address."""

from __future__ import annotations

import time

import openai
import pytest

from lorad.errors import LoradError
from lorad.server.listener import public_listener
from openai_site import BASE, HELLO, Site, error_of, serve
from openai_site import module_site as module_site
from openai_site import site as site


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("GET", "/v1/adapters"),
        ("GET", "/v1/adapters/poet"),
        ("POST", "/v1/adapters/poet:promote"),
        ("GET", "/v1/status"),
        ("GET", "/v1/config"),
        ("POST", "/v1/uploads"),
        ("POST", "/tokenize"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
        ("GET", "/v1/models/"),
        ("GET", "/health/"),
    ],
)
def test_there_is_nothing_else_on_this_port(site: Site, method: str, path: str) -> None:
    response = site.http.request(method, path)
    assert response.status_code == 404
    assert error_of(response)["code"] in ("route.not_found", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("DELETE", "/v1/models/poet"), ("POST", "/v1/models")],
)
def test_a_wrong_method_is_405(site: Site, method: str, path: str) -> None:
    response = site.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert error_of(response)["code"] == "method_not_allowed"


def test_health_version_and_metrics(site: Site) -> None:
    assert site.get("/health").json() == {"status": "ok"}
    assert site.get("/version").json()["version"]
    metrics = site.get("/metrics")
    assert metrics.text == "lorad_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    site.trouble.append("the engine thread has ended")
    response = site.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "the engine thread has ended"


def test_a_clients_request_id_is_kept_when_it_is_plain(site: Site) -> None:
    def answered(given: str) -> str:
        return site.get("/health", headers={"x-request-id": given}).headers["x-request-id"]

    assert answered("trace-1.A_b") == "trace-1.A_b"
    assert answered("two words") != "two words"
    assert answered("x" * 65).startswith("req-")
    assert answered("") != answered("")


def test_an_answer_does_not_wait_for_an_acknowledgement(site: Site) -> None:
    """With Nagle's algorithm on, the body waits for the client's delayed ACK: 40 ms or more."""
    took = []
    for _ in range(20):
        start = time.perf_counter()
        site.get("/health")
        took.append(time.perf_counter() - start)
    assert min(took) < 0.03


@pytest.mark.parametrize(
    ("host", "port", "code"),
    [
        ("127.0.0.1", None, "socket.in_use"),
        ("192.0.2.1", 0, "config.invalid"),
        ("no such host", 0, "config.invalid"),
        ("127.0.0.1", 70000, "config.invalid"),
    ],
)
def test_an_address_that_cannot_be_served_is_named(host: str, port: int | None, code: str) -> None:
    with public_listener("127.0.0.1", 0) as taken:
        taken.listen()
        chosen = taken.getsockname()[1] if port is None else port
        with pytest.raises(LoradError, match=host) as caught:
            public_listener(host, chosen)
    assert caught.value.code == code


def test_a_model_without_a_chat_template_says_so() -> None:
    for bare in serve(chat_template=None, metrics_text=None):
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            bare.client().chat.completions.create(model=BASE, messages=HELLO)  # type: ignore[arg-type]
        assert "/v1/completions" in str(caught.value)
        assert bare.client().completions.create(model=BASE, prompt="x").choices
        assert bare.get("/metrics").status_code == 404
