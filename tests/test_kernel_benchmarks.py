"""The kernels' benchmarks and the GPU check run, on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    assert report["checks"] > 50
    steps = [(step["mode"], step["adapters"]) for step in report["steps"]]
    assert steps == [("eager", 0), ("eager", 1), ("graph", 0), ("graph", 1)]
    assert "tiny: 4 of 4 answers are the same with graphs" in report["notes"]


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
