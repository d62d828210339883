"""`loractl plan` as a user meets it: screens, documents, settings, pictures, exit codes."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
import xml.etree.ElementTree as ET
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from typer.testing import CliRunner

from loractl.main import app

ROOT = Path(__file__).parents[1]
BASE = ["plan", "--model", "llama-3.1-8b"]
FLEET = [*BASE, "--rank", "16", "--gpu", "h100-80g", "--fleet", "500", "--context", "2048"]
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def document(*words, code=0):
    return json.loads(run(*words, "--json", code=code).stdout)


def lint_codes(*words, code=0):
    return [lint["code"] for lint in document(*words, code=code)["lints"]]


@pytest.fixture
def tiny_model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


# Bytes


def test_one_adapter_from_a_name_a_file_and_a_directory(tiny_model):
    assert (
        "13,631,488 B, 7 pages; q_proj, v_proj"
        in run(*BASE, "--rank", 16, "--targets", "qv").stdout
    )
    by_file = document("plan", "--model", tiny_model / "config.json", "--rank", 4)
    by_directory = document("plan", "--model", tiny_model, "--rank", 4)
    assert by_file["adapters"] == by_directory["adapters"]
    # Per layer 4 x (q 64+64, k 64+32, v 64+32, o 64+64, and three of 64+96), two bytes each.
    assert by_file["adapters"][0]["bytes"] == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160) * 2


def test_document_has_schema_and_exact_parts():
    found = document(*FLEET, "--rate", 10, "--host-ram", "64GiB")
    assert found["schema"] == "lorad/plan/v1"
    assert found["adapters"][0]["bytes"] == 83_886_080
    assert sum(found["adapters"][0]["bytes_by_target"].values()) == 83_886_080
    assert found["page_bytes"] == 2 * 1024 * 1024
    budget = found["budget"]
    assert budget["weights"] == found["model"]["weight_bytes"] == 16_060_522_496
    assert budget["pages"] == budget["slab"] // budget["page"]
    assert budget["kv_pages"] + budget["adapter_pages"] == budget["pages"]
    assert budget["kv_pages"] == 32 * 2048 // 16
    assert found["buys"]["host_adapters"] == 64 * 2**30 // 83_886_080


def test_a_slab_alone_is_a_budget_for_a_cpu(tiny_model):
    words = ["plan", "--model", tiny_model, "--rank", 4, "--context", 64, "--concurrency", 2]
    found = document(*words, "--slab", "1MiB")
    page = 16 * 2 * 2 * 2 * 16 * 2  # tokens, layers, K and V, heads, head_dim, bytes
    assert found["budget"]["pages"] == 2**20 // page
    assert found["budget"]["scratch"] is None


def test_tensor_parallelism_is_per_gpu():
    words = ["plan", "--model", "llama-3.1-70b", "--rank", 16, "--vram", "200GiB"]
    one, eight = (document(*words, "--context", 1024, "--tp", tp) for tp in (1, 8))
    assert eight["budget"]["kv_per_token"] * 8 == one["budget"]["kv_per_token"]
    assert (
        one["adapters"][0]["bytes"] / 8
        < eight["adapters"][0]["bytes"]
        < one["adapters"][0]["bytes"]
    )


def test_fp8_kv_halves_pages_not_adapters():
    auto, fp8 = document(*BASE, "--rank", 8), document(*BASE, "--rank", 8, "--kv-dtype", "fp8")
    assert fp8["page_bytes"] * 2 == auto["page_bytes"]
    assert fp8["adapters"][0]["bytes"] == auto["adapters"][0]["bytes"]


def test_adapters_are_read_from_their_files(tmp_path, tiny_model):
    torch = pytest.importorskip("torch")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = {key: value for key, value in TINY.items() if key != "model_type"}
    for name, rank, targets in [("small", 4, ["q_proj", "v_proj"]), ("large", 24, "all-linear")]:
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config))
        lora = LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM")
        get_peft_model(base, lora).save_pretrained(tmp_path / "runs" / name)
    found = document("plan", "--model", tiny_model, "--adapters", tmp_path / "runs")
    assert [(kind["label"], kind["rank"]) for kind in found["adapters"]] == [
        ("large", 24),
        ("small", 4),
    ]
    by_rank = document("plan", "--model", tiny_model, "--rank", 4, "--targets", "qv")
    assert found["adapters"][1]["bytes"] == by_rank["adapters"][0]["bytes"]
    # A kind of the fleet that is named in the counts is counted as itself.
    counts = tmp_path / "counts.csv"
    counts.write_text("small,90\nlarge,10\n")
    words = ["plan", "--model", tiny_model, "--adapters", tmp_path / "runs", "--slab", "64MiB"]
    fleet = document(*words, "--popularity", f"file:{counts}", "--context", 64)
    assert fleet["traffic"]["fleet"] == 2
    assert fleet["recommended"]["max_lora_rank"] == 24


def test_spectrum_says_what_rank_an_adapter_needs(tmp_path, tiny_model):
    """A rank-64 adapter whose deltas have rank 2, stored in 64 columns."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        a, b = torch.zeros(64, 64), torch.zeros(64, 64)
        a[:2], b[:, :2] = torch.randn(2, 64), torch.randn(64, 2)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    directory = tmp_path / "wide"
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    words = ["plan", "--model", tiny_model, "--adapters", directory]
    (lint,) = document(*words, "--spectrum")["lints"]
    assert lint["code"] == "rank-over-spectrum"
    assert lint["message"].startswith("wide (rank 64) keeps 99 % of the energy")
    assert "at rank 2 or less" in lint["message"]
    assert lint["cost_bytes"] == 2 * (64 - 2) * 128 * 2
    (guess,) = document(*words)["lints"]
    assert guess["cost_bytes"] < lint["cost_bytes"]


