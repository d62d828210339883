"""`loractl plan --check`: what the planner computes against what a running daemon holds.

Everything planned comes from the model's config.json, the daemon's settings and the headers of
the adapters' files; everything compared comes from the daemon. Equal means to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from loractl.model_source import load_config
from loractl.output import note, print_columns, print_json
from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.admin_client import AdminClient
from lorad.errors import LoradError
from lorad.paths import state_dir
from lorad.sizing.adapter_size import AdapterLayout, pack_adapter, uniform_modules
from lorad.sizing.memory_plan import page_bytes, pages_for, plan_slab, weight_bytes
from lorad.sizing.model_shape import ModelShape
from lorad.wire import VersionInfo

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NORM_ITEMSIZE = 4  # the norms of the base model stay in float32


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity; `planned` None where nothing outside the daemon tells what it must be."""

    what: str
    planned: int | None
    running: int

    @property
    def equal(self) -> bool:
        return self.planned in (None, self.running)


def show_check(model: str, socket: Path | None, *, as_json: bool) -> bool:
    """Print the comparison; True if nothing differs. Raises `daemon.*`, `model.*`."""
    found = list(compare(model, AdminClient(socket)))
    equal = all(row.equal for row in found)
    if as_json:
        rows = [
            {"what": row.what, "planned": row.planned, "running": row.running, "equal": row.equal}
            for row in found
        ]
        print_json("lorad/plan-check/v1", {"equal": equal, "rows": rows})
        return equal
    print_columns(
        ("", "PLANNED", "RUNNING", ""), [(row.what, *_numbers(row), _verdict(row)) for row in found]
    )
    if not equal:
        note("the plan and the daemon differ: is it the same model, dtype and block size?")
    return equal


def _numbers(row: Compared) -> tuple[str, str]:
    return "-" if row.planned is None else f"{row.planned:,}", f"{row.running:,}"


def _verdict(row: Compared) -> str:
    if row.planned is None:
        return "not planned"
    return "equal" if row.equal else f"differs by {row.running - row.planned:+,}"


def compare(model: str, client: AdminClient) -> Iterator[Compared]:
    """Weights, pages, slab, then every adapter in memory and the sums over them."""
    raw, where = load_config(model)
    shape = ModelShape.from_config(raw, where)
    settings, engine = client.config()["config"], client.status()["engine"]
    itemsize = _itemsize(settings, raw)
    page = page_bytes(shape, settings["memory.block_size"], itemsize)
    slab = settings["memory.slab_bytes"]
    pages = plan_slab(slab, page) if slab else None
    yield Compared("weights, bytes", _weights(shape, itemsize), engine["weight_bytes"])
    yield Compared("page, bytes", page, engine["page_bytes"])
    yield Compared("pages", pages, engine["total_pages"])
    running_slab = engine["total_pages"] * engine["page_bytes"]
    yield Compared("slab, bytes", pages * page if pages else None, running_slab)
    yield from _adapters(client, shape, itemsize, page, _store(settings))


def _itemsize(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    dtype = settings["model.dtype"]
    if dtype == "auto":
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _ITEMSIZES:
        raise LoradError("model.unsupported", f"the daemon's dtype {dtype} is not known here")
    return _ITEMSIZES[dtype]


def _weights(shape: ModelShape, itemsize: int) -> int:
    per_layer = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    norms = shape.num_layers * per_layer + shape.hidden_size
    return weight_bytes(shape, itemsize) + norms * (_NORM_ITEMSIZE - itemsize)


def _store(settings: Mapping[str, Any]) -> Path:
    path = settings["registry.path"]
    return (Path(path).expanduser() if path else state_dir()) / "store"


def _adapters(
    client: AdminClient, shape: ModelShape, itemsize: int, page: int, store: Path
) -> Iterator[Compared]:
    planned_pages: int | None = 0
    planned_host: int | None = 0
    seen: set[str] = set()  # the same content under two names is in memory once
    for adapter in client.adapters()["adapters"]:
        for version in adapter["versions"]:
            residency = version["residency"]
            if version["digest"] in seen or not (
                residency["device_bytes"] or residency["host_bytes"]
            ):
                continue
            seen.add(version["digest"])
            name = f"{adapter['name']}@{version['version']}"
            layout = _layout(adapter["name"], version, shape, itemsize, store)
            nbytes = layout.nbytes if layout else None
            if residency["device_bytes"]:
                yield Compared(f"{name} on the device", nbytes, residency["device_bytes"])
                planned_pages = _plus(planned_pages, pages_for(nbytes, page) if nbytes else None)
            if residency["host_bytes"]:
                yield Compared(f"{name} in host memory", nbytes, residency["host_bytes"])
                planned_host = _plus(planned_host, nbytes)
    engine = client.status()["engine"]
    yield Compared("pages of adapters", planned_pages, engine["adapter_pages"])
    yield Compared("host cache, bytes", planned_host, engine["host_cache_bytes"])


def _plus(total: int | None, part: int | None) -> int | None:
    return None if total is None or part is None else total + part


def _layout(
    name: str, version: VersionInfo, shape: ModelShape, itemsize: int, store: Path
) -> AdapterLayout | None:
    """From the files where they can be read, else from the rank if it must be the same for all."""
    parsed = AdapterName.parse(name)
    inside = f"*/{parsed.tenant}/{parsed.name}/{version['version']}"
    try:
        directory = next(iter(store.glob(inside)), None)
        if directory is not None:
            return pack_adapter(shape, read_adapter(directory, shape).module_ranks(), itemsize)
    except (OSError, LoradError) as error:
        typer.echo(f"{name}: its files cannot be read here ({error})", err=True)
    leaves = tuple(version["targets"])
    if set(leaves) <= set(shape.linears) and version["modules"] == len(leaves) * shape.num_layers:
        return pack_adapter(shape, uniform_modules(shape, leaves, version["rank"]), itemsize)
    return None
