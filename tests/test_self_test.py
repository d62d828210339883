"""What a version must pass: finite values at push, and the engine's own path at promote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

WEIGHTS = "adapter_model.safetensors"


def altered(source: Path, target: Path, change) -> Path:
    """A copy of an adapter whose tensors went through `change(name, tensor)`."""
    shutil.copytree(source, target)
    tensors = safetensors.torch.load_file(target / WEIGHTS)
    changed = {name: change(name, tensor.clone()) for name, tensor in tensors.items()}
    safetensors.torch.save_file(changed, target / WEIGHTS, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def daemon(start_daemon, tiny_chat_model):
    return start_daemon(tiny_chat_model, "--slab-bytes", "64MiB", "--threads", "1")


@pytest.fixture(scope="module")
def good(random_adapter, tiny_chat_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "good"
    return random_adapter(tiny_chat_model, folder, 4, ("q_proj", "down_proj"), seed=5)


@pytest.fixture
def cats(daemon, good) -> str:
    """An adapter whose live version is the good one."""
    daemon.loractl("push", "cats", str(good), "--promote")
    return "cats"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_at_push(daemon, good, tmp_path, value) -> None:
    def poison(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "layers.1" in name and "lora_B" in name and "down_proj" in name:
            tensor[3, 1] = value
        return tensor

    bad = altered(good, tmp_path / "bad", poison)
    refused = daemon.loractl("push", "poisoned", str(bad), check=False)
    assert refused.returncode == 6
    assert "adapter.nonfinite_weights" in refused.stderr
    assert "layers.1.mlp.down_proj.lora_B" in refused.stderr
    assert daemon.loractl("show", "poisoned", check=False).returncode == 5


def test_zero_delta_is_pushed_with_a_warning_and_told_again_at_promote(
    daemon, good, tmp_path
) -> None:
    def no_effect(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.zero_() if "lora_B" in name else tensor

    idle = altered(good, tmp_path / "idle", no_effect)
    assert "every delta is zero" in daemon.loractl("push", "idle", str(idle)).stderr
    assert "those of the base model" in daemon.loractl("promote", "idle").stderr


def test_answers_with_nan_keep_a_version_from_the_name(daemon, good, cats, tmp_path) -> None:
    """Finite in the file, infinite on the way: only the engine's own path can tell."""

    def explode(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(3e38)

    wild = altered(good, tmp_path / "wild", explode)
    label = json.loads(daemon.loractl("push", cats, str(wild), "--json").stdout)["version"]
    refused = daemon.loractl("promote", cats, label["version"], check=False)
    assert refused.returncode == 6
    assert "selftest.failed" in refused.stderr
    assert "layers.0.self_attn.q_proj" in refused.stderr
    assert "too large for the serving dtype" in refused.stderr
    canary = daemon.loractl("canary", cats, label["version"], "--percent", "5", check=False)
    assert canary.returncode == 6
    shown = daemon.admin.adapter(cats)
    assert (shown["live"], shown["canary"]) == ("v1", None)
    answer = daemon.openai().completions.create(model=cats, prompt="Hi", max_tokens=4)
    assert answer.usage.completion_tokens > 0  # and nothing else has come to harm


def test_checks_guard_a_promote(daemon, good, random_adapter, tiny_chat_model, tmp_path) -> None:
    name = "guarded"
    daemon.loractl("push", name, str(good))
    client = daemon.openai()
    right = client.completions.create(model=f"{name}@v1", prompt="Say", max_tokens=6, temperature=0)
    text = right.choices[0].text
    chat = client.chat.completions.create(
        model=f"{name}@v1",
        messages=[{"role": "user", "content": "Say"}],
        max_tokens=6,
        temperature=0,
    )
    checks = tmp_path / "checks.jsonl"
    lines = [
        {"prompt": "Say", "must_contain": text[:4], "max_tokens": 6},
        {
            "messages": [{"role": "user", "content": "Say"}],
            "must_contain": [chat.choices[0].message.content],
            "max_tokens": 6,
        },
    ]
    checks.write_text("\n\n".join(map(json.dumps, lines)))
    moved = json.loads(daemon.loractl("promote", name, "--check", str(checks), "--json").stdout)
    assert (moved["to_version"], moved["checks"]) == ("v1", 2)
    assert moved["self_test"]["prompts"] == 5
    assert moved["self_test"]["effect"] > 0.01
    assert 0 < moved["self_test"]["delta_error"] < 1e-5

    other = random_adapter(tiny_chat_model, tmp_path / "v2", 4, ("q_proj",), seed=77, strength=3.0)
    daemon.loractl("push", name, str(other))
    refused = daemon.loractl("promote", name, "v2", "--check", str(checks), "--json", check=False)
    assert refused.returncode == 1
    error = json.loads(refused.stderr)["error"]
    assert error["code"] == "check.failed"
    assert {failure["check"] for failure in error["details"]["failed"]} <= {1, 2}
    assert daemon.admin.adapter(name)["live"] == "v1"


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"prompt": "x"}',
        '{"must_contain": "x"}',
        '{"prompt": "x", "messages": [], "must_contain": "y"}',
        '{"prompt": "x", "must_contain": 7}',
        '{"prompt": "x", "tokens": ["a"]}',
        '{"prompt": "x", "must_contain": "y", "max_tokens": 0}',
        '{"prompt": "x", "must_contian": "y"}',
    ],
)
def test_checks_that_cannot_be_read_are_refused(daemon, cats, tmp_path, line) -> None:
    checks = tmp_path / "checks.jsonl"
    checks.write_text(line)
    refused = daemon.loractl("promote", cats, "v1", "--check", str(checks), check=False)
    assert refused.returncode == 2, refused.stderr
