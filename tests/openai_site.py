"""The public port as its tests see it: a uvicorn server, the `openai` client, and raw requests.

The engine is a small deterministic double; everything else is what the daemon runs. A test file
imports the fixtures it uses under their own names (`site as site`), where pytest finds them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers

from lorad.adapter_ref import AdapterName, AdapterRef, split_version
from lorad.engine.detokenizer import Detokenizer
from lorad.engine.messages import GenerationRequest, RequestOutput, TokenLogprob
from lorad.errors import LoradError
from lorad.model.chat_template import ChatTemplate
from lorad.model.tokenizer import Tokenizer
from lorad.server.app import build_public_app
from lorad.server.limits import Limits
from lorad.server.listener import public_listener

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_LEN = 400
HELLO = [{"role": "user", "content": "Hello"}]


def bytes_tokenizer() -> Tokenizer:
    """One token per byte, so that every length in these tests can be counted."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids={256})


TOKENIZER = bytes_tokenizer()


@dataclass
class EngineDouble:
    """Answers "ADAPTER|SEED|PROMPT🙂" token by token, then ends, and keeps what it was asked."""

    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    delay: float = 0.0
    refuse: LoradError | None = None
    fail_at: dict[int, Exception] = field(default_factory=dict)
    silent_end: bool = False
    endless: bool = False

    def answer(self, request: GenerationRequest) -> list[int]:
        label = "base" if request.adapter is None else str(request.adapter)
        prompt = TOKENIZER.decode(request.prompt_token_ids)
        return TOKENIZER.encode(f"{label}|{request.sampling.seed}|{prompt}🙂")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self.running += 1
        finish = None
        try:
            detokenizer = Detokenizer(TOKENIZER, request.prompt_token_ids, request.sampling.stop)
            tokens = self.answer(request)
            count = 0
            while finish is None:
                await asyncio.sleep(self.delay)
                if count in self.fail_at:
                    raise self.fail_at[count]
                if self.silent_end and count == 3:
                    return
                over = count == len(tokens) and not self.endless
                token = 256 if over else tokens[count % len(tokens)]
                count += 1
                text = detokenizer.push(token)
                if detokenizer.stopped is not None or over:
                    finish = "stop"
                elif count == request.sampling.max_tokens:
                    finish = "length"
                if finish is not None and detokenizer.stopped is None:
                    text += detokenizer.flush()
                yield RequestOutput(
                    request_id=request.request_id,
                    text=text,
                    token_ids=(token,),
                    logprobs=self.logprobs(request, token),
                    prompt_tokens=len(request.prompt_token_ids),
                    completion_tokens=count,
                    finish_reason=finish,  # type: ignore[arg-type]
                    stop_reason=detokenizer.stopped,
                )
        finally:
            self.running -= 1
            if finish is None:
                self.aborted.append(request.request_id)

    @staticmethod
    def logprobs(request: GenerationRequest, token: int) -> tuple[TokenLogprob, ...]:
        wanted = request.sampling.logprobs
        if wanted is None:
            return ()
        others = tuple((i, -1.0 - i if i else float("-inf")) for i in range(wanted))
        return (TokenLogprob(token, -0.5, others),)


@dataclass(frozen=True)
class Live:
    name: AdapterName
    version: str
    created_at: float


class RegistryDouble:
    """Two shared adapters and one for each of two tenants; `v1` and `v2`, `v2` is live."""

    names = ("poet", "sql", "acme/secret", "globex/secret")

    def live_adapters(self) -> list[Live]:
        return [Live(AdapterName.parse(name), "v2", 1700000000.5) for name in self.names]

    def resolve(self, model: str, sticky: str | None = None) -> AdapterRef:
        name, version = split_version(model)
        if str(name) not in self.names:
            raise LoradError("adapter.not_found", f"there is no adapter {name}")
        if version not in (None, "v1", "v2"):
            raise LoradError("version.not_found", f"{name} has no version {version}")
        return AdapterRef(name, version or "v2", "sha256:" + "0" * 64)


@dataclass(eq=False)
class Site:
    """A running server: its address, its engine, and what /health is to say."""

    url: str
    engine: EngineDouble
    trouble: list[str]

    @cache  # noqa: B019 (a client costs 50 ms; there are three of these sites)
    def client(self, key: str = "none", retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, **kwargs)


def app_for(site: Site, **kwargs: Any) -> ASGIApp:
    settings: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "chat_template": ChatTemplate(TEMPLATE),
        "limits": Limits(max_model_len=MAX_LEN, vocab_size=300, max_body_bytes=100_000),
        "metrics_text": lambda: b"lorad_up 1\n",
        "trouble": lambda: site.trouble[0] if site.trouble else None,
    }
    return build_public_app(
        base_model=BASE,
        engine=site.engine,
        registry=RegistryDouble(),
        **{**settings, **kwargs},
    )


def serve(**kwargs: Any) -> Iterator[Site]:
    listener = public_listener("127.0.0.1", 0)
    site = Site(f"http://127.0.0.1:{listener.getsockname()[1]}", EngineDouble(), [])
    config = uvicorn.Config(app_for(site, **kwargs), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield site
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def wait_for(true: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    yield from serve()


@pytest.fixture
def site(module_site: Site) -> Site:
    module_site.engine.__init__()  # type: ignore[misc]
    module_site.trouble.clear()
    return module_site


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object; every error has its four members and a request id."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
