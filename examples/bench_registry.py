"""What 10,000 registered adapters cost: memory, start, list, resolve, and names nobody has.

    python examples/bench_registry.py [--adapters 10000] [--unknown 1000000]

The adapters are of rank 1 on q and v of a tiny model: the bytes of weights do not matter here.
Everything lies in /dev/shm, since memory and time are measured, not a disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from adapter_fleet import write_adapter
from bench_report import progress, tell, write_table
from random_model import ensure_random_model

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.admin_client import AdminClient
from lorad.engine.messages import GenerationRequest
from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer
from lorad.registry.records import Who
from lorad.registry.registry import Registry
from lorad.server.app import build_public_app
from lorad.server.auth import ApiKeys
from lorad.server.limits import Limits
from lorad.server.serving import Serving
from lorad.sizing.model_shape import ModelShape, read_config

Row = dict[str, float]


def main(
    adapters: int = 10_000,
    unknown: Annotated[int, typer.Option(help="Names that nobody has.")] = 1_000_000,
    requests: Annotated[int, typer.Option(help="Of those, through the whole public app.")] = 20_000,
    markdown: Annotated[Path | None, typer.Option(help="The page with the marks.")] = None,
) -> None:
    model = ensure_random_model("tiny-llama")
    shape = ModelShape.from_config(read_config(model))
    ram = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=ram if ram.is_dir() else None) as name:
        root = Path(name)
        row = _fill(root, model, shape, adapters)
        row |= _opened(root, model, shape, adapters, unknown, requests)
        row |= _daemon(root, model, adapters)
    tell(row)
    if markdown:
        write_table(markdown, "registry", _table(row))


def _open(root: Path, model: Path, shape: ModelShape) -> Registry:
    return Registry.open(root / "state", model.name, lambda d: read_adapter(d, shape))


def _fill(root: Path, model: Path, shape: ModelShape, adapters: int) -> Row:
    held = _open(root, model, shape)
    started = time.perf_counter()
    for i in range(adapters):
        directory = write_adapter(root / "one", shape, 1, i)
        name = AdapterName.parse(f"a{i}")
        pushed = held.push(directory, name, who=Who.daemon())
        held.promote(name, pushed.version.label, who=Who.daemon())
        progress(f"{i + 1} of {adapters} adapters pushed and promoted")
    held.close()
    seconds = time.perf_counter() - started
    return {"adapters": adapters, "push_and_promote_ms": 1000 * seconds / adapters}


# --- in this process --------------------------------------------------------------------------


class _NoEngine:
    """No request gets this far."""

    def generate(self, request: GenerationRequest) -> Any:
        raise RuntimeError(f"{request.request_id} reached the engine")


def _opened(
    root: Path, model: Path, shape: ModelShape, adapters: int, unknown: int, requests: int
) -> Row:
    before, started = _rss(), time.perf_counter()
    held = _open(root, model, shape)
    opened = time.perf_counter() - started
    tokenizer = Tokenizer.from_dir(model)
    middle = f"a{adapters // 2}"
    row = {
        "open_ms": 1000 * opened,
        "bytes_per_adapter": (_rss() - before) / adapters,
        "list_ms": 1000 * _time(held.adapters, 5),
        "resolve_us": 1e6 * _time(lambda: held.resolve(middle), 20_000),
    }
    parts: dict[str, Any] = {
        "base_model": model.name,
        "engine": _NoEngine(),
        "registry": held,
        "tokenizer": tokenizer,
        "chat_template": None,
        "limits": Limits(shape.max_position_embeddings, shape.vocab_size),
    }
    serving = Serving(**parts, api_keys=ApiKeys({}), started_at=0)
    row |= _unknown_names(serving, unknown)
    row |= asyncio.run(_unknown_requests(build_public_app(**parts), requests))
    held.close()
    return row


def _unknown_names(serving: Serving, count: int) -> Row:
    """Each resolved as the routes resolve it: keys, registry, the canary's share, the error."""
    _refused(serving, "nobody")
    before, started = _rss(), time.perf_counter()
    for i in range(count):
        _refused(serving, f"nobody-{i}")
        progress(f"{i + 1} of {count} unknown names")
    return {
        "unknown_names": count,
        "unknown_us": 1e6 * (time.perf_counter() - started) / count,
        "unknown_bytes_left": _rss() - before,
    }


def _refused(serving: Serving, name: str) -> None:
    try:
        serving.resolve(name, None, "address:127.0.0.1")
    except LoradError as error:
        if error.code == "adapter.not_found":
            return
        raise
    raise RuntimeError(f"{name} was found")


