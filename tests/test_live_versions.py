"""Versions under real traffic, crashes and full disks: the short forms of tests/soak/."""

from __future__ import annotations

import os
import runpy
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.errors import LoradError
from lorad.registry.records import Who
from lorad.registry.registry import Registry

SOAK = Path(__file__).parent / "soak"
TRAFFIC = runpy.run_path(str(SOAK / "live_traffic.py"))
KILL = runpy.run_path(str(SOAK / "kill_daemon.py"))
MANY = runpy.run_path(str(SOAK / "many_adapters.py"))
_SHARED = runpy.run_path(str(Path(__file__).with_name("admin_daemon.py")))
write_adapter, BASE, SHAPE = _SHARED["write_adapter"], _SHARED["BASE"], _SHARED["SHAPE"]
CATS = AdapterName("default", "cats")
ME = Who(0, 0)


@pytest.fixture(scope="module")
def daemon(start_daemon, tiny_chat_model, random_adapter, tmp_path_factory):
    """`soak` with v1 (live) and v2."""
    daemon = start_daemon(tiny_chat_model, "--slab-bytes", "64MiB", "--threads", "1")
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("soak") / "adapter"
        random_adapter(tiny_chat_model, folder, 4, ("q_proj", "down_proj"), seed=seed)
        daemon.admin.push(folder, "soak")
    daemon.admin.promote("soak", "v1")
    return daemon


def test_no_request_fails_or_mixes_versions_while_the_name_moves(daemon) -> None:
    report = TRAFFIC["run"](daemon.url, daemon.admin, seconds=5, clients=6, tokens=12)
    assert report.failed == []
    assert report.wrong == []
    assert report.moves >= 6
    assert set(report.answers) == {"default/soak@v1", "default/soak@v2"}


