"""The `lorad` command: start, stop and look at the daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorad import __version__
from lorad.config import Config, LoadedConfig, load_config, unknown_variables
from lorad.errors import LoradError
from lorad.paths import config_file, socket_path
from lorad.program import run_program

if TYPE_CHECKING:
    from lorad.daemon import Ready

app = typer.Typer(
    name="lorad",
    help="Serve one base LLM and thousands of LoRA adapters at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Path of lorad.toml.")]
SocketOption = Annotated[str | None, typer.Option("--socket", help="Path of the admin socket.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def start(
    model: Annotated[
        str | None, typer.Option(help="Directory of the base model, or its id on the hub.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the base model in the API.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer together, in tokens.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the public API.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; 0 takes a free one.")] = None,
    socket: SocketOption = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens computed in one step.")
    ] = None,
    max_loras: Annotated[int | None, typer.Option(help="Different adapters in one step.")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Largest rank accepted.")] = None,
    max_cpu_loras: Annotated[int | None, typer.Option(help="Adapters kept in host memory.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine.")] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay captured decode steps."),
    ] = None,
    slab_bytes: Annotated[
        str | None, typer.Option(help='Pages for KV and adapters, such as "8GiB".')
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the GPU's memory that lorad may fill.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="Directory of the registry and the version store.")
    ] = None,
    registry_keep: Annotated[
        int | None, typer.Option(help="Newest versions that stay after a promote; 0: all.")
    ] = None,
    api_keys: Annotated[str | None, typer.Option(help="File of bearer keys.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: ConfigFile = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the daemon is ready; it goes on.")
    ] = False,
    log_file: Annotated[
        Path | None, typer.Option(help="With --detach: where its log goes.")
    ] = None,
) -> None:
    """Serve a base model and its adapters until SIGTERM or Ctrl-C; SIGHUP reloads settings.

    Settings come from these options, then LORAD_* variables, then lorad.toml.
    """
    flags = {
        "model.path": model,
        "model.name": name,
        "model.device": device,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "server.host": host,
        "server.port": port,
        "server.api_keys": api_keys,
        "admin.socket": socket,
        "engine.max_num_seqs": max_num_seqs,
        "engine.max_num_batched_tokens": max_num_batched_tokens,
        "engine.max_loras": max_loras,
        "engine.max_lora_rank": max_lora_rank,
        "engine.max_cpu_loras": max_cpu_loras,
        "engine.threads": threads,
        "engine.cuda_graphs": cuda_graphs,
        "memory.slab_bytes": slab_bytes,
        "memory.gpu_memory_utilization": gpu_memory_utilization,
        "registry.path": registry,
        "registry.keep": registry_keep,
        "log.level": log_level,
    }
    with _reported():
        _warn_of_variables()
        loaded = _load(config, flags)
        if not loaded.config.model.path:
            raise LoradError(
                "usage.invalid",
                "no model is given",
                hint="lorad start --model DIRECTORY_OR_HUB_ID, or [model] path in lorad.toml",
            )
        if detach:
            from lorad.detach import start_detached

            start_detached(sys.argv[1:], socket_path(loaded.config.admin.socket or None), log_file)
        else:
            _serve(loaded.config, lambda: _load(config, flags).config)


@app.command()
def stop(
    socket: SocketOption = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until it has ended.", min=0)
    ] = 60.0,
) -> None:
    """Ask the daemon to finish its running requests and end."""
    from lorad.detach import stop_daemon

    with _reported():
        stop_daemon(socket_path(socket), timeout)
        typer.echo("lorad has stopped")


@app.command()
def status(socket: SocketOption = None, json: JsonOption = False) -> None:
    """Whether the daemon runs, what it serves, and how full it is."""
    from lorad.admin_client import AdminClient
    from lorad.detach import status_lines

    with _reported(as_json=json):
        found = AdminClient(Path(socket) if socket else None).status()
        if json:
            from json import dumps

            typer.echo(dumps({"schema": "lorad/status/v1", **found}, indent=2))
        else:
            typer.echo("\n".join(status_lines(found)))


@app.command("check-config")
def check_config(config: ConfigFile = None, json: JsonOption = False) -> None:
    """Print every setting's effective value, and where it comes from."""
    with _reported(as_json=json):
        _warn_of_variables()
        loaded = _load(config, {})
        rows = [(key, value, loaded.origins[key]) for key, value in loaded.config.items()]
        if json:
            from json import dumps

            settings = {key: {"value": value, "from": origin} for key, value, origin in rows}
            typer.echo(dumps({"schema": "lorad/config/v1", "settings": settings}, indent=2))
            return
        width = max(len(key) for key, _, _ in rows)
        for key, value, origin in rows:
            typer.echo(f"{key:{width}}  {value!r:24}  {origin}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _load(file: Path | None, flags: dict[str, Any]) -> LoadedConfig:
    return load_config(config_file(str(file) if file else None), os.environ, flags)


def _warn_of_variables() -> None:
    for warning in unknown_variables(os.environ):
        typer.echo(f"warning: {warning}", err=True)


_BEFORE_TORCH = {
    # OpenMP's threads would spin for milliseconds after each matmul, against the event loop and
    # whoever else is on the cores; a short spin is as fast when they are idle.
    "GOMP_SPINCOUNT": "1000",
    # oneDNN, and torch around it, keep code for each number of rows: half a megabyte for each of
    # 1,024, while all layers of a step, and most steps, need a handful.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def _serve(config: Config, read_again: Callable[[], Config]) -> None:
    from lorad.log import set_up_logging

    set_up_logging(config.log.level)
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
    from lorad.daemon import run  # imports torch: a second or more

    run(config, read_again, _announce, _layer_progress)


def _announce(ready: Ready) -> None:
    memory = ready.pages * ready.page_bytes / 2**30
    typer.echo(
        f"lorad is ready in {ready.seconds:.1f} s: {ready.url}/v1  "
        f"admin socket {ready.socket}\n"
        f"  {ready.base_model} on {ready.device} in {ready.dtype}, up to {ready.max_model_len} "
        f"tokens a request, {ready.pages} pages ({memory:.1f} GiB) for KV and adapters"
    )
    sys.stdout.flush()


def _layer_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rloading weights: layer {done} of {total}{end}")
        sys.stderr.flush()


class _reported:
    """Turns a LoradError into its message on stderr and its exit code."""

    def __init__(self, as_json: bool = False) -> None:
        self._as_json = as_json

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, LoradError):
            return
        if self._as_json:
            from json import dumps

            body = {"schema": "lorad/error/v1", "error": error.to_dict()}
            typer.echo(dumps(body, indent=2), err=True)
        else:
            typer.echo(f"error: {error.message} [{error.code}]", err=True)
            if error.hint:
                typer.echo(f"hint:  {error.hint}", err=True)
        raise typer.Exit(error.kind.exit_code) from None


def main() -> None:
    run_program(app)


if __name__ == "__main__":
    main()
