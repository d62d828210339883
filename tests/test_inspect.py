"""`loractl inspect` and `loractl resize`, from the command line to the bytes they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from loractl.inspect_report import layer_ranges
from loractl.main import app
from lorad.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, adapter_digest, open_adapter
from lorad.adapters.spectrum import measure, rank_for_energy, read_factor

BASE = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
SIZES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (56, 32),
    "mlp.up_proj": (56, 32),
    "mlp.down_proj": (32, 56),
}
Tensors = dict[str, np.ndarray]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def report(*arguments: object) -> dict[str, Any]:
    result = run("inspect", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["schema"] == "lorad/inspect/v1"
    return document


def error(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code != 0
    assert result.stdout == ""
    found: dict[str, Any] = json.loads(result.stderr)["error"]
    return {**found, "exit_code": result.exit_code}


def save(directory: Path, tensors: Tensors, **config: Any) -> Path:
    """A PEFT directory with float32 tensors, under the names given."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny/base",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        **config,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(settings))
    entries, position = {}, 0
    for name, values in tensors.items():
        span = [position, position + values.size * 4]
        entries[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": span}
        position = span[1]
    header = json.dumps(entries).encode()
    data = b"".join(values.astype("<f4").tobytes() for values in tensors.values())
    (directory / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


def factors(rank: int = 8, true_rank: int | None = None, leaves: tuple[str, ...] = ()) -> Tensors:
    """Random factors of every linear; `true_rank` leaves only that much in their product."""
    random = np.random.default_rng(3)
    tensors: Tensors = {}
    for layer in range(3):
        for sub, (height, width) in SIZES.items():
            if leaves and sub.rpartition(".")[2] not in leaves:
                continue
            a, b = random.standard_normal((rank, width)), random.standard_normal((height, rank))
            b[:, true_rank if true_rank is not None else rank :] *= 1e-4
            name = f"base_model.model.model.layers.{layer}.{sub}"
            tensors[f"{name}.lora_A.weight"] = a
            tensors[f"{name}.lora_B.weight"] = b
    return tensors


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(BASE))
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save(tmp_path / "adapter", factors())


# --- the report ---------------------------------------------------------------------------


def test_the_document(adapter: Path, base: Path) -> None:
    found = report(adapter, "--base", base)
    elements = 3 * 8 * sum(height + width for height, width in SIZES.values())
    assert found["served_bytes"] == found["allocated_bytes"] == 2 * elements
    assert found["file_bytes"] == (adapter / WEIGHTS_FILE).stat().st_size
    assert found["max_lora_rank"] == found["vllm_max_lora_rank"] == 8
    assert (found["modules_matched"], found["modules_present"]) == (21, 21)
    assert found["dtypes"] == ["F32"]
    assert found["base_model_name"] == "tiny/base"
    assert found["warnings"] == []
    assert found["digest"] is None
    down = next(group for group in found["groups"] if group["target"] == "down_proj")
    assert down == {
        "target": "down_proj",
        "rank": 8,
        "alpha": 16.0,
        "scaling": 2.0,
        "layers": [0, 1, 2],
        "dtypes": ["F32"],
        "file_bytes": 3 * 8 * 88 * 4,
        "served_bytes": 3 * 8 * 88 * 2,
    }
    module = found["modules"]["model.layers.2.self_attn.k_proj"]
    assert (module["rank"], module["scaling"], module["shape"]) == (8, 2.0, [16, 32])


def test_the_screen(adapter: Path, base: Path) -> None:
    result = run("inspect", adapter, "--base", base)
    assert result.exit_code == 0
    assert "21 of 21 matched" in result.stdout
    row = next(line for line in result.stdout.splitlines() if "k_proj" in line)
    assert row.split() == ["k_proj", "0-2", "8", "16", "2", "F32", "4.5", "KiB", "2.2", "KiB"]


def test_a_part_of_the_modules_is_counted(tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", factors(leaves=("q_proj", "up_proj")))
    found = report(tmp_path / "a", "--base", base / "config.json")
    assert (found["modules_matched"], found["modules_present"]) == (6, 21)
    assert found["targets"] == ["q_proj", "up_proj"]


def test_without_a_base_nothing_is_claimed_about_it(adapter: Path) -> None:
    found = report(adapter)
    assert found["base"] is found["modules_present"] is found["allocated_bytes"] is None


def test_a_base_of_other_shapes(adapter: Path, base: Path) -> None:
    (base / "config.json").write_text(json.dumps({**BASE, "num_key_value_heads": 4}))
    found = error("inspect", adapter, "--base", base)
    assert (found["code"], found["exit_code"]) == ("adapter.base_mismatch", 6)
    assert "[16, 32]" in found["message"]
    assert "[32, 32]" in found["message"]


def test_refusals_have_the_exit_codes_of_their_kind(adapter: Path, tmp_path: Path) -> None:
    assert error("inspect", tmp_path / "none")["exit_code"] == 5
    assert error("inspect", adapter, "--base", tmp_path / "none")["exit_code"] == 5
    assert error("inspect", adapter, "--max-lora-rank", 4)["code"] == "adapter.rank_exceeds_max"
    (adapter / WEIGHTS_FILE).unlink()
    assert error("inspect", adapter)["exit_code"] == 6
    shown = run("inspect", adapter)
    assert "[adapter.weights_missing]" in shown.stderr
    assert "hint:" in shown.stderr


def test_strict_makes_warnings_refusals(tmp_path: Path) -> None:
    directory = save(tmp_path / "a", factors(), base_model_name_or_path=None)
    assert run("inspect", directory).exit_code == 0
    result = run("inspect", directory, "--strict")
    assert result.exit_code == 6
    assert "base_name_missing" in result.stdout
    plain = save(tmp_path / "b", factors())
    assert run("inspect", plain, "--strict").exit_code == 0


def test_foreign_text_cannot_drive_the_terminal(tmp_path: Path) -> None:
    name = "evil\x1b[2J[red]x[/red]"
    directory = save(tmp_path / "a", factors(), base_model_name_or_path=name, target_modules=[name])
    result = run("inspect", directory)
    assert result.exit_code == 0
    assert "\x1b[2J" not in result.stdout
    assert "[red]x[/red]" in result.stdout
    tensors = {f"{name}.lora_A.weight": np.ones((8, 8)), **factors()}
    result = run("inspect", save(tmp_path / "b", tensors))
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("layers", "text"), [([0, 1, 2], "0-2"), ([1], "1"), ([0, 2, 3, 7], "0, 2-3, 7")]
)
def test_layer_ranges(layers: list[int], text: str) -> None:
    assert layer_ranges(layers) == text


# --- tensors ------------------------------------------------------------------------------


def dense(directory: Path) -> dict[str, np.ndarray]:
    """The deltas themselves, formed: the oracle for what is told without forming them."""
    with open_adapter(directory, None) as (found, source):
        return {
            module.path: module.scaling
            * (
                read_factor(source, module.b).astype(np.float64)
                @ read_factor(source, module.a).astype(np.float64)
            )
            for module in found.modules
        }


def test_norms_and_digest(adapter: Path) -> None:
    found = report(adapter, "--stats")
    assert found["digest"] == adapter_digest(adapter)
    for path, delta in dense(adapter).items():
        assert found["modules"][path]["norm"] == pytest.approx(np.linalg.norm(delta), rel=1e-9)
        assert "singular_values" not in found["modules"][path]


def test_singular_values_are_those_of_the_product(adapter: Path) -> None:
    found = report(adapter, "--spectrum")
    for path, delta in dense(adapter).items():
        values = np.linalg.svd(delta, compute_uv=False)[:8]
        module = found["modules"][path]
        np.testing.assert_allclose(module["singular_values"], values, rtol=1e-5)
        energy = np.cumsum(values**2) / np.sum(values**2)
        assert module["ranks"] == {
            "0.9": int(np.argmax(energy >= 0.9)) + 1,
            "0.99": int(np.argmax(energy >= 0.99)) + 1,
        }


def test_the_spectrum_sees_that_fewer_ranks_would_do(tmp_path: Path) -> None:
    directory = save(tmp_path / "a", factors(rank=8, true_rank=2))
    found = report(directory, "--spectrum")
    assert [group["rank_99"]["max"] for group in found["groups"]] == [2] * 7
    at_99 = found["resized"][1]
    assert (at_99["energy"], at_99["max_lora_rank"]) == (0.99, 2)
    assert at_99["served_bytes"] * 4 == found["served_bytes"]
    assert "75% less" in run("inspect", directory, "--spectrum").stdout


def test_rank_for_energy() -> None:
    assert [rank_for_energy((2, 1, 1), share) for share in (0.5, 0.7, 1.0)] == [1, 2, 3]
    assert rank_for_energy((0.0, 0.0), 0.9) == rank_for_energy((), 0.9) == 0


def test_ranks_beyond_the_matrix(tmp_path: Path) -> None:
    directory = save(tmp_path / "a", factors(rank=24, leaves=("k_proj",)), r=24)
    with open_adapter(directory, None) as (found, source):
        stats, _ = measure(found.modules, source, spectrum=True)
    assert [len(one.singular_values) for one in stats] == [16, 16, 16]


def test_nan_and_infinity_are_named(tmp_path: Path) -> None:
    tensors = factors()
    for name, value in (("layers.1.mlp.up_proj.lora_A", np.nan), ("layers.2.", np.inf)):
        full = next(key for key in tensors if name in key)
        tensors[full][1, 2] = value
    found = error("inspect", save(tmp_path / "a", tensors), "--stats")
    assert (found["code"], found["exit_code"]) == ("adapter.nonfinite_weights", 6)
    assert "layers.1.mlp.up_proj.lora_A" in found["message"]
    assert found["details"]["count"] == 2


def test_a_zero_delta_is_a_warning(tmp_path: Path) -> None:
    tensors = factors()
    for name in tensors:
        if ".lora_B" in name:
            tensors[name][:] = 0
    directory = save(tmp_path / "a", tensors)
    assert report(directory)["warnings"] == []  # headers alone cannot tell
    for option in ("--stats", "--spectrum"):
        codes = [found["code"] for found in report(directory, option)["warnings"]]
        assert codes == ["adapter.zero_delta"]
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"][0, 0] = 1
    found = report(save(tmp_path / "b", tensors), "--stats")["warnings"]
    assert [one["code"] for one in found] == ["zero_modules"]
    assert found[0]["details"]["count"] == 20


# --- resize -------------------------------------------------------------------------------


def test_resize_to_a_rank_is_the_best_approximation(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("resize", adapter, "--rank", 3, "-o", out).exit_code == 0
    found = report(out)
    assert {module["rank"] for module in found["modules"].values()} == {3}
    before, after = dense(adapter), dense(out)
    for path, delta in before.items():
        u, values, vt = np.linalg.svd(delta, full_matrices=False)
        best = (u[:, :3] * values[:3]) @ vt[:3]
        np.testing.assert_allclose(after[path], best, atol=1e-4 * values[0])


def test_resize_by_energy_gives_each_module_its_rank(tmp_path: Path) -> None:
    tensors = factors(rank=8, true_rank=2)
    tensors |= factors(rank=8, true_rank=5, leaves=("k_proj",))
    source, out = save(tmp_path / "a", tensors), tmp_path / "out"
    result = run("resize", source, "--energy", 0.999, "-o", out, "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == "lorad/resize/v1"
    assert document["max_lora_rank"] == {"before": 8, "after": 5}
    assert document["least_energy_kept"] >= 0.999
    ranks = {path: module["rank"] for path, module in report(out)["modules"].items()}
    assert set(ranks.values()) == {2, 5}
    assert all((rank == 5) == path.endswith("k_proj") for path, rank in ranks.items())
    after = dense(out)
    for path, delta in dense(source).items():
        lost = np.linalg.norm(after[path] - delta) / np.linalg.norm(delta)
        assert lost**2 < 1 - 0.999 + 1e-6


def test_resize_leaves_what_is_small_enough_bit_for_bit(tmp_path: Path) -> None:
    tensors = factors(rank=8)
    small = factors(rank=2, leaves=("q_proj",))
    config = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 7}, "use_rslora": True}
    source = save(tmp_path / "a", {**tensors, **small}, **config)
    out = tmp_path / "out"
    assert run("resize", source, "--rank", 4, "-o", out).exit_code == 0
    before, after = report(source)["modules"], report(out)["modules"]
    path = "model.layers.1.self_attn.q_proj"
    assert after[path] == before[path]
    assert after["model.layers.1.mlp.up_proj"]["scaling"] == 1.0
    np.testing.assert_array_equal(dense(out)[path], dense(source)[path])


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_resize_keeps_the_dtype(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    kind = {"F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    source, out = save(tmp_path / "a", factors()), tmp_path / "out"
    tensors = {key: torch.tensor(value).to(kind) for key, value in factors().items()}
    save_file(tensors, source / WEIGHTS_FILE)
    assert run("resize", source, "--rank", 7, "-o", out).exit_code == 0
    assert report(out)["dtypes"] == [dtype]
    after = dense(out)
    for path, delta in dense(source).items():
        u, values, vt = np.linalg.svd(delta, full_matrices=False)
        best = (u[:, :7] * values[:7]) @ vt[:7]
        np.testing.assert_allclose(after[path], best, atol=1e-2 * values[0])


def test_peft_loads_what_resize_wrote(tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(1)  # of the model's own weights
    source = save(
        tmp_path / "a",
        {**factors(rank=8, true_rank=3), **factors(rank=8, true_rank=6, leaves=("v_proj",))},
        use_rslora=True,
        target_modules=[sub.rpartition(".")[2] for sub in SIZES],
    )
    out = tmp_path / "out"
    assert run("resize", source, "--energy", 0.9999, "-o", out).exit_code == 0
    model = LlamaForCausalLM(LlamaConfig(**BASE)).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        small = PeftModel.from_pretrained(model, str(out))
        after = small(tokens).logits
        full = PeftModel.from_pretrained(small.unload(), str(source))(tokens).logits
    assert (full - plain).abs().max() > 0.1
    torch.testing.assert_close(after, full, atol=0.02, rtol=0.02)


def test_resize_refuses_what_it_cannot_do(adapter: Path, tmp_path: Path) -> None:
    for options in ((), ("--rank", 4, "--energy", 0.9)):
        found = error("resize", adapter, "-o", tmp_path / "out", *options)
        assert (found["code"], found["exit_code"]) == ("usage.invalid", 2)
    assert error("resize", adapter, "-o", adapter, "--rank", 4)["code"] == "usage.invalid"
    nowhere = tmp_path / "no" / "parent"
    assert error("resize", adapter, "-o", nowhere, "--rank", 4)["code"] == "path.permission"
    tensors = factors()
    next(iter(tensors.values()))[0, 0] = np.nan
    bad = save(tmp_path / "bad", tensors)
    found = error("resize", bad, "-o", tmp_path / "out", "--rank", 4)
    assert found["code"] == "adapter.nonfinite_weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "bad"]


# --- start-up -----------------------------------------------------------------------------


def test_nothing_heavy_is_imported(adapter: Path) -> None:
    code = (
        "import sys; from loractl.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'huggingface_hub'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    for options in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", str(adapter), *options],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout
        assert done.stderr.strip() == "[]"


# --- the hub ------------------------------------------------------------------------------


class _Hub(BaseHTTPRequestHandler):
    """Serves `root/ORG/NAME/FILE` under the hub's URLs, with ranges, and notes what was sent."""

    root: Path
    sent: list[tuple[str, str, int]]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        parts = self.path.strip("/").split("/")
        org, name, _, revision, *rest = parts if len(parts) > 4 else [""] * 5
        path = self.root / org / name / "/".join(rest)
        if not path.is_file() or revision not in ("main", "c0ffee"):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        span = self.headers.get("Range")
        if span:
            first, last = span.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"e"')
        self.send_header("X-Repo-Commit", "c0ffee")
        self.end_headers()
        if body:
            self.sent.append((rest[-1], revision, len(data)))
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[_Hub]]:
    handler = type("Hub", (_Hub,), {"root": tmp_path / "hub", "sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def on_hub(hub: Any, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The endpoint is read when huggingface_hub is imported, so each run is a process.
    return subprocess.run(
        [sys.executable, "-m", "loractl.main", "inspect", *arguments, "--json"],
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        },
        capture_output=True,
        text=True,
    )


def test_a_hub_repository_is_read_by_ranges(hub: Any, tmp_path: Path) -> None:
    tensors = {
        name: np.ones((400, values.shape[1]) if ".lora_A." in name else (values.shape[0], 400))
        for name, values in factors().items()
    }
    directory = save(hub.root / "some-org" / "adapter", tensors, r=400)
    size = (directory / WEIGHTS_FILE).stat().st_size
    done = on_hub(hub, tmp_path, "some-org/adapter")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["modules"] == report(directory)["modules"]
    assert found["file_bytes"] == size
    assert sum(count for name, _, count in hub.sent if name == WEIGHTS_FILE) < size / 10
    # Both files are of the commit that the first answer named.
    assert [revision for name, revision, _ in hub.sent if name == WEIGHTS_FILE] == ["c0ffee"]


def test_a_base_on_the_hub_is_compared_by_shape_and_by_name(
    hub: Any, base: Path, tmp_path: Path
) -> None:
    save(hub.root / "some-org" / "adapter", factors())
    for name, codes in (("Base", []), ("other", ["base_name_differs"])):
        repository = hub.root / "mirror" / name
        repository.mkdir(parents=True)
        (repository / "config.json").write_text((base / "config.json").read_text())
        done = on_hub(hub, tmp_path, "some-org/adapter", "--base", f"mirror/{name}")
        found = json.loads(done.stdout)
        assert found["modules_matched"] == found["modules_present"] == 21
        assert [warning["code"] for warning in found["warnings"]] == codes


def test_what_a_hub_repository_lacks(hub: Any, tmp_path: Path) -> None:
    def code(*arguments: str) -> str:
        done = on_hub(hub, tmp_path, *arguments)
        assert done.returncode != 0
        found: str = json.loads(done.stderr)["error"]["code"]
        return found

    directory = save(hub.root / "some-org" / "adapter", factors())
    assert code("some-org/adapter", "--stats") == "usage.invalid"
    (directory / WEIGHTS_FILE).rename(directory / "adapter_model.bin")
    assert code("some-org/adapter") == "adapter.unsafe_format"
    (directory / "adapter_model.bin").unlink()
    assert code("some-org/adapter") == "adapter.weights_missing"
    assert code("some-org/other") == "adapter.config_missing"


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    hub = type("Nowhere", (), {"url": "http://127.0.0.1:9"})
    started = perf_counter()
    done = on_hub(hub, tmp_path, "some-org/adapter")
    assert json.loads(done.stderr)["error"]["code"] == "path.not_found"
    assert done.returncode == 5
    assert perf_counter() - started < 20
