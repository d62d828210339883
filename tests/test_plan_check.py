"""`loractl plan --check` against a real daemon: equal to the byte, and not so when it is not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from loractl.main import app

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def served(start_daemon, demo_model, random_adapter, tmp_path_factory):
    """A daemon with an adapter of mixed ranks on the device and another one in both tiers."""
    root = tmp_path_factory.mktemp("check")
    model = demo_model
    # In bf16, where the norms, which stay float32, make a difference.
    options = ("--dtype", "bfloat16", "--slab-bytes", "64MiB", "--max-model-len", "256")
    daemon = start_daemon(model, *options)
    adapters = {
        "mixed": random_adapter(model, root / "m", 8, ALL, rank_pattern={"q_proj": 3, "v_proj": 5}),
        "plain": random_adapter(model, root / "p", 4, ("q_proj", "v_proj")),
    }
    for name, directory in adapters.items():
        daemon.loractl("push", name, str(directory))
        daemon.loractl("load", f"{name}@v1")
    return daemon, model


def check(served, *words, code=0, model=None):
    daemon, own = served
    done = daemon.loractl(
        "plan", "--model", str(model or own), "--check", "--json", *words, check=False
    )
    assert done.returncode == code, done.stderr
    return {row["what"]: row for row in json.loads(done.stdout)["rows"]}


def test_everything_is_equal_to_the_byte(served):
    rows = check(served)
    assert all(row["equal"] and row["planned"] == row["running"] for row in rows.values()), rows
    assert {"weights, bytes", "page, bytes", "pages", "slab, bytes"} < set(rows)
    for name in ("mixed@v1", "plain@v1"):
        assert rows[f"{name} on the device"]["planned"] > 0
        assert rows[f"{name} in host memory"]["planned"] > 0
    assert rows["pages of adapters"]["planned"] > 0
    assert rows["host cache, bytes"]["planned"] > 0


def test_another_model_differs_and_the_exit_code_says_so(served, tiny_model):
    rows = check(served, model=tiny_model("qwen2"), code=1)
    assert not rows["weights, bytes"]["equal"]


def test_the_screen_names_what_is_compared(served):
    daemon, model = served
    screen = daemon.loractl("plan", "--model", str(model), "--check").stdout
    assert "mixed@v1 on the device" in screen
    assert "differs" not in screen


def test_without_a_daemon_it_says_so(demo_model, tmp_path):
    words = ["plan", "--model", str(demo_model), "--check", "--socket", str(tmp_path / "none")]
    assert CliRunner().invoke(app, words).exit_code == 3
