"""Who may import whom, checked in the source of every file, and by running the programs."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"lorad": ROOT, "loractl": ROOT, "lorad_kernels": ROOT / "kernels"}


@dataclass(frozen=True)
class Rule:
    """What a module may import: modules of ours, third parties, and the latter in functions only.

    A name stands for the module and for everything below it.
    """

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()


def below(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names)


BASE = below("lorad", "adapter_ref", "errors", "paths", "wire")
CLIENT = "lorad.admin_client"
HTTP = "lorad.admin_http"
SIZING = ("lorad.sizing",)
# Adapters read from JSON and a safetensors header: nothing to install, nothing to wait for.
HEADERS = below(
    "lorad.adapters",
    *("adapter_files", "findings", "lora_modules", "patterns", "peft_config", "peft_format"),
    *("regex", "safetensors_header", "tensor_names"),
)
# Those that read tensors without torch, for loractl.
SPECTRA = below("lorad.adapters", "resize", "spectrum")

# The longest name that fits a module is its rule.
RULES = {
    "lorad": Rule(),
    **{name: Rule(BASE) for name in BASE},
    "lorad.config": Rule(BASE),
    "lorad.log": Rule(),
    "lorad.program": Rule(BASE),
    "lorad.sockets": Rule(BASE),
    HTTP: Rule(BASE),
    CLIENT: Rule((*BASE, HTTP, *HEADERS)),
    "lorad.detach": Rule((*BASE, CLIENT), ("typer",)),
    "lorad.main": Rule(
        (*BASE, CLIENT, *below("lorad", "config", "daemon", "detach", "log", "program")),
        others=("typer",),
    ),
    "lorad.live_settings": Rule((*BASE, *below("lorad", "config", "log", "server.auth"))),
    "lorad.warming": Rule(
        (
            *(*BASE, "lorad.engine.async_engine", "lorad.engine.messages"),
            *("lorad.model.tokenizer", "lorad.registry", "lorad.server.traffic"),
        )
    ),
    "lorad.daemon": Rule(("lorad",), ("torch", "uvicorn")),
    "lorad.sizing": Rule((*BASE, *SIZING)),
    "lorad.adapters": Rule((*BASE, *SIZING, *HEADERS)),
    **{name: Rule((*BASE, *SIZING, *HEADERS, *SPECTRA), ("numpy",)) for name in SPECTRA},
    "lorad.adapters.weights": Rule((*BASE, *SIZING, *HEADERS), ("torch",)),
    "lorad.adapters.host_cache": Rule((*BASE, "lorad.adapters.weights")),
    "lorad.adapters.loader": Rule((*BASE, "lorad.adapters.weights")),
    "lorad.registry": Rule((*BASE, *HEADERS, "lorad.registry"), lazy=("s3fs",)),
    "lorad_kernels": Rule(("lorad_kernels",), ("numpy", "torch")),
    "lorad_kernels.cpu_*": Rule(("lorad_kernels",), ("llvmlite", "numba", "numpy", "torch")),
    "lorad_kernels.triton_*": Rule(("lorad_kernels",), ("torch", "triton")),
    "lorad.memory": Rule(
        (*BASE, *SIZING, "lorad.adapters.weights", "lorad.memory", "lorad_kernels"), ("torch",)
    ),
    "lorad.memory.pinned_arena": Rule(others=("numpy", "torch")),
    "lorad.model": Rule((*BASE, *SIZING, "lorad.model", "lorad_kernels"), ("safetensors", "torch")),
    "lorad.model.chat_template": Rule(BASE, ("jinja2",)),
    "lorad.model.hub": Rule(BASE, lazy=("huggingface_hub",)),
    "lorad.model.token_bytes": Rule(BASE),
    "lorad.model.tokenizer": Rule((*BASE, "lorad.model.token_bytes"), ("tokenizers",)),
    "lorad.engine": Rule(
        (
            *(*BASE, *SIZING, "lorad_kernels"),
            *below("lorad", "adapters", "engine", "memory", "model"),
        ),
        ("numpy", "torch"),
    ),
    # What crosses to the API side, and what runs there, knows no tensors; nor does the policy.
    "lorad.engine.messages": Rule(BASE),
    "lorad.engine.async_engine": Rule((*BASE, "lorad.engine", "lorad.model.tokenizer")),
    "lorad.engine.detokenizer": Rule((*BASE, "lorad.engine", "lorad.model")),
    "lorad.engine.stop_matcher": Rule(BASE),
    "lorad.engine.scheduler": Rule((*BASE, "lorad.engine", "lorad.memory")),
    "lorad.server": Rule(
        (
            *(*BASE, "lorad.sockets", "lorad.registry", "lorad.server", "lorad.engine.messages"),
            *below("lorad.model", "chat_template", "tokenizer"),
        ),
        ("anyio", "prometheus_client", "starlette", "uvicorn"),
    ),
    "loractl": Rule(
        (*BASE, CLIENT, "lorad.program", *SIZING, *HEADERS, *SPECTRA, "loractl"),
        ("typer",),
        lazy=("huggingface_hub", "matplotlib", "rich", "s3fs"),
    ),
}
# Third parties that no dependency of ours names, and why they are there all the same.
UNDECLARED = {
    "llvmlite": "numba is built on it, and vector instructions are written with it",
    "s3fs": "the extra s3; asked for where it is missing",
    "matplotlib": "`plan --plot FILE.png` asks for it where it is missing",
}


@dataclass(frozen=True)
class Import:
    module: str  # "lorad.wire", also for `from lorad import wire`
    line: int
    in_function: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


@cache
def modules() -> dict[str, Path]:
    """Every module of the three packages, by its dotted name."""
    found = {}
    for package, base in PACKAGES.items():
        for path in (base / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(source: str) -> Iterator[Import]:
    """All imports but those under `if TYPE_CHECKING`, which never run."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, inside = pending.pop()
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = list(node.orelse)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        pending += [(child, inside) for child in children]
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            whole = [name if name in modules() else str(node.module) for name in names]
            yield from (Import(name, node.lineno, inside) for name in dict.fromkeys(whole))
            assert node.level == 0, "imports are absolute"