# Recommendations


def test_the_binding_limit_is_named():
    def binds(*words):
        return document(*words)["recommended"]["binds"]

    assert binds(*FLEET, "--miss", "40%", "--concurrency", 4) == "miss target"
    assert binds(*FLEET, "--miss", "90%", "--concurrency", 32) == "adapters in one batch"
    assert binds(*FLEET, "--miss", "0%", "--rank", 4) == "fleet size"
    assert binds(*FLEET, "--miss", "0%", "--concurrency", 150) == "device memory"


def test_max_loras_is_the_least_that_meets_the_miss_target():
    found = document(*FLEET, "--popularity", "zipf:1.2", "--miss", "10%", "--concurrency", 4)
    recommended = found["recommended"]
    assert recommended["max_loras"] == recommended["slots_for_miss"]
    assert recommended["at_max_loras"]["rate"] >= 0.9
    smaller = [
        row
        for row in document(*FLEET, "--popularity", "zipf:1.2", "--sweep", "slots")["sweep"]["rows"]
        if row["slots"] < recommended["max_loras"]
    ]
    assert all(row["lru"] < 0.9 for row in smaller)


def test_host_cache_is_the_last_hour_and_a_fifth_more():
    found = document(*FLEET, "--rate", 0.02, "--popularity", "uniform")["recommended"]
    assert 60 < found["unique_last_hour"] < 72  # of 500, in 72 requests
    assert found["max_cpu_loras"] >= found["max_loras"]
    tight = document(*FLEET, "--rate", 20, "--host-ram", "40GiB")["recommended"]
    assert tight["max_cpu_loras"] <= max(tight["max_loras"], 40 * 2**30 // 83_886_080)


def test_trace_of_a_hundred_thousand_requests_in_five_seconds(tmp_path):
    draw = random.Random(7)
    weights = [1 / (i + 1) for i in range(1000)]
    adapters = draw.choices(range(1000), weights, k=100_000)
    trace = tmp_path / "trace.csv"
    lines = (f"{i * 0.05:.2f},acme/a{adapter}\n" for i, adapter in enumerate(adapters))
    trace.write_text("time,adapter\n" + "".join(lines))
    start = time.perf_counter()
    found = document(*BASE, "--rank", "8,16,64", "--gpu", "h100-80g", "--trace", trace)
    assert time.perf_counter() - start < 5
    assert found["traffic"]["fleet"] == 1000
    assert found["traffic"]["rate"] == pytest.approx(20, rel=0.01)
    assert found["recommended"]["device"]["method"] == "replayed"


# Comparison


def test_compare_says_what_others_reserve():
    found = document(
        *BASE, "--rank", 64, "--max-loras", 8, "--compare", "vllm,sglang", "--targets", "qv"
    )
    vllm, sglang = found["compare"]
    assert round(vllm["high_bytes"] / 2**30, 2) == 2.75
    assert vllm["ratio"] == pytest.approx(6.775, abs=0.001)
    assert sglang["slots"] == 8
    assert sglang["high_bytes"] > sglang["true_bytes"]  # k comes along with q and v
    screen = run(*BASE, "--rank", 64, "--max-loras", 8, "--compare", "vllm").stdout
    assert "2.8 GiB" in screen
    assert "of it embeddings and head" in screen


# Exit codes and messages


def test_what_does_not_fit_exits_with_one_and_says_by_how_much():
    words = ["plan", "--model", "llama-3.1-70b", "--rank", 16, "--gpu", "h100-80g"]
    screen = run(*words, code=1).stdout
    assert "It does not fit" in screen
    assert "short by" in screen
    crowded = [*BASE, "--rank", 16, "--gpu", "l40s", "--concurrency", 64]
    found = run(*crowded, code=1).stdout
    most = int(re.search(r"it would fit +(\d+)", found).group(1))
    run(*BASE, "--rank", 16, "--gpu", "l40s", "--concurrency", most)
    run(*BASE, "--rank", 16, "--gpu", "l40s", "--concurrency", most + 3, code=1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--rank"),
        (["--rank", "0"], "'0'"),
        (["--rank", "513"], "'513'"),
        (["--rank", "8,x"], "'x'"),
        (["--rank", "8", "--targets", "w1"], "'w1'"),
        (["--rank", "8", "--dtype", "int8"], "'int8'"),
        (["--rank", "8", "--kv-dtype", "int4"], "'int4'"),
        (["--rank", "8", "--gpu", "k80"], "'k80'"),
        (["--rank", "8", "--vram", "much"], "'much'"),
        (["--rank", "8", "--gpu", "h200", "--vram", "80GiB"], "--vram"),
        (["--rank", "8", "--fleet", "5", "--miss", "200%"], "'200%'"),
        (["--rank", "8", "--fleet", "5", "--tokens", "512"], "'512'"),
        (["--rank", "8", "--popularity", "zipf:1"], "--fleet"),
        (["--rank", "8", "--sweep", "slots"], "--fleet"),
        (["--rank", "8", "--sweep", "context"], "--gpu"),
        (["--rank", "8", "--sweep", "layers"], "'layers'"),
        (["--rank", "8", "--compare", "tgi"], "'tgi'"),
        (["--rank", "8", "--emit", "helm"], "'helm'"),
        (["--rank", "8", "--routing", "dns"], "'dns'"),
        (["--rank", "8", "--speculation", "magic"], "'magic'"),
        (["--rank", "8", "--plot", "plan.pdf"], "'plan.pdf'"),
        (["--rank", "8", "--adapters", "."], "--adapters"),
        (["--rank", "8", "--spectrum"], "--adapters"),
    ],
)
def test_wrong_usage_exits_with_two_and_names_the_word(words, named):
    result = run(*BASE, *words, code=2)
    assert named in result.stderr
    assert result.stdout == ""


