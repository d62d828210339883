"""The whole route on the real model: `lorad start`, `loractl`, and the `openai` client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples/adapters"
QUESTION = [{"role": "user", "content": "What should I pack for a trip to the mountains?"}]
TOKENS = 40


@pytest.fixture(scope="module")
def daemon(start_daemon, demo_model):
    daemon = start_daemon(demo_model, "--slab-bytes", "1GiB", "--threads", "2")
    for name, folder in (("pirate", "pirate-v1"), ("pirate", "pirate-v2"), ("json", "json")):
        daemon.loractl("push", name, str(EXAMPLES / folder))
    daemon.loractl("promote", "pirate", "v1")
    daemon.loractl("promote", "json", "v1")
    return daemon


def ask(daemon, model: str, max_tokens: int = TOKENS) -> tuple[str, str]:
    """(text, the version that answered), greedy and not streamed."""
    response = daemon.openai().chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=max_tokens
    )
    answer = response.parse()
    assert answer.model == model
    return answer.choices[0].message.content, response.headers["x-lorad-adapter"]


class Stream:
    """A streamed answer, read in a thread of its own; ignores the end of text to stay busy."""

    def __init__(self, daemon, model: str, max_tokens: int) -> None:
        self.begun = threading.Event()
        self.text, self.served_by = "", ""
        self._arguments = (daemon, model, max_tokens)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        daemon, model, max_tokens = self._arguments
        response = daemon.openai().chat.completions.with_raw_response.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        self.served_by = response.headers["x-lorad-adapter"]
        for chunk in response.parse():
            self.text += chunk.choices[0].delta.content or ""
            self.begun.set()

    def join(self) -> Stream:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()


def test_concurrent_requests_share_the_batch(daemon, demo_model):
    """Rows of both adapters and of the base model in one step, from separate HTTP requests."""
    models = ["pirate", "json", demo_model.name]
    alone = {model: ask(daemon, model) for model in models}
    last = daemon.admin.steps(1)["steps"][-1]["step"]
    with ThreadPoolExecutor() as pool:
        together = dict(
            zip(models, pool.map(lambda model: ask(daemon, model), models), strict=True)
        )
    assert together == alone
    assert len({text for text, _ in alone.values()}) == 3, "the adapters answer like the base"
    steps = [step for step in daemon.admin.steps(1000)["steps"] if step["step"] > last]
    mixed = [step for step in steps if len(step["rows"]) == 3]
    assert mixed, f"never in one batch: {[step['rows'] for step in steps]}"
    assert set(mixed[0]["rows"]) == {"default/pirate@v1", "default/json@v1", "base"}
    assert len(mixed[0]["requests"]) == 3


def test_promote_during_an_answer_and_roll_back(daemon):
    """The running answer is v1's to its last token, the next is v2's, rollback brings v1 back."""
    cold_v1 = Stream(daemon, "pirate", 120).join()
    cold_v2 = Stream(daemon, "pirate@v2", 120).join()
    assert (cold_v1.served_by, cold_v2.served_by) == ("default/pirate@v1", "default/pirate@v2")
    assert cold_v1.text != cold_v2.text

    running = Stream(daemon, "pirate", 120)
    assert running.begun.wait(60)
    promoted = json.loads(daemon.loractl("promote", "pirate", "v2", "--json").stdout)
    assert running.running, "the answer ended before the promote: nothing is shown"
    assert (promoted["from_version"], promoted["to_version"]) == ("v1", "v2")
    after = Stream(daemon, "pirate", 120).join()
    running.join()
    assert (running.served_by, running.text) == ("default/pirate@v1", cold_v1.text)
    assert (after.served_by, after.text) == ("default/pirate@v2", cold_v2.text)

    daemon.loractl("rollback", "pirate", "--reason", "test")
    back = Stream(daemon, "pirate", 120).join()
    assert (back.served_by, back.text) == ("default/pirate@v1", cold_v1.text)
    history = json.loads(daemon.loractl("history", "pirate", "--json").stdout)
    assert [event["action"] for event in history["events"][:2]] == ["rollback", "promote"]
    assert history["events"][0]["reason"] == "test"


@pytest.mark.parametrize(
    "name", ["pirat", "pirate@v9", "no/pirate", "../pirate", "PIRATE", "x" * 999]
)
def test_an_unknown_model_is_a_404_that_names_it(daemon, name):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(daemon, name)
    assert name[:60] in str(caught.value)


def _broken(kind: str, directory: Path) -> Path:
    """A copy of a good adapter with one thing wrong."""
    shutil.copytree(EXAMPLES / "pirate-v1", directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    weights = directory / "adapter_model.safetensors"
    match kind:
        case "config":
            (directory / "adapter_config.json").unlink()
        case "pickle":
            weights.rename(directory / "adapter_model.bin")
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "dora":
            (directory / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    return directory


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("missing", "path.not_found"),
        ("config", "adapter.config_missing"),
        ("pickle", "adapter.unsafe_format"),
        ("truncated", "adapter.weights_corrupt"),
        ("dora", "adapter.dora_unsupported"),
        ("rank", "adapter.rank_exceeds_max"),
        ("base", "adapter.base_mismatch"),
    ],
)
def test_a_wrong_adapter_is_refused_and_nothing_else_notices(
    daemon, tiny_model, random_adapter, demo_model, tmp_path, kind, code
):
    expected, _ = ask(daemon, "pirate")
    running = Stream(daemon, "pirate", 60)
    assert running.begun.wait(60)
    directory = tmp_path / kind
    if kind == "rank":
        random_adapter(demo_model, directory, 65, ("q_proj",))
    elif kind == "base":
        random_adapter(tiny_model("llama"), directory, 8, ("q_proj", "v_proj"))
    elif kind != "missing":
        _broken(kind, directory)
    done = daemon.loractl("push", "pirate", str(directory), "--json", check=False)
    error = json.loads(done.stderr)["error"]
    assert (error["code"], bool(error["hint"])) == (code, True), error
    assert done.returncode == (5 if kind == "missing" else 6)
    assert not done.stdout
    running.join()
    assert running.text.startswith(expected[:40])
    assert ask(daemon, "pirate") == (expected, "default/pirate@v1")
    versions = json.loads(daemon.loractl("show", "pirate", "--json").stdout)["versions"]
    assert [version["version"] for version in versions] == ["v1", "v2"]


def test_push_is_idempotent_and_unload_gives_the_pages_back(daemon):
    again = daemon.loractl("push", "json", str(EXAMPLES / "json"))
    assert "unchanged" in again.stdout
    text, _ = ask(daemon, "json")
    before = daemon.admin.status()["engine"]["adapter_pages"]
    assert daemon.loractl("unload", "json", check=False).returncode == 7  # it is live
    freed = json.loads(daemon.loractl("unload", "json", "--force", "--json").stdout)
    assert freed["freed_device_bytes"] > 1_000_000
    assert daemon.admin.status()["engine"]["adapter_pages"] < before
    assert ask(daemon, "json") == (text, "default/json@v1")  # loaded again, the same
    assert daemon.admin.status()["engine"]["adapter_pages"] == before


def test_a_client_that_goes_away_gives_its_pages_back(daemon):
    stream = daemon.openai().chat.completions.create(
        model="pirate",
        messages=QUESTION,
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while daemon.admin.status()["engine"]["running"]:
        assert time.monotonic() < deadline, "an abandoned request goes on"
        time.sleep(0.05)
    assert daemon.admin.status()["engine"]["kv_pages"] == 0


def test_curl_on_both_doors(daemon, demo_model):
    """vLLM's routes answer on the admin socket, and the public port cannot change anything."""
    load = {"lora_name": "curled", "lora_path": str(EXAMPLES / "pirate-v2")}
    public = _curl(f"{daemon.url}/v1/load_lora_adapter", load)
    assert public["error"]["code"] == "route.not_found"
    admin = ("--unix-socket", str(daemon.socket))
    _curl("http://localhost/v1/load_lora_adapter", load, *admin)
    assert ask(daemon, "curled")[0] == ask(daemon, "pirate@v2")[0]
    _curl("http://localhost/v1/unload_lora_adapter", {"lora_name": "curled"}, *admin)
    with pytest.raises(openai.NotFoundError):
        ask(daemon, "curled")
    models = [model.id for model in daemon.openai().models.list()]
    assert models == [demo_model.name, "json", "pirate"]


