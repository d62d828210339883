"""Adapters from a hub and from S3, and a version store in a bucket: all against local servers."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.errors import LoradError
from lorad.registry.records import Who
from lorad.registry.registry import Registry

DAEMON = Path(__file__).with_name("admin_daemon.py")
_SHARED = runpy.run_path(str(DAEMON))
write_adapter, BASE, SHAPE = _SHARED["write_adapter"], _SHARED["BASE"], _SHARED["SHAPE"]
CHECK = partial(read_adapter, shape=SHAPE, max_lora_rank=16)
CATS = AdapterName("default", "cats")
ME = Who(1, 1)
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Loractl:
    """loractl against a daemon of registry and admin API."""

    def __init__(self, root: Path) -> None:
        self.socket = root / "run" / "lorad.sock"
        self.env = {**os.environ, "LORAD_SOCKET": str(self.socket), "HF_HOME": str(root / "hf")}
        command = [sys.executable, str(DAEMON), str(root / "state"), str(self.socket)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "loractl.main", *words],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done


@pytest.fixture
def loractl(tmp_path: Path) -> Iterator[Loractl]:
    running = Loractl(tmp_path)
    yield running
    running.process.terminate()
    running.process.communicate(timeout=20)


# --- the hub -------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One repository, as far as a download needs it; what was asked for is kept."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.asked.append(self.path)
        parts = self.path.strip("/").split("/")  # org/repo/resolve/REVISION/FILE
        known = parts[:3] == ["org", "cats", "resolve"] and parts[3] in ("main", "v9", COMMIT)
        file = self.folder / parts[-1]
        if not known or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(content)}-{parts[-1]}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.folder, Hub.asked = write_adapter(tmp_path / "on-the-hub", 7), []
    (Hub.folder / "modeling_evil.py").write_text("raise SystemExit")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_push_from_the_hub_takes_two_files_of_one_commit(loractl: Loractl, hub: str) -> None:
    online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    pushed = loractl("push", "cats", "hf://org/cats@v9", "--json", **online)
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(pushed.stdout)["version"]["rank"] == 2
    assert COMMIT in pushed.stderr
    # The hub client has questions of its own; of the repository it takes the two files alone.
    taken = {path for path in Hub.asked if path.startswith("/org/")}
    assert {path.rpartition("/")[2] for path in taken} == set(FILES)
    weights = [path for path in Hub.asked if path.endswith("safetensors")]
    assert all(COMMIT in path for path in weights)
    same = loractl("push", "cats", str(Hub.folder), "--json")
    assert json.loads(same.stdout)["outcome"] == "unchanged"


def test_what_the_hub_does_not_have(loractl: Loractl, hub: str) -> None:
    online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    assert loractl("push", "cats", "hf://org/dogs", **online).returncode == 5
    (Hub.folder / FILES[1]).unlink()
    refused = loractl("push", "cats", "hf://org/cats", **online)
    assert (refused.returncode, "adapter.weights_missing" in refused.stderr) == (6, True)
    for source in ("hf://cats", "hf://org/cats@../x y", "http://169.254.169.254/x", "file:///etc"):
        assert loractl("push", "cats", source, **online).returncode == 2, source


# --- S3 ------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The files of an empty bucket `models` on a moto server."""
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    httpx.post(f"http://{host}:{port}/moto-api/reset")  # its buckets are global to the process
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    files.mkdir("models")
    yield files
    server.stop()


def test_push_from_s3(loractl: Loractl, bucket: Any, tmp_path: Path) -> None:
    loractl.env.update({k: v for k, v in os.environ.items() if k.startswith("AWS_")})
    folder = write_adapter(tmp_path / "a", 1)
    for file in FILES:
        bucket.put_file(str(folder / file), f"models/team/cats/{file}")
    pushed = loractl("push", "cats", "s3://models/team/cats/", "--json")
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(loractl("push", "cats", str(folder), "--json").stdout)["changed"] is False
    bucket.rm("models/team/cats/adapter_model.safetensors")
    refused = loractl("push", "cats", "s3://models/team/cats")
    assert (refused.returncode, "adapter.weights_missing" in refused.stderr) == (6, True)
    assert loractl("push", "cats", "s3://no-such-bucket/x").returncode in (5, 6)


def objects(bucket: Any) -> set[str]:
    bucket.invalidate_cache()
    return set(bucket.find("models"))


def test_store_in_a_bucket(bucket: Any, tmp_path: Path) -> None:
    state, url = tmp_path / "state", "s3://models/store"
    registry = Registry.open(state, BASE, CHECK, store=url)
    for seed in (1, 2):
        registry.push(write_adapter(tmp_path / f"a{seed}", seed), CATS, who=ME)
    registry.promote(CATS, "v1", who=ME)
    root = "models/store/org%2FTiny-Base/default/cats"
    assert objects(bucket) == {f"{root}/{v}/{file}" for v in ("v1", "v2") for file in FILES}
    ref = registry.resolve("cats")
    copy = registry.verify(ref)
    assert (copy / FILES[1]).read_bytes() == (tmp_path / "a1" / FILES[1]).read_bytes()
    # An altered copy is not served, and the next load fetches the real one.
    (copy / FILES[1]).write_bytes(b"\0" * (copy / FILES[1]).stat().st_size)
    with pytest.raises(LoradError):
        registry.verify(ref)
    registry.close()
    registry = Registry.open(state, BASE, CHECK, store=url)
    assert registry.version(CATS, "v1").servable  # whole again, from the bucket
    registry.verify(ref)
    registry.delete(CATS, "v2", who=ME)
    assert objects(bucket) == {f"{root}/v1/{file}" for file in FILES}
    # What a killed push left is removed at the next start; what has gone is told.
    bucket.pipe(f"{root}/v3/{FILES[1]}", b"half")
    bucket.pipe(f"{root}/v1/{FILES[1]}", b"altered")
    registry.close()
    registry = Registry.open(state, BASE, CHECK, store=url)
    assert not registry.version(CATS, "v1").servable
    assert objects(bucket) == {f"{root}/v1/{file}" for file in FILES}
    registry.push(tmp_path / "a1", CATS, who=ME)
    assert registry.version(CATS, "v1").servable
    registry.verify(ref)
    registry.close()


def test_cache_of_a_bucket_is_bounded(bucket: Any, tmp_path: Path) -> None:
    state = tmp_path / "state"
    registry = Registry.open(state, BASE, CHECK, store="s3://models/store", cache_bytes=1500)
    for seed in range(5):
        registry.push(write_adapter(tmp_path / f"a{seed}", seed), CATS, who=ME)
    for label in registry.adapter(CATS).versions:
        registry.verify(registry.version(CATS, label).ref)
    copies = list((state / "bucket" / "cache").glob("*/*/*/*"))
    assert 1 <= len(copies) <= 3
    assert "v5" in {copy.name for copy in copies}
    registry.close()


def test_bucket_that_cannot_be_reached(bucket: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(LoradError) as caught:
        Registry.open(tmp_path / "state", BASE, CHECK, store="s3://models/store")
    assert caught.value.code == "store.unavailable"
