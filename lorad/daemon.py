"""Composition root: builds every part from the configuration and runs them to the end.

The only file that may import everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn

from lorad import systemd
from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import PeftAdapter
from lorad.adapters.spectrum import read_checked
from lorad.adapters.weights import AdapterWeights, read_weights
from lorad.config import Config
from lorad.engine.async_engine import AsyncEngine
from lorad.engine.build import BuiltEngine, EngineOptions, build_engine
from lorad.errors import LoradError
from lorad.live_settings import LiveSettings, terminal_watch
from lorad.model.chat_template import ChatTemplate
from lorad.model.hub import model_directory
from lorad.model.tokenizer import Tokenizer
from lorad.paths import socket_path, state_dir
from lorad.registry.records import Who
from lorad.registry.registry import Registry
from lorad.server.admin import build_admin_app
from lorad.server.admin_transport import admin_server_config
from lorad.server.app import build_public_app
from lorad.server.canary_metrics import CanaryCollector
from lorad.server.canary_watch import CanaryWatch
from lorad.server.engine_metrics import metrics_source
from lorad.server.limits import Limits
from lorad.server.listener import public_listener
from lorad.server.self_test import SelfTest
from lorad.server.traffic import Traffic
from lorad.sizing.model_shape import ModelShape, read_config
from lorad.sockets import AdminGroups, AdminSocket, PassedSocket
from lorad.warming import keep_warm, warm_up

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_LOOK_EVERY = 1.0  # seconds, for a step that hangs
# Seconds that no honest step takes: on CUDA the first ones compile kernels, and on a slow CPU a
# prefill of a large model takes minutes.
_STEP_TIMEOUTS = {"cuda": 120.0, "cpu": 1200.0}


@dataclass(frozen=True)
class Ready:
    """What the ready line tells."""

    url: str
    socket: Path
    base_model: str
    device: str
    dtype: str
    pages: int
    page_bytes: int
    max_model_len: int
    seconds: float


def run(
    config: Config,
    read_again: Callable[[], Config],
    announce: Callable[[Ready], None],
    progress: Progress,
) -> None:
    """Serve until SIGTERM or SIGINT; raises LoradError when the daemon cannot start or go on.

    SIGHUP takes over what has changed in the settings, which `read_again` gives.
    """
    asyncio.run(_serve(config, read_again, announce, progress))


async def _serve(
    config: Config,
    read_again: Callable[[], Config],
    announce: Callable[[Ready], None],
    progress: Progress,
) -> None:
    started = time.monotonic()
    stop, live = asyncio.Event(), LiveSettings(config, read_again)
    _on_hangup(stop, live)
    # The cheap things that can fail come before the model is read.
    with (
        _admin_socket(config) as admin,
        contextlib.closing(public_listener(config.server.host, config.server.port)) as public,
    ):
        directory = model_directory(config.model.path)
        base_model = config.model.name or _base_name(config.model.path)
        tokenizer = Tokenizer.from_dir(directory)
        shape = ModelShape.from_config(read_config(directory), str(directory / "config.json"))
        with _open_registry(config, base_model, shape) as registry:
            built = build_engine(
                _engine_options(config, directory),
                store_reader(registry, shape),
                tokenizer.eos_token_ids,
                progress,
                registry.verify,
            )
            async with _running_engine(live, built, tokenizer) as engine:
                traffic = Traffic(engine, registry.find, CanaryWatch(_giving_up(registry)))
                template = ChatTemplate.from_dir(directory, tokenizer.special_tokens)
                canaries = CanaryCollector(registry.adapters, traffic.watch)
                metrics = metrics_source(engine.stats, canaries)
                public_app = build_public_app(
                    base_model=base_model,
                    engine=traffic,
                    registry=registry,
                    tokenizer=tokenizer,
                    chat_template=template,
                    limits=Limits(built.max_model_len, shape.vocab_size),
                    api_keys=live.api_keys,
                    metrics_text=metrics,
                    trouble=lambda: _trouble(engine, traffic),
                )
                admin_app = build_admin_app(
                    registry,
                    engine,
                    traffic,
                    config=lambda: dict(live.config.items()),
                    shutdown=stop.set,
                    metrics=metrics,
                    self_test=SelfTest(engine, tokenizer, template),
                    stopping=stop.is_set,
                    keep=lambda: live.config.registry.keep,
                    groups=admin.groups,
                )
                servers = [
                    (_Server(_public_config(public_app)), public),
                    (_Server(admin_server_config(admin_app)), admin.socket),
                ]
                async with _serving(servers), _signals(stop):
                    await warm_up(engine, registry, tokenizer)
                    leave_out_of_collections()
                    announce(_ready(public, admin, base_model, built, engine, started))
                    systemd.notify("READY=1", f"STATUS=serving {base_model}")
                    async with _beside(
                        keep_warm(engine, registry, traffic, config.registry.warm),
                        _watchdog(engine),
                    ):
                        failure = await _until(stop, engine)
                    systemd.notify("STOPPING=1")
                    if failure is not None:  # every request has its error; a new process can serve
                        log.critical("ending: %s", failure.message)
                        raise failure
                    patience = live.config.server.drain_timeout
                    log.info("stopping: up to %g s for what runs", patience)
                    await engine.stop(patience)
                log.info("stopped")


def _admin_socket(config: Config) -> AdminSocket | PassedSocket:
    groups = AdminGroups.named(config.admin.group, config.admin.read_group)
    try:
        passed = systemd.passed_socket()
    except (ValueError, OSError) as error:
        raise LoradError("config.invalid", f"socket activation: {error}") from None
    if passed is not None:
        return PassedSocket(passed, groups)
    return AdminSocket(socket_path(config.admin.socket or None), groups)


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these until the body is done."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(stop: asyncio.Event, engine: AsyncEngine) -> LoradError | None:
    """Wait for the end: None when it was asked for, else what ended the engine."""
    asked = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(engine.failure())
    await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    failed.cancel()
    return failed.result() if failed.done() and not stop.is_set() else None


async def _watchdog(engine: AsyncEngine) -> None:
    """Log when a step hangs and when it ends; tell systemd, if it wants to know, that none does."""
    interval = systemd.watchdog_seconds()
    hangs = False
    while True:
        trouble = engine.trouble
        if trouble is not None and not hangs:
            log.error("%s; systemd's watchdog, if there is one, hears no more", trouble.message)
        if trouble is None and hangs:
            log.warning("the step that seemed to hang has ended")
        hangs = trouble is not None
        if interval is not None and not hangs:
            systemd.notify("WATCHDOG=1")
        await asyncio.sleep(min(interval or _LOOK_EVERY, _LOOK_EVERY))


# --- parts --------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Two servers share one loop; signals are the daemon's, not theirs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _public_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )


@contextlib.asynccontextmanager
async def _serving(servers: list[tuple[_Server, socket.socket]]) -> AsyncIterator[None]:
    """Both servers, until the body is done."""
    tasks = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in servers]
    try:
        while not all(server.started for server, _ in servers):
            for task in tasks:
                if task.done():
                    task.result()
                    raise LoradError("daemon.error", "a server ended while it started")
            await asyncio.sleep(0.01)
        yield
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _signals(stop: asyncio.Event) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _on_hangup(stop: asyncio.Event, live: LiveSettings) -> None:
    """SIGHUP reloads, from the first moment on: one that comes while the model loads waits.

    A daemon whose terminal has gone away ends instead, as programs do.
    """
    terminal_is_gone = terminal_watch()

    def hangup() -> None:
        if terminal_is_gone():
            stop.set()
        else:
            live.reload()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup)


@contextlib.contextmanager
def _open_registry(config: Config, base_model: str, shape: ModelShape) -> Iterator[Registry]:
    def check(directory: Path) -> PeftAdapter:
        return read_checked(directory, shape, max_lora_rank=config.engine.max_lora_rank)

    state = Path(config.registry.path).expanduser() if config.registry.path else state_dir()
    registry = Registry.open(
        state,
        base_model,
        check,
        store=config.registry.store,
        cache_bytes=config.registry.cache_bytes,
    )
    try:
        yield registry
    finally:
        registry.close()


@contextlib.asynccontextmanager
async def _running_engine(
    live: LiveSettings, built: BuiltEngine, tokenizer: Tokenizer
) -> AsyncIterator[AsyncEngine]:
    settings = live.config.engine
    engine = AsyncEngine(
        built.engine,
        built.inbox,
        tokenizer,
        max_queued=settings.max_queued,
        step_timeout=settings.step_timeout or _STEP_TIMEOUTS[built.device.type],
    )
    live.follow(lambda config: setattr(engine, "max_queued", config.engine.max_queued))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        built.loader.stop()


def leave_out_of_collections() -> None:
    """What there is after the start stays: the garbage collector need not look at it again.

    A look at the several hundred thousand objects that torch alone brings takes 0.1 to 0.2 s, in
    which no thread gets on.
    """
    gc.collect()
    gc.freeze()


def store_reader(
    registry: Registry, shape: ModelShape
) -> Callable[[AdapterRef, ModelShape, torch.dtype], AdapterWeights]:
    """How the loader's thread reads one version: the bytes that are packed prove its digest."""

    def read(ref: AdapterRef, _: ModelShape, dtype: torch.dtype) -> AdapterWeights:
        try:
            return read_weights(registry.directory(ref), ref.digest, shape, dtype, verify=True)
        except LoradError:
            registry.verify(ref)  # knows whether the files are to blame, and marks the version
            raise

    return read