def test_wrong_models_are_named(tmp_path):
    assert (
        "did you mean llama-3.1-8b"
        in run("plan", "--model", "lama-3.1-8b", "--rank", 8, code=5).stderr
    )
    broken = tmp_path / "config.json"
    broken.write_text("{not json")
    assert "cannot be read" in run("plan", "--model", broken, "--rank", 8, code=2).stderr
    for text in ("[" * 100_000, "[]", "\x00", ""):
        broken.write_text(text)
        run("plan", "--model", broken, "--rank", 8, code=2)
    broken.write_text(json.dumps({**TINY, "hidden_size": -4}))
    error = json.loads(run("plan", "--model", broken, "--rank", 8, "--json", code=2).stderr)
    assert error["error"]["code"] == "model.invalid"
    assert error["error"]["details"] == {"key": "hidden_size"}


def test_foreign_names_cannot_write_to_the_terminal(tmp_path):
    counts = tmp_path / "counts.csv"
    counts.write_text("\x1b[31mred-v1,3\n\x1b[31mred-v2,1\n")
    screen = run(*BASE, "--rank", 8, "--popularity", f"file:{counts}").stdout
    assert "versions-as-names" in screen
    assert "\x1b" not in screen


# Settings


def test_emitted_config_is_toml_with_the_recommended_numbers():
    text = run(*FLEET, "--emit", "lorad").stdout
    found = tomllib.loads(text)
    recommended = document(*FLEET)["recommended"]
    assert found["model"]["path"] == "meta-llama/Llama-3.1-8B"
    assert found["engine"]["max_loras"] == recommended["max_loras"]
    assert found["engine"]["max_cpu_loras"] == recommended["max_cpu_loras"]
    assert found["engine"]["max_lora_rank"] == 16
    assert found["memory"] == {"gpu_memory_utilization": 0.9, "block_size": 16}
    slab = tomllib.loads(run(*BASE, "--rank", 8, "--slab", "40GiB", "--emit", "lorad").stdout)
    assert slab["memory"]["slab_bytes"] == 40 * 2**30


def test_emitted_flags_use_what_the_engines_accept():
    vllm = run(*FLEET, "--rank", 24, "--emit", "vllm").stdout
    assert "--max-lora-rank 32" in vllm
    sglang = run(*FLEET, "--rank", 24, "--targets", "qv", "--emit", "sglang").stdout
    assert "--max-lora-rank 24" in sglang
    assert "--lora-target-modules q_proj v_proj" in sglang


