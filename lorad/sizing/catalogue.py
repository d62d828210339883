"""Shapes of well-known models, so that planning needs neither files nor a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """A model of the catalogue: the keys of its config.json that decide its sizes."""

    name: str  # "llama-3.1-8b"
    hub: str  # "meta-llama/Llama-3.1-8B"
    source: str  # where the config.json stands
    parameters: int  # as the hub counts the checkpoint, a tied matrix once
    config: dict[str, Any] = field(hash=False)
    aliases: tuple[str, ...] = ()  # hub ids of the same shape

    def spellings(self) -> Iterator[str]:
        for hub in (self.hub, *self.aliases):
            yield hub.lower()
            yield hub.lower().rpartition("/")[2]
        yield self.name


@cache
def known_models() -> tuple[KnownModel, ...]:
    text = files("lorad.sizing").joinpath("catalogue.json").read_text("utf-8")
    return tuple(
        KnownModel(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in json.loads(text)
    )


def find_model(text: str) -> KnownModel | None:
    """By name, hub id or the last part of a hub id; case does not matter."""
    wanted = text.lower()
    return next((model for model in known_models() if wanted in model.spellings()), None)


def similar_names(text: str, limit: int = 4) -> list[str]:
    """Names to suggest for one that is not known."""
    from difflib import get_close_matches

    return get_close_matches(text.lower(), [m.name for m in known_models()], limit, 0.5)