def test_a_running_answer_keeps_its_version_through_a_promote(daemon) -> None:
    """A stream that began under v1 ends as v1, token by token; the next one is v2."""
    daemon.admin.promote("soak", "v1")
    client = daemon.openai()
    ask = partial(
        client.completions.create,
        model="soak",
        prompt="Once",
        max_tokens=200,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    cold = ask().choices[0].text
    begun, text = threading.Event(), []

    def stream() -> None:
        for chunk in ask(stream=True):
            text.append(chunk.choices[0].text)
            begun.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(20)
    daemon.admin.promote("soak", "v2")
    assert thread.is_alive(), "the answer ended before the promote"
    thread.join(60)
    assert "".join(text) == cold
    assert ask().choices[0].text != cold
    daemon.admin.promote("soak", "v1")


def test_same_name_with_other_weights_answers_as_a_cold_run(
    daemon, random_adapter, tiny_chat_model, tmp_path
) -> None:
    """Cases R01 and R02: the same prompt before and after, for two adapters and the base."""
    for seed, name in ((11, "one"), (12, "two")):
        folder = random_adapter(
            tiny_chat_model, tmp_path / name, 4, ("q_proj", "k_proj"), seed=seed
        )
        daemon.admin.push(folder, name)
        daemon.admin.promote(name, "v1")
    models = ("one", "two", tiny_chat_model.name)

    def ask(model: str) -> str:
        answer = daemon.openai().completions.create(
            model=model, prompt="Tell me a story", max_tokens=24, temperature=0
        )
        return answer.choices[0].text

    first = {model: ask(model) for model in models}
    assert len(set(first.values())) == 3
    assert {model: ask(model) for model in reversed(models)} == first
    reloaded = random_adapter(tiny_chat_model, tmp_path / "new", 4, ("q_proj",), seed=13)
    daemon.admin.push(reloaded, "one")
    daemon.admin.promote("one", "v2")
    daemon.admin.push(reloaded, "fresh")
    daemon.admin.promote("fresh", "v1")
    assert ask("one") == ask("fresh") != first["one"]
    assert ask("two") == first["two"]
    assert ask(tiny_chat_model.name) == first[tiny_chat_model.name]
    assert ask("one@v1") == first["one"]


def test_change_of_alpha_alone_is_another_version_with_another_answer(
    daemon, random_adapter, tiny_chat_model, tmp_path
) -> None:
    folder = random_adapter(tiny_chat_model, tmp_path / "a", 4, ("q_proj", "v_proj"), seed=21)
    first = daemon.admin.push(folder, "alpha")["version"]
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 80'))
    second = daemon.admin.push(folder, "alpha")["version"]
    assert (second["version"], second["digest"] != first["digest"]) == ("v2", True)
    texts = {
        daemon.openai()
        .completions.create(model=f"alpha@{v}", prompt="Hi", max_tokens=16, temperature=0)
        .choices[0]
        .text
        for v in ("v1", "v2")
    }
    assert len(texts) == 2


def test_an_adapter_whose_files_vanish_fails_its_own_requests_only(
    daemon, random_adapter, tiny_chat_model, tmp_path
) -> None:
    folder = random_adapter(tiny_chat_model, tmp_path / "a", 4, ("q_proj",), seed=31)
    daemon.admin.push(folder, "vanishing")
    daemon.admin.promote("vanishing", "v1")
    daemon.admin.unload("vanishing", "v1", force=True, drain_timeout=5, dry_run=False)
    stored = next((daemon.directory / "registry/store").glob("*/default/vanishing/v1"))
    for file in stored.iterdir():
        file.unlink()
    http = httpx.Client(base_url=daemon.url, timeout=30)
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    lost = http.post("/v1/completions", json={**body, "model": "vanishing"})
    assert lost.status_code == 500
    assert lost.json()["error"]["code"] == "store.digest_mismatch"
    for model in ("soak", tiny_chat_model.name):
        assert http.post("/v1/completions", json={**body, "model": model}).status_code == 200
    assert daemon.admin.version("vanishing", "v1")["state"] == "failed"
    daemon.admin.push(folder, "vanishing")
    assert http.post("/v1/completions", json={**body, "model": "vanishing"}).status_code == 200


def test_a_bad_load_harms_nobody(daemon, tiny_chat_model, tmp_path) -> None:
    """Case R03: loads of what is not there, beside a running answer."""
    (tmp_path / "empty").mkdir()
    ask = partial(
        daemon.openai().completions.create,
        model="soak@v1",
        prompt="Once",
        max_tokens=60,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    cold = ask().choices[0].text
    stream = ask(stream=True)
    text = next(stream).choices[0].text
    models = [model.id for model in daemon.openai().models.list()]
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://lorad"
    ) as admin:
        expected = {"absent": (404, "path.not_found"), "empty": (422, "adapter.config_missing")}
        for folder, (status, code) in expected.items():
            body = {"lora_name": "y", "lora_path": str(tmp_path / folder)}
            answer = admin.post("/v1/load_lora_adapter", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert text + "".join(chunk.choices[0].text for chunk in stream) == cold
    assert [model.id for model in daemon.openai().models.list()] == models
    lost = httpx.post(f"{daemon.url}/v1/completions", json={"model": "y", "prompt": "x"})
    assert lost.status_code == 404


def test_a_name_that_is_not_there_is_never_answered_by_the_base(daemon, tiny_chat_model) -> None:
    """Case R04: beside a real adapter, names one letter off, of no version, and empty."""
    base = tiny_chat_model.name
    with httpx.Client(base_url=f"{daemon.url}/v1", timeout=30) as http:
        for path, body in (
            ("/completions", {"prompt": "x"}),
            ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            for name in ("soa", "soaks", "soak@v9", ""):
                answer = http.post(path, json={"model": name, "max_tokens": 2, **body})
                assert answer.status_code == 404
                assert repr(name) in answer.json()["error"]["message"]
            for name, served in ((base, "base"), ("soak@v1", "default/soak@v1")):
                answer = http.post(path, json={"model": name, "max_tokens": 2, **body})
                assert answer.status_code == 200
                assert answer.headers["x-lorad-adapter"] == served


def test_unload_waits_for_the_running_answer_and_gives_the_memory_back(daemon) -> None:
    """Case R07: the answer ends as it would have; the bytes are told, and really free."""
    ask = partial(
        daemon.openai().completions.create,
        model="soak@v2",
        prompt="Once",
        max_tokens=100,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    cold = ask().choices[0].text
    before = daemon.admin.status()["engine"]["adapter_pages"]
    stream = ask(stream=True)
    text = next(stream).choices[0].text
    done: list = []
    unload = partial(daemon.admin.unload, "soak", "v2", force=True, drain_timeout=30, dry_run=False)
    thread = threading.Thread(target=lambda: done.append(unload()))
    thread.start()
    assert text + "".join(chunk.choices[0].text for chunk in stream) == cold
    thread.join(30)
    assert done[0]["freed_device_bytes"] > 0
    assert daemon.admin.version("soak", "v2")["residency"]["tier"] == "disk"
    assert daemon.admin.status()["engine"]["adapter_pages"] < before
    assert ask().choices[0].text == cold  # it stays registered: the next request loads it


def test_kill_at_random_moments(tmp_path: Path) -> None:
    changes, _ = KILL["soak"](6, seed=3, root=tmp_path)
    assert changes > 0


def test_start_with_many_adapters_takes_no_time(tmp_path: Path) -> None:
    registry, _ = MANY["reopen"](tmp_path / "state")
    MANY["fill"](registry, tmp_path, 60)
    registry.close()
    registry, seconds = MANY["reopen"](tmp_path / "state")
    assert len(registry.live_adapters()) == 60
    assert seconds < 2
    registry.close()


# --- disks that refuse ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "lorad-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_fails_the_push_and_nothing_else(small_disk: Path, tmp_path: Path) -> None:
    check = partial(read_adapter, shape=SHAPE, max_lora_rank=16)
    registry = Registry.open(small_disk / "state", BASE, check)
    registry.push(write_adapter(tmp_path / "a", 0), CATS, who=ME)
    registry.promote(CATS, "v1", who=ME)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1024))
    for seed in range(1, 20):
        with pytest.raises(LoradError) as caught:
            registry.push(write_adapter(tmp_path / f"a{seed}", seed), CATS, who=ME)
        assert caught.value.code == "store.no_space"
    assert list(registry.adapter(CATS).versions) == ["v1"]
    registry.verify(registry.resolve("cats"))
    ballast.unlink()
    assert registry.push(tmp_path / "a1", CATS, who=ME).version.label == "v2"
    registry.close()
    reopened = Registry.open(small_disk / "state", BASE, check)
    assert list(reopened.adapter(CATS).versions) == ["v1", "v2"]
    reopened.close()


def test_read_only_disk_still_serves(small_disk: Path, tmp_path: Path) -> None:
    check = partial(read_adapter, shape=SHAPE, max_lora_rank=16)
    registry = Registry.open(small_disk / "state", BASE, check)
    registry.push(write_adapter(tmp_path / "a", 0), CATS, who=ME)
    registry.push(write_adapter(tmp_path / "b", 1), CATS, who=ME)
    registry.promote(CATS, "v1", who=ME)
    # The database's files are open for writing, so the mount itself cannot be changed; the
    # store's directories can.
    mount = ["mount", "--bind", *[str(small_disk / "state" / "store")] * 2]
    subprocess.run(mount, check=True)
    remount = ["mount", "-o", "remount,bind,ro", str(small_disk / "state" / "store")]
    subprocess.run(remount, check=True)
    try:
        with pytest.raises(LoradError) as caught:
            registry.push(write_adapter(tmp_path / "c", 2), CATS, who=ME)
        assert caught.value.code == "store.unavailable"
        registry.verify(registry.resolve("cats"))
        assert registry.promote(CATS, "v2", who=ME).changed
    finally:
        subprocess.run(["umount", "-l", str(small_disk / "state" / "store")], check=True)
    assert registry.push(tmp_path / "c", CATS, who=ME).version.label == "v3"
    registry.close()