def _curl(url: str, body: dict, *options: str) -> dict:
    command = ["curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"text": done.stdout}


def test_state_survives_kill_9_and_sigterm_lets_answers_end(start_daemon, demo_model):
    daemon = start_daemon(demo_model, "--slab-bytes", "512MiB", "--max-model-len", "1024")
    for folder in ("pirate-v1", "pirate-v2"):
        daemon.loractl("push", "pirate", str(EXAMPLES / folder))
    daemon.loractl("promote", "pirate", "v2")
    expected = ask(daemon, "pirate")
    daemon.kill()
    daemon.start()
    assert ask(daemon, "pirate") == expected
    daemon.loractl("rollback", "pirate", "--to", "v1")

    running = Stream(daemon, "pirate", 80)
    assert running.begun.wait(60)
    assert daemon.stop() == 0
    running.join()
    assert running.served_by == "default/pirate@v1"
    assert len(running.text) > 80, "the answer was cut off by SIGTERM"
    assert not daemon.socket.exists()
    assert daemon.loractl("status", check=False).returncode == 3
    daemon.start()
    assert ask(daemon, "pirate")[1] == "default/pirate@v1"
    assert daemon.stop() == 0


def test_small_promises_of_the_commands(daemon, tmp_path):
    """gc without a policy wants a number; a generation guards a push; --detach keeps the code."""
    aimless = daemon.loractl("gc", check=False)
    assert (aimless.returncode, "registry.keep is not set" in aimless.stderr) == (2, True)
    assert daemon.loractl("gc", "nobody", "--keep", "1", check=False).returncode == 5
    refused = daemon.loractl(
        "push", "guarded", str(EXAMPLES / "json"), "--if-generation", "7", check=False
    )
    assert (refused.returncode, "[generation.changed]" in refused.stderr) == (7, True)
    assert "guarded" not in daemon.loractl("list").stdout
    command = [sys.executable, "-m", "lorad.main", "start", "--model", str(daemon.model)]
    command += ["--socket", str(daemon.socket), "--detach", "--log-file", str(tmp_path / "log")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (second.returncode, "[daemon.already_running]" in second.stderr) == (7, True)
