"""The list of models, one model by its id, and names that are none."""

from __future__ import annotations

import openai
import pytest

from openai_site import BASE, HELLO, MAX_LEN, Site, error_of
from openai_site import module_site as module_site
from openai_site import site as site


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
