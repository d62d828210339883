"""Fixtures that several test files share: the demo model, tiny random models, real engines."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

# Before torch is imported: two OpenMP pools on two cores stall each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A run in the background inherits an ignored Ctrl-C, and so would every program started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What groups of test files share asserts too: failures there are to show the values.
pytest.register_assert_rewrite(
    "admin_process", "openai_site", "registry_on_disk", "scheduler_bench"
)

ROOT = Path(__file__).resolve().parent.parent


def load_script(path: Path) -> ModuleType:
    """Import a script by its path; the scripts of this project are no packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of SmolLM2-135M-Instruct in the user's cache, made by the first test run."""
    directory = load_script(ROOT / "examples/demo_model.py").ensure_demo_model()
    assert isinstance(directory, Path)
    return directory


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FAMILIES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3")


def _tiny_config(family: str):
    import transformers

    common = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 112,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if family == "llama":
        return transformers.LlamaConfig(**common, attention_bias=True, mlp_bias=True)
    if family == "llama3-rope":
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return transformers.LlamaConfig(**common, rope_parameters=scaling)
    if family == "mistral":
        # A window shorter than the tests' prompts, so that it matters.
        return transformers.MistralConfig(**common, sliding_window=12, head_dim=16)
    if family == "qwen2":
        return transformers.Qwen2Config(**{**common, "tie_word_embeddings": True})
    # head_dim is not hidden/heads here, as in the real Qwen3-0.6B.
    return transformers.Qwen3Config(**common, head_dim=32)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> directory of a tiny random model of it (float32), made once."""
    import torch
    import transformers

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(FAMILIES.index(family))
            model = transformers.AutoModelForCausalLM.from_config(_tiny_config(family))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    # Random norms and biases too: at their initial 1 and 0 they test nothing.
                    spread = 0.3 if "norm" in name or name.endswith("bias") else 0.15
                    parameter.add_(torch.randn_like(parameter) * spread)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_chat_model(tiny_model: Callable[[str], Path], tmp_path_factory) -> Path:
    """A tiny llama with a tokenizer of one token per byte and a chat template: a whole model
    directory, for daemons that start in two seconds."""
    import json
    import shutil

    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tiny-chat") / "tiny"
    shutil.copytree(tiny_model("llama"), directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    settings = {"chat_template": template, "eos_token": alphabet[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="session")
def random_adapter() -> Callable[..., Path]:
    """Writes a PEFT adapter with random A and B, as PEFT itself saves it."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    def make(
        model_dir: Path,
        output: Path,
        rank: int,
        targets: tuple[str, ...],
        *,
        seed: int = 0,
        strength: float = 0.5,
        **config: object,
    ) -> Path:
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
        settings = {"lora_alpha": 2 * rank, "target_modules": list(targets), **config}
        model = get_peft_model(base, LoraConfig(r=rank, **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=strength / rank**0.5)
        model.save_pretrained(output)
        return output

    return make


@dataclass
class SyncEngine:
    """A real engine, stepped by the test itself; adapters are read from plain directories."""

    built: object
    adapters: dict[str, Path]

    def ref(self, name: str):
        from lorad.adapter_ref import AdapterName, AdapterRef

        return AdapterRef(AdapterName.parse(name), "v1", f"sha256:{name}")

    def add(self, request_id: str, prompt, adapter: str | None = None, **sampling) -> None:
        from lorad.engine.messages import GenerationRequest, SamplingParams

        params = SamplingParams(
            **{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **sampling}
        )
        ref = self.ref(adapter) if adapter else None
        self.built.engine.handle(GenerationRequest(request_id, tuple(prompt), params, ref))

    def run(self) -> dict[str, list]:
        """Step until nothing is left; outputs by request id, other answers under their id."""
        import queue

        engine, outputs = self.built.engine, {}
        while True:
            worked = engine.step()
            for output in engine.take_outputs():
                key = getattr(output, "request_id", None) or output.command_id
                outputs.setdefault(key, []).append(output)
            if worked:
                continue
            try:
                engine.handle(self.built.inbox.get(timeout=10 if engine.waits else 0.01))
            except queue.Empty:
                assert not engine.waits, "the engine waits for something that never comes"
                return outputs

    def generate(self, rows: list[tuple[list[int], str | None]], **sampling) -> list[list[int]]:
        """Greedy tokens of all (prompt, adapter) rows, run together in one batch."""
        for i, (prompt, adapter) in enumerate(rows):
            self.add(str(i), prompt, adapter, **sampling)
        outputs = self.run()
        for answer in outputs.values():
            for output in answer:
                if output.error is not None:
                    raise output.error
        return [[output.token_id for output in outputs[str(i)]] for i in range(len(rows))]


@pytest.fixture
def sync_engine() -> Iterator[Callable[..., SyncEngine]]:
    """Builds engines over a model directory and adapter directories {name: path}."""
    import torch

    from lorad.adapters.weights import read_weights
    from lorad.engine.build import EngineOptions, build_engine

    torch.set_num_threads(2)
    loaders = []

    def build(model_dir: Path, adapters: dict[str, Path] | None = None, **options) -> SyncEngine:
        known = adapters or {}

        def read(ref, shape, dtype):  # as the daemon does, without its registry
            return read_weights(known[ref.name.name], ref.digest, shape, dtype)

        settings = {"device": "cpu", "slab_bytes": 2**26, **options}
        built = build_engine(
            EngineOptions(model_dir, **settings),
            read,
            frozenset({2}),
            adapter_files=lambda ref: known[ref.name.name],
        )
        loaders.append(built.loader)
        return SyncEngine(built, known)

    yield build
    for loader in loaders:
        loader.stop()


@dataclass
class Daemon:
    """A real `lorad start` in a process of its own, and the two ways to talk to it."""

    directory: Path
    model: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen | None = None
    url: str = ""

    @property
    def socket(self) -> Path:
        return self.directory / "run/lorad.sock"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def start(self) -> Daemon:
        command = [sys.executable, "-m", "lorad.main", "start", "--model", str(self.model)]
        command += ["--port", "0", "--socket", str(self.socket), "--dtype", "float32"]
        command += ["--registry", str(self.directory / "registry"), *self.options]
        with (self.directory / "log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        line = self.process.stdout.readline()
        assert line.startswith("lorad is ready"), f"{line}\n{self.log}"
        self.url = re.search(r"http://\S+(?=/v1)", line)[0]
        return self

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def loractl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "loractl.main", *words, "--socket", str(self.socket)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 or not check, done.stderr
        return done

    @property
    def admin(self):
        from lorad.admin_client import AdminClient

        return AdminClient(self.socket)

    def openai(self, **options):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="session")
def start_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons over a model directory; all are stopped at the end."""
    daemons: list[Daemon] = []

    def start(model: Path, *options: str) -> Daemon:
        # A short path: a UNIX socket's may have 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="lorad-", dir=tmp_path_factory.getbasetemp()))
        daemon = Daemon(directory, model, options)
        daemons.append(daemon)
        return daemon.start()

    yield start
    for daemon in daemons:
        if daemon.process and daemon.process.poll() is None:
            daemon.kill()