def fits(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.") or fnmatch.fnmatch(module, name)


def rule_of(module: str) -> Rule:
    return RULES[max((name for name in RULES if fits(module, name)), key=len)]


def allowed(found: Import, rule: Rule) -> bool:
    if found.root in sys.stdlib_module_names or found.module == "lorad":  # lorad.__version__
        return True
    if found.root in PACKAGES:
        return any(fits(found.module, name) for name in rule.ours)
    return found.root in rule.others or (found.in_function and found.root in rule.lazy)


@pytest.mark.parametrize("module", sorted(modules()))
def test_module_imports_only_what_its_place_allows(module):
    path, rule = modules()[module], rule_of(module)
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.module}"
        for found in imports_of(path.read_text("utf-8"))
        if not allowed(found, rule)
    ]
    assert wrong == []


def test_every_rule_is_for_something_that_exists():
    named = {name for rule in RULES.values() for name in rule.ours} | RULES.keys()
    missing = [name for name in named if not any(fits(module, name) for module in modules())]
    assert [name for name in missing if "*" not in name] == []


@pytest.mark.parametrize(
    ("module", "source", "ok"),
    [
        ("lorad.sizing.new", "def f():\n    import torch", False),
        ("lorad.sizing.new", "if TYPE_CHECKING:\n    import torch", True),
        ("lorad.adapters.new", "from torch.nn import functional", False),
        ("lorad.registry.new", "from lorad.engine import messages", False),
        ("lorad.server.new", "from lorad.engine.engine import Engine", False),
        ("lorad.server.new", "from lorad import wire", True),
        ("loractl.new", "import rich.console", False),
        ("loractl.new", "async def f():\n    from rich.console import Console", True),
        ("lorad_kernels.triton_bgmv", "import triton", True),
        ("lorad_kernels.new", "import triton", False),
    ],
)
def test_the_rules_catch_what_they_are_for(module, source, ok):
    assert all(allowed(found, rule_of(module)) for found in imports_of(source)) == ok


def test_third_parties_are_the_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[<>=]", d)[0].replace("-", "_") for d in project["dependencies"]}
    sources = [path.read_text("utf-8") for path in modules().values()]
    used = {found.root for source in sources for found in imports_of(source)}
    third = used - PACKAGES.keys() - set(sys.stdlib_module_names) - {"triton"}
    assert third - UNDECLARED.keys() == declared
    assert UNDECLARED.keys() <= third


# --- by running -----------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "transformers", "peft", "safetensors", "tokenizers", "matplotlib")
HEAVY += ("huggingface_hub", "starlette", "uvicorn", "httpx")

RUN = """
import json, sys
from importlib import import_module
program, *words = json.loads(sys.argv[1])
sys.argv = [program, *words]
try:
    import_module(f"{program}.main").main()
except SystemExit as end:
    code = end.code or 0
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
PLAN = "loractl plan --model llama-3.1-8b --rank 16 --gpu h100-80g"


def python(*arguments: str, cwd: Path) -> list[object]:
    """The JSON that a fresh interpreter prints last."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, {*PACKAGES.values()}))}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def adapter(tmp_path):
    """A directory `adapter` of one module at rank 1, in the working directory of the command."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    header = {
        f"{path}.lora_A.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
        f"{path}.lora_B.weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + struct.pack("<8f", *range(1, 9))
    (directory / "adapter_model.safetensors").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("loractl --help", 0),
        ("loractl plan --help", 0),
        ("loractl version --json", 0),
        (PLAN, 0),
        (f"{PLAN} --json --explain --fleet 100 --compare vllm", 0),
        (f"{PLAN} --emit k8s", 0),
        ("loractl inspect adapter --json", 0),
        ("loractl list --socket none.sock", 3),
        ("lorad --help", 0),
        ("lorad start --help", 0),
        ("lorad check-config", 0),
        ("lorad status --socket none.sock", 3),
    ],
)
def test_command_loads_nothing_heavy(line, code, adapter):
    found_code, loaded = python("-c", RUN, json.dumps(line.split()), cwd=adapter)
    assert (found_code, [name for name in HEAVY if name in loaded]) == (code, [])


@pytest.mark.parametrize("line", ["loractl --help", "loractl list --socket none.sock", PLAN])
def test_loractl_prints_lists_and_help_without_rich(line, adapter):
    _, loaded = python("-c", RUN, json.dumps(line.split()), cwd=adapter)
    assert "rich" not in loaded


LIGHT = ("lorad.sizing", "lorad.registry", *BASE, *HEADERS, "lorad.config", "lorad.sockets")
LIGHT += ("lorad.engine.messages", "loractl")


def test_light_modules_load_nothing_heavy(tmp_path):
    names = [module for module in modules() if any(fits(module, light) for light in LIGHT)]
    assert len(names) > 60
    script = "import importlib, json, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    script += "\nprint(json.dumps(sorted(sys.modules)))"
    loaded = python("-c", script, *names, cwd=tmp_path)
    assert [name for name in (*HEAVY, "rich") if name in loaded] == []
