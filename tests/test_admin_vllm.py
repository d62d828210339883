"""vLLM's routes for adapters on the admin socket."""

from __future__ import annotations

from pathlib import Path

from admin_process import Daemon, error, live
from admin_process import adapters as adapters
from admin_process import daemon as daemon


def test_vllm_scripts_work(daemon: Daemon, adapters: list[Path]) -> None:
    load = {"lora_name": "sql", "lora_path": str(adapters[0])}
    first = daemon.post("/v1/load_lora_adapter", load)
    assert (first.status_code, first.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    twice = daemon.post("/v1/load_lora_adapter", load)
    assert error(twice) == (400, "request.invalid")
    assert "has already been loaded" in twice.text
    in_place = {**load, "lora_path": str(adapters[1]), "load_inplace": True}
    assert daemon.post("/v1/load_lora_adapter", in_place).status_code == 200
    assert live(daemon, "sql") == "v2"
    gone = daemon.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
    assert live(daemon, "sql") is None
    again = daemon.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert error(again) == (404, "adapter.not_found")
    assert daemon.post("/v1/load_lora_adapter", load).status_code == 200
    assert live(daemon, "sql") == "v1"  # the same content is the same version


def test_vllm_load_fetches_nothing(daemon: Daemon, tmp_path: Path) -> None:
    for path in ("org/adapter", "../x", "http://169.254.169.254/"):
        answer = daemon.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        assert error(answer) == (400, "request.invalid")
    absent = {"lora_name": "x", "lora_path": str(tmp_path / "absent")}
    assert error(daemon.post("/v1/load_lora_adapter", absent)) == (404, "path.not_found")
    assert error(daemon.post("/v1/load_lora_adapter", {"lora_name": "x"})) == (
        400,
        "request.invalid",
    )