def _engine_options(config: Config, directory: Path) -> EngineOptions:
    return EngineOptions(
        model_dir=directory,
        device=config.model.device,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_loras=config.engine.max_loras,
        max_lora_rank=config.engine.max_lora_rank,
        max_cpu_loras=config.engine.max_cpu_loras,
        adapter_wait=config.engine.adapter_wait,
        threads=config.engine.threads,
        cuda_graphs=config.engine.cuda_graphs,
        slab_bytes=config.memory.slab_bytes,
        gpu_memory_utilization=config.memory.gpu_memory_utilization,
        block_size=config.memory.block_size,
        host_cache_bytes=config.memory.host_cache_bytes,
        adapter_floor=config.memory.adapter_floor,
        adapter_ceiling=config.memory.adapter_ceiling,
    )


def _base_name(model: str) -> str:
    """A hub id names itself; a directory is named by its last part."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model.partition("@")[0]


def _giving_up(registry: Registry) -> Callable[[AdapterName, str, str], None]:
    """Ends a canary from the event loop; the database is written in a thread."""
    running: set[asyncio.Future[None]] = set()

    def end(name: AdapterName, version: str, reason: str) -> None:
        log.warning("the canary %s@%s ends: %s", name, version, reason)
        registry.canaries.end(name, who=Who.daemon(), reason=reason, version=version)

    def give_up(name: AdapterName, version: str, reason: str) -> None:
        task = asyncio.get_running_loop().run_in_executor(None, end, name, version, reason)
        running.add(task)
        task.add_done_callback(running.discard)

    return give_up


def _trouble(engine: AsyncEngine, traffic: Traffic) -> str | None:
    if traffic.draining:
        return "the daemon is draining"
    if not engine.accepting:
        return "the daemon is stopping"
    trouble = engine.trouble
    return None if trouble is None else trouble.message


def _ready(
    public: socket.socket,
    admin: AdminSocket | PassedSocket,
    base_model: str,
    built: BuiltEngine,
    engine: AsyncEngine,
    started: float,
) -> Ready:
    host, port = public.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    stats = engine.stats()
    return Ready(
        url=f"http://{shown}:{port}",
        socket=admin.path,
        base_model=base_model,
        device=str(built.device),
        dtype=str(built.dtype).removeprefix("torch."),
        pages=stats.total_pages,
        page_bytes=stats.page_bytes,
        max_model_len=built.max_model_len,
        seconds=time.monotonic() - started,
    )
