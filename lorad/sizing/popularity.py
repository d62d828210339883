"""How requests spread over the adapters of a fleet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lorad.errors import LoradError

MAX_FLEET = 1_000_000
_MAX_COUNT = 1e15
_LEAST_SHARE = 1e-12  # a smaller one is taken for this: it changes nothing, and divides safely
_FORMS = "uniform, zipf:1.0, slora:0.3 or file:counts.csv"


@dataclass(frozen=True)
class Popularity:
    """`shares[i]` is the share of requests for adapter i: positive, falling, summing to 1."""

    label: str  # "zipf:1.0"
    shares: tuple[float, ...]
    names: tuple[str, ...] = ()  # only where a file or a trace gave them

    def __len__(self) -> int:
        return len(self.shares)


def from_weights(label: str, weights: Sequence[float], names: Sequence[str] = ()) -> Popularity:
    """Sort, drop what is never asked for, and scale to a sum of 1."""
    least = sum(weights) * _LEAST_SHARE
    kept = [(max(weight, least), -i) for i, weight in enumerate(weights) if weight > 0]
    if not kept:
        raise LoradError(
            "usage.invalid",
            f"{label}: no adapter has any requests",
            hint="give at least one positive count",
        )
    kept.sort(reverse=True)
    total = sum(weight for weight, _ in kept)
    ordered = tuple(names[-i] for _, i in kept) if names else ()
    return Popularity(label, tuple(weight / total for weight, _ in kept), ordered)


def zipf(fleet: int, exponent: float) -> Popularity:
    """The adapter of rank i has weight i^-exponent; 0 is uniform."""
    weights = [(i + 1) ** -exponent for i in range(fleet)]
    return from_weights(f"zipf:{exponent:g}", weights)


def uniform(fleet: int) -> Popularity:
    return from_weights("uniform", [1.0] * fleet)


def slora(fleet: int, alpha: float) -> Popularity:
    """S-LoRA's benchmark: index floor(n U^(1/alpha)), so 1 is uniform and 0.1 is very skewed.

    This alpha is no Zipf exponent, although papers after it often read it as one.
    """
    edges = [(i / fleet) ** alpha for i in range(fleet + 1)]
    weights = [high - low for low, high in pairwise(edges)]
    return from_weights(f"slora:{alpha:g}", weights)


def parse_popularity(text: str, fleet: int | None) -> Popularity:
    """`--popularity` and `--fleet`; raises `usage.invalid`."""
    kind, _, argument = text.partition(":")
    if kind == "file":
        return _checked_fleet(read_counts(Path(argument)), fleet)
    if fleet is None:
        raise LoradError(
            "usage.invalid",
            f"--popularity {text} needs --fleet",
            hint="say how many adapters there are, or give counts with file:counts.csv",
        )
    if not 1 <= fleet <= MAX_FLEET:
        raise LoradError("usage.invalid", f"--fleet must be 1 to {MAX_FLEET}, not {fleet}")
    if text == "uniform":
        return uniform(fleet)
    if kind == "zipf":
        return zipf(fleet, _number(text, argument, low=0.0, high=10.0))
    if kind == "slora":
        return slora(fleet, _number(text, argument, low=0.01, high=1.0))
    raise LoradError("usage.invalid", f"--popularity {text!r} is not known", hint=f"use {_FORMS}")


def _checked_fleet(counts: Popularity, fleet: int | None) -> Popularity:
    if fleet is not None and fleet < len(counts):
        raise LoradError(
            "usage.invalid",
            f"--fleet is {fleet}, but {counts.label} names {len(counts)} adapters",
            hint="leave --fleet out: the file says how many there are",
        )
    return counts


def _number(text: str, argument: str, low: float, high: float) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise LoradError(
            "usage.invalid",
            f"--popularity {text!r}: {argument!r} is no number from {low:g} to {high:g}",
            hint=f"use {_FORMS}",
        )
    return value


def read_counts(path: Path) -> Popularity:
    """A CSV of `adapter,count`, with or without a header line; raises `usage.invalid`."""
    names, counts = [], []
    for line, row in enumerate(read_rows(path), 1):
        value = _count(row)
        if value is None and line == 1:
            continue  # a header
        if value is None or value < 0:
            raise LoradError(
                "usage.invalid",
                f"{path}, line {line}: {','.join(row)!r} is not `adapter,count`",
                hint="one adapter a line, for example `acme/support,1200`",
            )
        names.append(row[0].strip())
        counts.append(value)
    return from_weights(f"file:{path.name}", counts, names)


def _count(row: list[str]) -> float | None:
    try:
        value = float(row[1])
    except (IndexError, ValueError):
        return None
    return value if value <= _MAX_COUNT else None


def read_rows(path: Path) -> list[list[str]]:
    """The non-empty rows of a small CSV or TSV file; `path.not_found`, `usage.invalid`."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise LoradError("path.not_found", f"there is no {path}", hint="check the path") from None
    except (OSError, ValueError) as error:
        raise LoradError("usage.invalid", f"{path} cannot be read: {error}") from None
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    return [row for row in csv.reader(text.splitlines(), delimiter=delimiter) if row]
