"""The wheel and the editable install, made from a copy of the sources and used from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from lorad import __version__

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = sysconfig.get_paths()["purelib"]
PIP_FLAGS = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q")

# What an installation has to bear: our packages from the place it was made in, and transformers
# beside them, which looks for the PyPI package `kernels`, installed or not.
USE = """
import importlib.util, json, sys
from pathlib import Path
where = Path(sys.argv[1])
import lorad, lorad_kernels, loractl.main
found = [Path(module.__file__) for module in (lorad, lorad_kernels, loractl.main)]
assert all(path.is_relative_to(where) for path in found), found
from transformers import LlamaConfig, LlamaForCausalLM
tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=8,
                   num_attention_heads=1, num_key_value_heads=1)
model = LlamaForCausalLM(tiny)
import torch
from lorad_kernels import group_rows
print(json.dumps({
    "logits": list(model(torch.zeros(1, 2, dtype=torch.long)).logits.shape),
    "segments": len(group_rows([0, None, 1], [1, 2, 3]).segments),
    "kernels": getattr(importlib.util.find_spec("kernels"), "origin", None),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_NO_INPUT"] = "1"
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what a build reads, so that nothing is written into the working tree."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("kernels", "lorad", "loractl", "man"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", *PIP_FLAGS, "-w", out, ".", cwd=sources)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory):
    """The wheel's files as pip lays them out, in a directory of their own."""
    directory = tmp_path_factory.mktemp("target")
    run(
        *(sys.executable, "-m", "pip", "install", *PIP_FLAGS, "--target", directory, wheel),
        cwd=directory,
    )
    return directory


def test_wheel_has_three_packages_and_their_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {
        "lorad",
        "loractl",
        "lorad_kernels",
    }
    data = {
        str(path.relative_to(ROOT))
        for pattern in ("py.typed", "registry/*.sql", "sizing/*.json")
        for path in (ROOT / "lorad").glob(pattern)
    }
    assert len(data) >= 3
    assert data <= names
    manuals = {name.rpartition("/")[2] for name in names if ".data/data/share/man/" in name}
    assert manuals == {"lorad.1", "loractl.1", "lorad.toml.5"}


def test_wheel_has_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    bases = {"lorad": ROOT, "loractl": ROOT, "lorad_kernels": ROOT / "kernels"}
    modules = {
        str(path.relative_to(base))
        for package, base in bases.items()
        for path in (base / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules


def test_wheel_declares_both_programs_and_the_licence(target):
    (info,) = target.glob("lorad-*.dist-info")
    found = Distribution.at(info)
    assert {(e.group, e.name, e.value) for e in found.entry_points} == {
        ("console_scripts", "lorad", "lorad.main:main"),
        ("console_scripts", "loractl", "loractl.main:main"),
    }
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert any(str(file).endswith("licenses/LICENSE") for file in found.files or ())


@pytest.mark.slow
def test_wheel_works_beside_transformers(target, tmp_path):
    script = f"import sys; sys.path.insert(0, {str(target)!r})\n{USE}"
    found = json.loads(run(sys.executable, "-c", script, target, cwd=tmp_path))
    assert found["logits"] == [1, 2, 8]
    assert found["segments"] == 2
    assert not str(found["kernels"]).startswith(str(target))


def test_installed_programs_start(target, tmp_path):
    for program in ("lorad", "loractl"):
        script = f"import sys; sys.path.insert(0, {str(target)!r})\n"
        script += f"from {program}.main import main; sys.argv = ['{program}', 'version']; main()"
        assert __version__ in run(sys.executable, "-c", script, cwd=tmp_path)


@pytest.mark.slow
def test_editable_install_works_beside_transformers(sources, tmp_path):
    """Also when Python runs in the project's own root, where the folder `kernels/` lies."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    (site / "dependencies.pth").write_text(SITE_PACKAGES)
    run(python, "-m", "pip", "install", *PIP_FLAGS, "-e", sources, cwd=tmp_path)
    found = json.loads(run(python, "-c", USE, sources, cwd=sources))
    assert found["logits"] == [1, 2, 8]
    assert found["segments"] == 2
    assert found["kernels"] is None or found["kernels"].startswith(SITE_PACKAGES)
    assert f"loractl {__version__}" in run(environment / "bin/loractl", "version", cwd=tmp_path)
