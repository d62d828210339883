"""The format cases re-created from public bug reports, answered by `loractl inspect --json`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loractl.main import app

MAKE_CASES = Path(__file__).resolve().parents[2] / "shared/cases/make_cases.py"

# The reasons of cases.json, where they are not our code without its prefix.
REASONS = {
    "adapter.no_module_matched": "unmatched_keys",
    "adapter.unmatched_tensor": "unmatched_keys",
}


@pytest.mark.skipif(not MAKE_CASES.exists(), reason="shared/cases is not beside the checkout")
def test_no_format_case_is_answered_wrong(tmp_path: Path) -> None:
    subprocess.run([sys.executable, MAKE_CASES, tmp_path, "--verify"], check=True)
    cases = json.loads((tmp_path / "cases.json").read_text())
    answers = {case["id"]: answer(tmp_path, case) for case in cases if case["kind"] == "format"}
    assert len(answers) == 22
    results = tmp_path / "results.json"
    results.write_text(json.dumps(answers))
    scored = subprocess.run(
        [sys.executable, MAKE_CASES, tmp_path, "--score", results], capture_output=True, text=True
    )
    assert scored.returncode == 0, scored.stdout


def answer(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    limit = str(case["server"]["max_lora_rank"])
    arguments = [str(root / case["dir"]), "--base", str(root / "bases" / case["base"])]
    run = CliRunner().invoke(
        app, ["inspect", *arguments, "--max-lora-rank", limit, "--stats", "--json"]
    )
    if run.exit_code:
        assert run.exit_code in (5, 6), run.output
        code = json.loads(run.stderr)["error"]["code"]
        return {"outcome": "reject", "reason": REASONS.get(code, code.removeprefix("adapter."))}
    report = json.loads(run.stdout)
    warnings = [found["code"].removeprefix("adapter.") for found in report["warnings"]]
    modules = {
        path: {"rank": module["rank"], "scaling": module["scaling"]}
        for path, module in report["modules"].items()
    }
    outcome = "warn" if warnings else "accept"
    return {"outcome": outcome, "warnings": warnings, "modules": modules}
