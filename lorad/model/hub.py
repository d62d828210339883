"""A base model given by its hub id: downloaded once into the hub's own cache."""

from __future__ import annotations

from pathlib import Path

from lorad.errors import LoradError

# Never pickle, never code.
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def model_directory(model: str) -> Path:
    """The directory of `model`: a path that exists, or a hub id (`org/name[@revision]`).

    Raises `model.not_found` with what the hub said.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise LoradError(
            "model.not_found",
            f"there is no model directory {model}",
            hint="give a directory with config.json and safetensors, or a hub id such as org/name",
        )
    repo, _, revision = model.partition("@")
    return _download(repo, revision or None)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_WANTED))
    except Exception as error:
        # Offline, gated, unknown, no space: the hub client has a dozen kinds of error.
        text = str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise LoradError(
            "model.not_found",
            f"{repo} could not be fetched from the hub: {reason}",
            hint="check the id, the network and HF_TOKEN, or give a local directory",
            details={"model": repo},
        ) from None