@pytest.mark.parametrize(("replicas", "kind"), [(1, "Deployment"), (3, "StatefulSet")])
def test_emitted_manifest_routes_by_adapter_and_keeps_the_store(replicas, kind):
    text = run(*FLEET, "--replicas", replicas, "--emit", "k8s").stdout
    parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
    pod = parts[kind]["spec"]["template"]["spec"]
    assert parts[kind]["spec"]["replicas"] == replicas
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    hashing = parts["DestinationRule"]["spec"]["trafficPolicy"]["loadBalancer"]["consistentHash"]
    assert hashing == {"httpHeaderName": "x-lora-adapter"}
    tomllib.loads(parts["ConfigMap"]["data"]["lorad.toml"])
    claims = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert bool(claims) == ("PersistentVolumeClaim" in parts) == (replicas == 1)
    assert bool(parts[kind]["spec"].get("volumeClaimTemplates")) == (replicas > 1)


# Sweeps, explanation, pictures


def test_sweep_by_rank_is_linear_and_the_other_engine_a_staircase():
    rows = document(*BASE, "--rank", 16, "--gpu", "h200", "--sweep", "rank")["sweep"]["rows"]
    by_rank = {row["rank"]: row for row in rows}
    assert by_rank[512]["nbytes"] == 512 * by_rank[1]["nbytes"]
    assert by_rank[24]["vllm_slot"] == by_rank[32]["vllm_slot"]
    assert by_rank[8]["resident"] > by_rank[64]["resident"] > 0


def test_sweep_by_context_and_its_table():
    words = [*BASE, "--rank", 16, "--gpu", "h200", "--sweep", "context"]
    rows = document(*words)["sweep"]["rows"]
    assert rows[-1]["context"] == 131_072
    assert rows[0]["kv_per_sequence"] == 1024 * 131_072
    assert [row["sequences"] for row in rows] == sorted(
        (row["sequences"] for row in rows), reverse=True
    )
    assert "131,072" in run(*words).stdout


def test_explanation_holds_the_numbers():
    screen = run(*FLEET, "--targets", "qv", "--compare", "vllm", "--explain", "--rate", 5).stdout
    assert "32 x 16 x (4096 + 1024) x 2 = 5,242,880" in screen
    assert "would say 16,777,216 B: +23%" in screen
    assert "32 layers x 2 x 8 KV heads x 128 x 2 = 131,072 B a token" in screen
    assert "sum 1 - (1 - p_i)^32" in screen
    assert document(*FLEET, "--explain")["explanation"]


def test_products_in_the_explanation_are_true():
    """Every `a x b x (c + d) x e = f` on the screen, recomputed."""
    screen = run("plan", "--model", "qwen3-30b-a3b", "--rank", 16, "--explain").stdout
    lines = re.findall(r"^ +\S+ +([\dx ()+]+|.*experts.*?) = ([\d,]+)$", screen, re.MULTILINE)
    assert len(lines) > 4
    for product, total in lines:
        expression = product.replace("experts", "").replace("x", "*")
        assert re.fullmatch(r"[\d *()+]+", expression)
        assert eval(expression) == int(total.replace(",", ""))


def test_plots(tmp_path):
    for name in ("plan.svg", "plan.html"):
        run(*FLEET, "--plot", tmp_path / name)
    root = ET.fromstring((tmp_path / "plan.svg").read_text())
    text = " ".join(root.itertext())
    assert "Memory of one adapter by rank" in text
    assert "max_loras" in text
    assert len(root.findall(".//{*}path")) > 10
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    bars = run(*FLEET, "--plot", "term").stdout
    assert "█" in bars
    assert "Requests that find their adapter" in bars


def test_png_needs_matplotlib_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib" in run(*FLEET, "--plot", tmp_path / "plan.png", code=2).stderr


def test_plot_into_a_missing_directory_is_an_error(tmp_path):
    assert "cannot be written" in run(*FLEET, "--plot", tmp_path / "no" / "p.svg", code=2).stderr


# The manual


