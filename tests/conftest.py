"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of SmolLM2-135M-Instruct in the user's cache, made by the first test run."""
    spec = importlib.util.spec_from_file_location("demo_model", ROOT / "examples/demo_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = module.ensure_demo_model()
    assert isinstance(directory, Path)
    return directory
