"""API keys of the public port, and what a tenant sees."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from lorad.server.auth import ApiKeys
from openai_site import BASE, Site, error_of, serve


@pytest.fixture(scope="module")
def module_keyed_site() -> Iterator[Site]:
    yield from serve(api_keys=ApiKeys({"k-acme": "acme", "k-globex": "globex", "k-ops": "default"}))


@pytest.fixture
def keyed(module_keyed_site: Site) -> Site:
    module_keyed_site.engine.__init__()  # type: ignore[misc]
    return module_keyed_site


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