def screens_of_the_manual():
    text = (ROOT / "docs/planning.md").read_text()
    return re.findall(r"^```console\n\$ loractl (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)


@pytest.mark.parametrize(("command", "screen"), screens_of_the_manual())
def test_screens_of_the_manual_are_real(command, screen):
    assert run(*shlex.split(command)).stdout.rstrip() == screen.rstrip()


def test_picture_of_the_manual_is_real(tmp_path):
    picture = "docs/img/plan-llama-3.1-8b.svg"
    text = " ".join((ROOT / "docs/planning.md").read_text().split())
    command = re.search(rf"`loractl (plan [^`]*--plot) {picture}`", text).group(1)
    run(*shlex.split(command), tmp_path / "new.svg")
    assert (tmp_path / "new.svg").read_text() == (ROOT / picture).read_text()


def test_every_finding_is_in_the_manual():
    codes = set(
        re.findall(
            r'^ +"([a-z]+(?:-[a-z]+)+)",$', (ROOT / "lorad/sizing/lints.py").read_text(), re.M
        )
    )
    text = (ROOT / "docs/planning.md").read_text()
    assert len(codes) >= 14
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []


# Findings


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("rank-headroom", ["--max-lora-rank", "64"]),
        ("rank-bucket", ["--rank", "24"]),
        ("rank-over-spectrum", ["--rank", "16,128"]),
        ("host-below-device", ["--max-loras", "64", "--max-cpu-loras", "16"]),
        ("process-per-adapter", ["--processes", "12"]),
        ("no-affinity", ["--replicas", "4", "--routing", "random", "--max-loras", "32"]),
        ("speculation-with-adapters", ["--speculation", "eagle"]),
        ("miss-unreachable", ["--concurrency", "150"]),
        ("loader-busy", ["--concurrency", "150", "--rate", "2500"]),
        ("context-beyond-model", ["--context", "200000", "--concurrency", "1", "--vram", "80G"]),
        ("scratch-tight", ["--gpu-memory-utilization", "0.99"]),
        ("tp-not-served", ["--tp", "2"]),
        ("family-not-served", ["--model", "gemma-2-9b"]),
        ("host-ram-short", ["--host-ram", "1GiB"]),
    ],
)
def test_findings(code, words):
    words = [word for word in FLEET if word not in ("--gpu", "h100-80g")] + words
    if "--vram" not in words:
        words += ["--gpu", "h100-80g"]
    assert code not in lint_codes(*FLEET, "--miss", "40%", "--host-ram", "64GiB")
    found = document(*words)["lints"]
    costs = {lint["code"]: (lint["cost_bytes"], lint["cost_ms"]) for lint in found}
    assert code in costs
    if not code.endswith("-served") and code != "context-beyond-model":
        assert any(cost and cost > 0 for cost in costs[code])


def test_versions_as_names_are_found_and_other_names_left_alone(tmp_path):
    counts = tmp_path / "counts.csv"
    words = [*BASE, "--rank", 16, "--popularity", f"file:{counts}"]
    counts.write_text(
        "acme/support-v1,5\nacme/support-v2,9\nacme/support@3,1\nother/support-v1,2\n"
    )
    (lint,) = [x for x in document(*words)["lints"] if x["code"] == "versions-as-names"]
    assert "acme/support: 3 names" in lint["message"]
    assert lint["cost_bytes"] == 2 * 83_886_080
    counts.write_text("acme/support,5\nacme/sales,9\nllama3,1\nqwen2,1\n")
    assert "versions-as-names" not in lint_codes(*words)


def test_rank_headroom_costs_what_the_slots_grow_by():
    found = document(*BASE, "--rank", 16, "--max-loras", 8, "--max-lora-rank", 64)["lints"]
    (lint,) = [x for x in found if x["code"] == "rank-headroom"]
    assert lint["cost_bytes"] == 8 * 48 * 2 * (2_621_440 + 2 * (128_256 + 4096))


# The hub, and what must not be loaded


class HubHandler(BaseHTTPRequestHandler):
    """Gives acme/tiny's config.json, and records what was asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        found = self.path == "/acme/tiny/resolve/main/config.json"
        body = json.dumps(TINY).encode() if found else b"{}"
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_hub_model_is_one_request_for_its_config(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }

    def plan(model):
        words = ["plan", "--model", model, "--rank", "4", "--json"]
        command = [sys.executable, "-m", "loractl.main", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    try:
        good, missing = plan("acme/tiny"), plan("acme/none")
    finally:
        server.shutdown()
        server.server_close()
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["model"]["layers"] == 2
    assert HubHandler.asked[0] == "/acme/tiny/resolve/main/config.json"
    assert all(path.endswith("/config.json") for path in HubHandler.asked)
    assert missing.returncode == 5
    assert json.loads(missing.stderr)["error"]["code"] == "model.not_found"


def test_a_plan_loads_nothing_heavy():
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from loractl.main import app\n"
        f"result = CliRunner().invoke(app, {[*FLEET, '--compare', 'vllm', '--explain']!r})\n"
        "assert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'huggingface_hub', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
