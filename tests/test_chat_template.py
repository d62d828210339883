"""Chat templates: the same text as transformers, and a sandbox that holds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

import lorad.model.chat_template as chat_template
from lorad.errors import LoradError
from lorad.model.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- set ns = namespace(system='', first=true) %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = ns.system ~ message.content | trim %}
{%- endfor %}
{{- '<|start|>system<|end|>\\n\\nDate: ' ~ strftime_now('%Y') ~ '\\n' ~ ns.system }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

INST = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

PARTS = """\
{% macro text(content) %}
{% if content is string %}{{ content }}{% else %}
{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endif %}
{% endmacro %}
{% for message in messages -%}
    {% generation %}<turn {{ message.role }} {{ loop.index }}>
    {{ text(message.content) | trim }} {{ message | tojson }}{% endgeneration %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ missing }}{{ unk_token is defined }}{{ message_prefix | default('-') }}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "parts": PARTS}

AWKWARD = "<b>\"quoted\" & 'single'</b> {{ bos_token }} {% raw %} 日本 👩‍👩‍👧‍👦\u2028\\n\n  "
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": AWKWARD},
    ],
    "system": [
        {"role": "system", "content": AWKWARD},
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": "y", "extra": {"b": [1, 2.5, None, True], "a": "é<"}},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "cut by the break"},
    ],
    "two systems": [
        {"role": "system", "content": "one"},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "x"},
    ],
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' own tokenizer class, for its apply_chat_template."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)


@pytest.mark.parametrize(
    ("template", "conversation", "prompt"),
    list(itertools.product(TEMPLATES, CONVERSATIONS, (True, False))),
)
def test_the_text_is_that_of_transformers(
    theirs: Any, template: str, conversation: str, prompt: bool
) -> None:
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    ours = ChatTemplate(source, TOKENS)
    try:
        expected = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as error:
        with pytest.raises(LoradError) as caught:
            ours.render(messages, add_generation_prompt=prompt)
        assert caught.value.code == "request.invalid"
        assert str(error) in caught.value.message
        return
    assert ours.render(messages, add_generation_prompt=prompt) == expected


def test_variables_reach_the_template_as_in_transformers(theirs: Any) -> None:
    variables = {"message_prefix": "p", "unk_token": "?", "eos_token": "<end>"}
    source, messages = PARTS + "{{ eos_token }}", CONVERSATIONS["one"]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, **variables
    )
    ours = ChatTemplate(source, TOKENS)
    assert ours.render(messages, add_generation_prompt=False, variables=variables) == expected


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(LoradError, match="roles must alternate") as caught:
        ChatTemplate(INST, TOKENS).render([{"role": "assistant", "content": "x"}])
    assert caught.value.details == {"param": "messages"}


def test_rendering_does_not_change_the_messages() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    ChatTemplate(CHATML).render(messages)
    assert messages == [{"role": "user", "content": "x", "name": None}]


# --- where the template comes from --------------------------------------------------------


def test_a_jinja_file_goes_before_the_config(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.from_dir(tmp_path, {}) is None
    config.write_text(json.dumps({"eos_token": "</s>"}))
    assert ChatTemplate.from_dir(tmp_path, {}) is None
    config.write_text(json.dumps({"chat_template": "config {{ bos_token }}"}))
    assert rendered(tmp_path) == "config <s>"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "the default one"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "the default one"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}\n")
    assert rendered(tmp_path) == "file <s>"


def rendered(path: Path) -> str:
    template = ChatTemplate.from_dir(path, TOKENS)
    assert template is not None
    return template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "configured", [[{"name": "rag", "template": "x"}], [1], 7, {"default": "x"}, [{"name": "a"}]]
)
def test_an_unusable_setting_is_named(tmp_path: Path, configured: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": configured}))
    with pytest.raises(LoradError, match="default") as caught:
        ChatTemplate.from_dir(tmp_path, {})
    assert caught.value.code == "model.invalid"


def test_a_syntax_error_is_found_at_start_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("ok\n{% for %}\n")
    with pytest.raises(LoradError, match="line 2") as caught:
        ChatTemplate.from_dir(tmp_path, {})
    assert caught.value.code == "model.invalid"
    assert "chat_template.jinja" in caught.value.message


def test_a_giant_template_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("x" * (chat_template.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(LoradError, match="larger") as caught:
        ChatTemplate.from_dir(tmp_path, {})
    assert caught.value.code == "model.invalid"


# --- what a hostile template can do -------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '%s' | format(messages) | attr('__class__') }}{{ (''|attr('__class__')).__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ missing.attribute }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_failing_or_escaping_template_is_a_clean_error(source: str) -> None:
    with pytest.raises(LoradError) as caught:
        ChatTemplate(source, TOKENS).render([{"role": "user", "content": "x"}])
    assert caught.value.code == "request.invalid"


def test_endless_output_is_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    source = "{% for i in range(1000) %}{% for j in range(1000) %}x{% endfor %}{% endfor %}"
    with pytest.raises(LoradError, match="1000 characters"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_slow_output_is_cut_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(LoradError, match="seconds"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
