"""Whole answers of the public port: texts, usage, sampling fields, log probabilities."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from openai_site import BASE, HELLO, MAX_LEN, TOKENIZER, Site
from openai_site import module_site as module_site
from openai_site import site as site


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
