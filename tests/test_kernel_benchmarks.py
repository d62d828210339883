"""The kernels' benchmarks and the GPU check run, on tiny shapes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "kernels/bench" / script), *words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpu_check_finds_the_cpu_right(tmp_path):
    result = tmp_path / "check.json"
    run(
        "gpu_check.py",
        *["--device", "cpu", "--tiny", "--batch", "2", "--steps", "3"],
        "--json",
        str(result),
    )
    report = json.loads(result.read_text())
    assert report["failures"] == []
    assert report["checks"] > 200
    assert {"prefill attention", "arriving and moving", "probe, torch.bfloat16"} <= set(
        report["sections"]
    )
    steps = [(step["mode"], step["adapters"]) for step in report["steps"]]
    assert steps == [("eager", 0), ("eager", 1), ("graph", 0), ("graph", 1)]
    assert "tiny: 4 of 4 answers are the same with graphs" in report["notes"]


@pytest.fixture
def report(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "kernels/bench")
    script = importlib.import_module("report")
    return script.Report("a test", 100, tmp_path / "check.md", tmp_path / "check.json")


def fault() -> None:
    raise RuntimeError("an illegal memory access")


def test_a_section_that_raises_has_failed_and_the_next_goes_on(report, tmp_path):
    report.section("first", lambda: report.check(True, "right"))
    report.section("second", fault)
    report.section("third", lambda: report.check(True, "right"))
    report.section("fourth", fault, seconds=200)
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["checks"] == 3 and list(written["sections"]) == ["first", "second", "third"]
    (failure,) = written["failures"]
    assert failure.startswith("second: ") and "RuntimeError: an illegal memory access" in failure
    assert written["notes"] == ["left out, 100 s were left: fourth"]
    assert failure in (tmp_path / "check.md").read_text()


def test_nothing_is_checked_on_a_device_that_is_lost(report, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["report"], "synchronize", fault)
    report.section("first", lambda: None)
    report.section("second", lambda: report.check(True, "right"))
    written = json.loads((tmp_path / "check.json").read_text())
    assert list(written["sections"]) == ["first"] and written["checks"] == 1
    assert written["notes"] == ["the device is lost since first; the rest was left out"]


def test_steps_that_do_not_wait_for_an_adapter_fail_the_check(report, monkeypatch):
    """The checks of what arrives and moves see NaN, and an adapter at its old place."""
    checks = importlib.import_module("step_checks")
    script = importlib.import_module("gpu_check")
    config, device = script.model_config("tiny"), torch.device("cpu")
    decoder = script.random_decoder(config, torch.float32, device, 512)
    with torch.inference_mode():
        monkeypatch.setattr(checks.Uploader, "start", lambda *_: checks.Upload(torch.empty(0)))
        report.section("never there", lambda: checks.check_memory(report, decoder))
        assert len(report.failures) == 4
        monkeypatch.undo()
        report.failures.clear()
        monkeypatch.setattr(checks.Slab, "move_run", lambda *_: None)
        report.section("never moved", lambda: checks.check_memory(report, decoder))
    assert [what.endswith("after a move") for what in report.failures] == [True, True]


def test_bench_lora_reports_every_point(tmp_path):
    result = tmp_path / "lora.json"
    words = [
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--ranks",
        "8",
        "mixed",
        "--batches",
        "1",
        "8",
        "--passes",
        "1",
    ]
    table = run("bench_lora.py", *words, "--json", str(result))
    points = json.loads(result.read_text())
    assert len(points) == 2 * 2 * 4
    assert len(table.splitlines()) == len(points) + 2
    distinct = [p for p in points if p["popularity"] == "distinct" and p["batch"] == 8]
    assert [p["adapters"] for p in distinct] == [8, 8]
    assert all(p["ours"] > 0 and p["copy"] > 0 for p in points)
