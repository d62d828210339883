"""Where a base model's config.json comes from: a directory, a file, or the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lorad.errors import LoradError
from lorad.sizing.model_shape import read_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_SECONDS = 10.0


def load_config(model: str) -> tuple[dict[str, Any], str]:
    """The config and where it was read; `model.not_found` when there is none.

    Something that exists on disk wins over a hub id of the same spelling.
    """
    path = Path(model).expanduser()
    if not path.exists() and _HUB_ID.fullmatch(model):
        return _hub_config(model), model
    return read_config(path), str(path)


def _hub_config(model: str) -> dict[str, Any]:
    """config.json alone, never weights: the hub's local cache, else one request."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return read_config(Path(cached)) if isinstance(cached, str) else _fetch_config(model)


def _fetch_config(model: str) -> dict[str, Any]:
    from huggingface_hub import get_session, get_token, hf_hub_url

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}

    # Not hf_hub_download: without a network it retries for 23 seconds.
    try:
        url = hf_hub_url(model, "config.json")
        response = get_session().get(url, headers=headers, timeout=_HUB_SECONDS)
        response.raise_for_status()
        config = response.json()
    except Exception as error:
        # The client raises a dozen kinds (offline, gated, missing, proxy): all mean this.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise LoradError(
            "model.not_found",
            f"{model} is no path here, and the hub gave no config.json: {reason[0]}",
            hint="check the id, log in for a gated model, or pass a path to its config.json",
            details={"model": model},
        ) from None
    if not isinstance(config, dict):
        raise LoradError("model.invalid", f"the hub's config.json of {model} is no JSON object")
    return config