async def _unknown_requests(app: Any, count: int) -> Row:
    """The same through the whole application: routing, JSON, the 404 and its body."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://lorad") as client:
        for i in range(count + 1000):
            if i == 1000:  # what a first request allocates is not what the others leave
                before, started = _rss(), time.perf_counter()
            body = {"model": f"nobody-{i}", "prompt": "hi", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 404:
                raise RuntimeError(answer.text)
            progress(f"{i + 1} of {count} requests for unknown models")
    return {
        "unknown_requests": count,
        "unknown_request_us": 1e6 * (time.perf_counter() - started) / count,
        "unknown_requests_bytes_left": _rss() - before,
    }


# --- a daemon ---------------------------------------------------------------------------------


def _daemon(root: Path, model: Path, adapters: int) -> Row:
    progress("an empty daemon")
    with _started(model, root / "empty") as (empty, pid, _, _):
        nothing = _rss(pid)
    progress("a daemon with all of them")
    with _started(model, root / "state") as (ready, pid, url, socket):
        admin = AdminClient(socket)
        return {
            "daemon_start_s": ready,
            "empty_daemon_start_s": empty,
            "daemon_bytes_per_adapter": (_rss(pid) - nothing) / adapters,
            "admin_list_ms": 1000 * _time(admin.adapters, 3),
            "models_ms": 1000 * _time(lambda: httpx.get(f"{url}/v1/models").raise_for_status(), 3),
            "loractl_list_json_s": _time(lambda: _loractl(socket, "list", "--json"), 3),
            "loractl_list_s": _time(lambda: _loractl(socket, "list"), 3),
            "loractl_show_s": _time(lambda: _loractl(socket, "show", f"a{adapters // 2}"), 3),
        }


@contextmanager
def _started(model: Path, state: Path) -> Iterator[tuple[float, int, str, Path]]:
    """Seconds until it was ready, its pid, its address and its admin socket."""
    socket = state.parent / "run" / "lorad.sock"
    command = [sys.executable, "-m", "lorad.main", "start", "--model", str(model), "--port", "0"]
    command += ["--socket", str(socket), "--registry", str(state), "--slab-bytes", str(1 << 26)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        seconds = time.perf_counter() - started
        url = re.search(r"http://\S+(?=/v1)", line)
        if url is None:
            raise RuntimeError(f"the daemon did not start: {line}")
        try:
            yield seconds, process.pid, url[0], socket
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _loractl(socket: Path, *words: str) -> None:
    command = [sys.executable, "-m", "loractl.main", *words, "--socket", str(socket)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _time(call: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def _rss(pid: int | None = None) -> int:
    file = Path(f"/proc/{pid or os.getpid()}/statm")
    return int(file.read_text().split()[1]) * resource.getpagesize()


def _table(row: Row) -> str:
    kb = 1000
    lines = [
        ("registered adapters", f"{row['adapters']:,}"),
        ("pushed and promoted, each", f"{row['push_and_promote_ms']:.1f} ms"),
        ("registry opened", f"{row['open_ms']:.0f} ms"),
        ("memory per adapter, registry alone", f"{row['bytes_per_adapter'] / kb:.1f} kB"),
        ("memory per adapter, whole daemon", f"{row['daemon_bytes_per_adapter'] / kb:.1f} kB"),
        ("daemon ready, with none and with all of them",
         f"{row['empty_daemon_start_s']:.1f} s, {row['daemon_start_s']:.1f} s"),
        ("one name resolved", f"{row['resolve_us']:.1f} us"),
        ("list in the registry", f"{row['list_ms']:.0f} ms"),
        ("`GET /v1/adapters` of the admin socket", f"{row['admin_list_ms']:.0f} ms"),
        ("`GET /v1/models`", f"{row['models_ms']:.0f} ms"),
        ("`loractl list --json`, the whole process", f"{row['loractl_list_json_s']:.2f} s"),
        ("`loractl list`, the whole process", f"{row['loractl_list_s']:.2f} s"),
        ("`loractl show NAME`, the whole process", f"{row['loractl_show_s']:.2f} s"),
        (f"{row['unknown_names']:,} different unknown names, resolved as a route does",
         f"{row['unknown_us']:.1f} us each, {row['unknown_bytes_left'] / kb:,.0f} kB left behind"),
        (f"{row['unknown_requests']:,} requests for them through the whole public app",
         f"{row['unknown_request_us']:.0f} us each, "
         f"{row['unknown_requests_bytes_left'] / kb:,.0f} kB left behind"),
    ]  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {found} |" for what, found in lines)])


if __name__ == "__main__":
    typer.run(main)
