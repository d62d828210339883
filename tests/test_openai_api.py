"""The public port over real HTTP: a uvicorn server, the `openai` client, and raw requests.

The engine is a small deterministic double; everything else is what the daemon runs.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from starlette.types import ASGIApp, Message
from tokenizers import decoders, models, pre_tokenizers

from lorad.adapter_ref import AdapterName, AdapterRef, split_version
from lorad.engine.detokenizer import Detokenizer
from lorad.engine.messages import GenerationRequest, RequestOutput, SamplingParams, TokenLogprob
from lorad.errors import LoradError
from lorad.model.chat_template import ChatTemplate
from lorad.model.tokenizer import Tokenizer
from lorad.server.app import build_public_app
from lorad.server.auth import ApiKeys
from lorad.server.generation import generate_all
from lorad.server.limits import Limits
from lorad.server.listener import public_listener
from lorad.server.sse import EventStream

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


def wait_for(true: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    yield from serve()


@pytest.fixture(scope="module")
def module_keyed_site() -> Iterator[Site]:
    yield from serve(api_keys=ApiKeys({"k-acme": "acme", "k-globex": "globex", "k-ops": "default"}))


@pytest.fixture
def site(module_site: Site) -> Site:
    module_site.engine.__init__()  # type: ignore[misc]
    module_site.trouble.clear()
    return module_site


@pytest.fixture
def keyed(module_keyed_site: Site) -> Site:
    module_keyed_site.engine.__init__()  # type: ignore[misc]
    return module_keyed_site


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object; every error has its four members and a request id."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# --- models -------------------------------------------------------------------------------


def test_models_are_listed_base_first_and_without_paths(site: Site) -> None:
    models_list = list(site.client().models.list())
    assert [m.id for m in models_list] == [BASE, "acme/secret", "poet", "sql", "globex/secret"]
    base, *adapters = [m.model_dump() for m in models_list]
    assert base["parent"] is None and base["max_model_len"] == MAX_LEN
    assert all(m["parent"] == BASE and m["version"] == "v2" for m in adapters)
    assert adapters[0]["owned_by"] == "acme" and adapters[0]["created"] == 1700000000
    assert "root" not in base


@pytest.mark.parametrize(
    ("model", "version"), [("poet", "v2"), ("acme/secret", "v2"), ("acme/secret@v1", "v1")]
)
def test_a_model_is_found_by_its_encoded_id(site: Site, model: str, version: str) -> None:
    found = site.client().models.retrieve(model)
    assert (found.id, found.version) == (model, version)  # type: ignore[attr-defined]
    assert site.client().models.retrieve(BASE).id == BASE


def test_ids_are_decoded_once(site: Site) -> None:
    for path in ("acme/secret@v1", "acme%2Fsecret@v1", "acme%2Fsecret%40v1"):
        assert site.get(f"/v1/models/{path}").json()["id"] == "acme/secret@v1"
    assert site.get("/v1/models/acme%252Fsecret").status_code == 404


BAD_NAMES = [
    "nope",
    "poet@v9",
    "poet@",
    "poet@v1@v2",
    "Poet",
    "../poet",
    "/etc/passwd",
    "a/../../b",
    "..",
    "%2e%2e%2f",
    "",
    " poet",
    "poet\n",
    "poet\x00",
    "\x1b[2Jpoet",
    "[red]poet",
    "-poet",
    "ｐoet",
    "pоet",  # with a Cyrillic о
    "default/nope",
    "x" * 10_000,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_unknown_model_is_404_and_never_the_base(site: Site, name: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ):
        response = site.post(path, json={"model": name, **body})
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert repr(name[:200]) in error["message"]
        assert "x-lorad-adapter" not in response.headers
    assert site.engine.requests == []


def test_the_sdk_names_the_unknown_model(site: Site) -> None:
    with pytest.raises(openai.NotFoundError, match="nope") as caught:
        site.client().chat.completions.create(model="nope", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError, match="acme/nope"):
        site.client().models.retrieve("acme/nope")


# --- one answer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        (BASE, "base"),
        ("poet", "default/poet@v2"),
        ("default/poet", "default/poet@v2"),
        ("acme/secret", "acme/secret@v2"),
        ("acme/secret@v1", "acme/secret@v1"),
    ],
)
def test_the_answer_names_the_model_as_asked_and_the_version_that_answered(
    site: Site, model: str, adapter: str
) -> None:
    raw = site.client().completions.with_raw_response.create(
        model=model, prompt="Hi", max_tokens=100
    )
    answer = raw.parse()
    assert raw.headers["x-lorad-adapter"] == adapter
    assert (answer.model, answer.system_fingerprint) == (model, adapter)
    assert answer.choices[0].text == f"{adapter}|None|Hi🙂"
    assert answer.choices[0].finish_reason == "stop"
    (request,) = site.engine.requests
    assert ("base" if request.adapter is None else str(request.adapter)) == adapter


def test_a_completion_in_full(site: Site) -> None:
    body = site.post("/v1/completions", json={"model": BASE, "prompt": "Hi"}).json()
    assert body.pop("id").startswith("cmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    choice = {
        "index": 0,
        "text": "base|None|Hi🙂",  # 16 bytes, so 16 tokens: the default of this route
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body == {
        "object": "text_completion",
        "model": BASE,
        "system_fingerprint": "base",
        "choices": [choice],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 16,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_chat_goes_through_the_template_to_the_end_of_the_context(site: Site) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = site.client().chat.completions.create(model="poet", messages=messages)  # type: ignore[arg-type]
    prompt = "<system>Be brief.\n<user>a\nb\n<assistant>"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == f"default/poet@v2|None|{prompt}🙂"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert site.engine.requests[0].sampling.max_tokens == MAX_LEN - len(prompt)
    assert answer.usage and answer.usage.prompt_tokens == len(prompt)


def test_the_templates_refusal_is_the_clients_error(site: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="the user speaks first") as caught:
        site.client().chat.completions.create(
            model=BASE, messages=[{"role": "assistant", "content": "x"}]
        )
    assert caught.value.param == "messages"


def test_all_sampling_fields_reach_the_engine(site: Site) -> None:
    site.client().chat.completions.create(
        model=BASE,
        messages=HELLO,  # type: ignore[arg-type]
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["zz"],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1},
        max_completion_tokens=7,
        extra_body={"top_k": 4, "min_p": 0.05, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    sampling = site.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 3)
    assert (sampling.stop, sampling.max_tokens) == (("zz",), 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.logit_bias, sampling.top_k, sampling.min_p) == (((5, 1.0),), 4, 0.05)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.1, True)


def test_length_and_stop_are_told_apart(site: Site) -> None:
    create = site.client().completions.create
    cut = create(model=BASE, prompt="Hi", max_tokens=4)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("base", "length")
    assert cut.usage and cut.usage.completion_tokens == 4
    stopped = create(model=BASE, prompt="Hi there", max_tokens=99, stop=[" th", "|N"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("base", "stop")
    assert stopped.stop_reason == "|N"  # type: ignore[attr-defined]


def test_several_prompts_and_answers_keep_their_order_and_sum_their_tokens(site: Site) -> None:
    prompts = ["a", "bbb"]
    answer = site.client().completions.create(
        model="sql", prompt=prompts, n=2, seed=10, max_tokens=100
    )
    texts = [f"default/sql@v2|{seed}|{prompt}🙂" for prompt in prompts for seed in (10, 11)]
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(texts))
    assert answer.usage
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == sum(len(text.encode()) + 1 for text in texts)
    assert answer.usage.total_tokens == 4 + answer.usage.completion_tokens
    assert len({request.request_id for request in site.engine.requests}) == 4
    assert len({id(request.adapter) for request in site.engine.requests}) == 1


@pytest.mark.parametrize(
    "prompt", [TOKENIZER.encode("Hey"), [TOKENIZER.encode("Hey"), TOKENIZER.encode("You")]]
)
def test_prompts_as_tokens(site: Site, prompt: Any) -> None:
    answer = site.client().completions.create(model=BASE, prompt=prompt, max_tokens=99)
    assert answer.choices[0].text == "base|None|Hey🙂"
    assert answer.choices[-1].text.endswith(("Hey🙂", "You🙂"))


def test_echo_begins_with_the_prompt(site: Site) -> None:
    create = site.client().completions.create
    for prompt in ("Hey", TOKENIZER.encode("Hey")):
        answer = create(model=BASE, prompt=prompt, echo=True, max_tokens=4)
        assert answer.choices[0].text == "Heybase"
        stream = create(model=BASE, prompt=prompt, echo=True, max_tokens=4, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Heybase"


def test_completion_logprobs_name_bytes_and_offsets(site: Site) -> None:
    answer = site.client().completions.create(
        model=BASE, prompt="x", logprobs=2, max_tokens=99, stop=["|None|x🙂"]
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "base"
    assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert logprobs.tokens[:5] == ["b", "a", "s", "e", "|"]
    assert logprobs.tokens[-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert logprobs.text_offset == [*range(11), 11, 11, 11, 11]
    assert logprobs.token_logprobs == [-0.5] * 15
    first, second = (TOKENIZER.token_text(i) for i in (0, 1))
    assert logprobs.top_logprobs[0] == {"b": -0.5, first: -9999.0, second: -2.0}


def test_chat_logprobs_give_exact_bytes(site: Site) -> None:
    create = site.client().chat.completions.create
    answer = create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    content = answer.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode() == answer.choices[0].message.content + "<end>"
    assert [top.logprob for top in content[0].top_logprobs] == [-9999.0, -2.0]
    bare = create(model=BASE, messages=HELLO, logprobs=True)  # type: ignore[call-overload]
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


# --- streams ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 5},
        {"stop": ["|H"], "max_tokens": 50},
        {"max_tokens": 13},
        {"max_tokens": 3, "n": 2},
    ],
)
def test_streamed_and_whole_answers_are_the_same(site: Site, fields: dict[str, Any]) -> None:
    client = site.client()
    fields = {"max_tokens": 99, **fields}
    whole = client.completions.create(model="poet", prompt="Hi", **fields)
    stream = client.completions.create(model="poet", prompt="Hi", stream=True, **fields)
    texts, ends = [""] * len(whole.choices), {}
    for chunk in stream:
        (choice,) = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_chat_stream_event_by_event(site: Site) -> None:
    body = {"model": "poet", "messages": HELLO, "stream": True, "max_tokens": 2}
    response = site.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-lorad-adapter"] == "default/poet@v2"
    assert response.headers["x-request-id"]
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "d"},
        {"content": "e"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["model"] == "poet"
    assert not any("usage" in chunk or "error" in chunk for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_and_only_when_asked(site: Site) -> None:
    create = site.client().chat.completions.create
    chunks = list(
        create(  # type: ignore[call-overload]
            model=BASE,
            messages=HELLO,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=5,
        )
    )
    *parts, last = chunks
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in parts)
    assert last.choices == []
    prompt = len("<user>Hello\n<assistant>")
    assert last.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "total_tokens": prompt + 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    plain = create(model=BASE, messages=HELLO, stream=True)  # type: ignore[call-overload]
    assert all(chunk.choices for chunk in plain)


def test_streamed_logprobs_join_to_the_whole(site: Site) -> None:
    fields: dict[str, Any] = {"model": BASE, "prompt": "é", "logprobs": 1, "max_tokens": 99}
    whole = site.client().completions.create(**fields).choices[0].logprobs
    tokens, offsets = [], []
    for chunk in site.client().completions.create(stream=True, **fields):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            tokens += logprobs.tokens
            offsets += logprobs.text_offset
    assert whole and (tokens, offsets) == (whole.tokens, whole.text_offset)


def test_characters_are_never_cut_in_a_stream(site: Site) -> None:
    stream = site.client().completions.create(
        model=BASE, prompt="👩‍👩‍👧‍👦é", max_tokens=99, stream=True
    )
    assert all("\ufffd" not in chunk.choices[0].text for chunk in stream)


def test_many_streams_at_once_do_not_mix(site: Site) -> None:
    site.engine.delay = 0.001

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        model = ["poet", "sql", BASE, "acme/secret@v1"][number % 4]
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"number {number}"}],
            stream=True,
        )
        adapter = stream.response.headers["x-lorad-adapter"]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return text, f"{adapter}|None|<user>number {number}\n<assistant>🙂"

    async def everyone() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{site.url}/v1", api_key="x", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(40)))

    for text, expected in asyncio.run(everyone()):
        assert text == expected


# --- failures -----------------------------------------------------------------------------


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


# --- a client that leaves -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_in_mid_stream_aborts(site: Site, n: int) -> None:
    site.engine.endless, site.engine.delay = True, 0.01
    body = {"model": BASE, "prompt": "x", "stream": True, "n": n, "max_tokens": 300}
    with httpx.stream("POST", f"{site.url}/v1/completions", json=body) as response:
        received = response.iter_bytes()
        next(received)
        wait_for(lambda: site.engine.running == n)
    wait_for(lambda: site.engine.running == 0, 2)
    assert len(site.engine.aborted) == n


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_while_a_whole_answer_is_made_aborts(site: Site, n: int) -> None:
    site.engine.endless, site.engine.delay = True, 0.01
    body = {"model": BASE, "prompt": "x", "n": n, "max_tokens": 300}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{site.url}/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: site.engine.running == 0, 2)
    assert len(site.engine.aborted) == n


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(site: Site, stream: bool) -> None:
    """A request that waits in the queue or for its adapter must not outlive its client."""
    site.engine.delay = 30
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{site.url}/v1/chat/completions",
            json={"model": BASE, "messages": HELLO, "stream": stream},
            timeout=0.2,
        )
    wait_for(lambda: site.engine.running == 0, 2)
    assert len(site.engine.aborted) == 1


def test_the_sdk_closing_a_stream_aborts(site: Site) -> None:
    site.engine.endless, site.engine.delay = True, 0.01
    stream = site.client().completions.create(model=BASE, prompt="x", stream=True, max_tokens=300)
    next(iter(stream))
    stream.close()
    wait_for(lambda: site.engine.running == 0, 2)
    assert len(site.engine.aborted) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_closing_ends_the_generation_at_once_not_when_it_is_collected(n: int) -> None:
    async def scenario() -> None:
        engine = EngineDouble(endless=True)
        sampling = SamplingParams(max_tokens=300)
        requests = [GenerationRequest(f"r{i}", (1, 2), sampling) for i in range(n)]
        outputs = generate_all(engine, requests)
        await anext(outputs)
        await outputs.aclose()
        assert engine.running == 0
        assert set(engine.aborted) == {f"r{i}" for i in range(n)}

    asyncio.run(scenario())


def test_a_reader_that_stalls_and_then_leaves_ends_the_stream() -> None:
    """The server is held up in sending, not in waiting for a token."""
    closed = []

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        try:
            while True:
                yield {"a": 1}
        finally:
            closed.append(True)

    async def scenario() -> None:
        stalled = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                stalled.set()
                await asyncio.Event().wait()

        async def receive() -> Message:
            await stalled.wait()
            return {"type": "http.disconnect"}

        await EventStream(chunks())({"type": "http"}, receive, send)
        assert closed == [True]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_an_answer_that_ended_is_not_aborted(site: Site) -> None:
    list(site.client().completions.create(model=BASE, prompt="x", stream=True))
    site.client().completions.create(model=BASE, prompt="x", n=2)
    assert site.engine.running == 0 and site.engine.aborted == []


# --- malformed requests -------------------------------------------------------------------


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


# --- routes -------------------------------------------------------------------------------


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


# --- keys and tenants ---------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "k-acme", "Basic k-acme"])
def test_without_a_good_key_there_is_nothing(keyed: Site, header: str | None) -> None:
    headers = {"authorization": header} if header else {}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/models/poet"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/metrics"),
    ):
        response = keyed.http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    assert keyed.get("/health").status_code == 200


def test_a_tenant_sees_its_own_and_the_shared_adapters(keyed: Site) -> None:
    def listed(key: str) -> list[str]:
        return [model.id for model in keyed.client(key).models.list()]

    assert listed("k-acme") == [BASE, "acme/secret", "poet", "sql"]
    assert listed("k-globex") == [BASE, "poet", "sql", "globex/secret"]
    assert listed("k-ops") == [BASE, "poet", "sql"]


def test_another_tenants_adapter_does_not_exist(keyed: Site) -> None:
    client = keyed.client("k-acme")
    for model in ("acme/secret", "acme/secret@v1", "poet", BASE):
        assert client.completions.create(model=model, prompt="x").model == model

    def refusal(model: str) -> str:
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model=model, prompt="x")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(model)
        return str(caught.value.body).replace(model, "MODEL")

    assert refusal("globex/secret") == refusal("globex/nothing") == refusal("globex/secret@v9")


def test_metrics_with_keys_are_for_the_default_tenant(keyed: Site) -> None:
    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return keyed.get("/metrics", headers=headers).status_code

    assert (status("k-ops"), status("k-acme")) == (200, 401)


# --- without a chat template, without metrics ---------------------------------------------


def test_a_model_without_a_chat_template_says_so() -> None:
    for bare in serve(chat_template=None, metrics_text=None):
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            bare.client().chat.completions.create(model=BASE, messages=HELLO)  # type: ignore[arg-type]
        assert "/v1/completions" in str(caught.value)
        assert bare.client().completions.create(model=BASE, prompt="x").choices
        assert bare.get("/metrics").status_code == 404
