"""An adapter on the Hugging Face hub, checked without downloading it: two range requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lorad.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftAdapter,
    check_adapter,
    read_config_bytes,
)
from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_REPO = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]{{1,100}}))?")
_SECONDS = 10.0
_FIRST_BYTES = 128 << 10  # holds the header of nearly every adapter


def is_hub_id(text: str) -> bool:
    """`org/name` or `org/name@revision`; what exists on disk is a path, whatever it looks like."""
    return bool(_REPO.fullmatch(text)) and not Path(text).exists()


def read_hub_adapter(
    hub_id: str, shape: ModelShape | None, *, max_lora_rank: int | None = None
) -> PeftAdapter:
    """`read_adapter` for a repository of the hub; raises the same errors."""
    match = _REPO.fullmatch(hub_id)
    repo, revision = (match[1], match[2]) if match else (hub_id, None)
    config = _HubFile(repo, CONFIG_FILE, revision)
    weights = _HubFile(repo, WEIGHTS_FILE, config.commit or revision)  # both of one commit
    return check_adapter(Path(hub_id), read_config_bytes(config), weights, shape, max_lora_rank)


class _HubFile:
    """One file of a repository, read by ranges; the first of them is kept."""

    def __init__(self, repo: str, name: str, revision: str | None) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        self._repo, self._name = repo, name
        self._url = hf_hub_url(repo, name, revision=revision)
        try:
            found = get_hf_file_metadata(self._url, timeout=_SECONDS)
        except EntryNotFoundError:
            raise _missing(repo, name, revision) from None
        except Exception as error:
            # Offline, gated, no such repository, a proxy: a dozen kinds, all meaning this.
            raise self._unreachable(error) from None
        self.commit = found.commit_hash
        self.size = found.size or 0
        self._first = self._range(0, min(self.size, _FIRST_BYTES)) if self.size else b""

    def read_at(self, start: int, count: int) -> bytes:
        if start + count <= len(self._first):
            return self._first[start : start + count]
        return self._range(start, count)

    def _range(self, start: int, count: int) -> bytes:
        from huggingface_hub import get_session, get_token

        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers["Accept-Encoding"] = "identity"  # a range of what is stored, not of a gzip of it
        headers["Range"] = f"bytes={start}-{start + count - 1}"
        try:
            response: Any = get_session().get(self._url, headers=headers, timeout=_SECONDS)
            response.raise_for_status()
            body: bytes = response.content
        except Exception as error:
            raise self._unreachable(error) from None
        if response.status_code != 206 or len(body) != count:
            raise self._unreachable("the server did not answer with the range asked for")
        return body

    def _unreachable(self, error: object) -> LoradError:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return LoradError(
            "path.not_found",
            f"{self._repo} is no path here, and the hub gave no {self._name}: {reason[0]}",
            hint="check the id, log in for a private repository, or download it first",
            details={"repo": self._repo, "file": self._name},
        )


def _missing(repo: str, name: str, revision: str | None) -> LoradError:
    if name == CONFIG_FILE:
        return LoradError(
            "adapter.config_missing",
            f"{repo} has no {CONFIG_FILE} on the hub",
            hint="give a repository that PEFT's push_to_hub made",
            details={"repo": repo},
        )
    if _has_pickle(repo, revision):
        return LoradError(
            "adapter.unsafe_format",
            f"{repo} holds its weights as adapter_model.bin, a pickle, which can run code",
            hint="convert it to safetensors: load it with PEFT where you trust it, and save again",
            details={"repo": repo},
        )
    return LoradError(
        "adapter.weights_missing",
        f"{repo} has no {WEIGHTS_FILE} on the hub",
        hint="give a repository that PEFT's push_to_hub made",
        details={"repo": repo},
    )


def _has_pickle(repo: str, revision: str | None) -> bool:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(
            hf_hub_url(repo, "adapter_model.bin", revision=revision), timeout=_SECONDS
        )
    except Exception:
        return False
    return True
