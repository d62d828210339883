"""Puts an engine together from a model directory: weights, slab, tiers, scheduler."""

from __future__ import annotations

import logging
import queue
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import torch
from lorad_kernels import captures, compiled_at_launch
from torch import Tensor

from lorad.adapter_ref import AdapterRef
from lorad.adapters.host_cache import HostCache
from lorad.adapters.loader import AdapterLoader
from lorad.adapters.weights import AdapterWeights
from lorad.engine.adapter_tiers import AdapterTiers
from lorad.engine.decode_graphs import Capture, CudaCapture, DecodeGraphs, recorded
from lorad.engine.delta_check import DeltaChecker
from lorad.engine.device_choice import choose_device, choose_dtype
from lorad.engine.engine import Engine, Message, StartCheck
from lorad.engine.model_runner import ModelRunner
from lorad.engine.scheduler import Scheduler, SchedulerLimits
from lorad.errors import LoradError
from lorad.memory.adapter_pool import AdapterPool
from lorad.memory.eviction import Eviction
from lorad.memory.kv_cache import KVCache
from lorad.memory.page_pool import PagePool
from lorad.memory.pinned_arena import cuda_arena
from lorad.memory.slab import Slab
from lorad.model.config import ModelConfig
from lorad.model.decoder import Decoder
from lorad.model.loader import load_decoder
from lorad.sizing.adapter_size import pack_adapter, uniform_modules
from lorad.sizing.host_memory import available_host_bytes
from lorad.sizing.memory_plan import (
    device_slab_bytes,
    page_bytes,
    plan_slab,
    scratch_bytes,
    weight_bytes,
)
from lorad.sizing.model_shape import ModelShape, read_config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything an engine is built from. Sizes in bytes; 0 means "decide from the machine"."""

    model_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_loras: int = 32
    max_lora_rank: int = 64
    max_cpu_loras: int = 256
    adapter_wait: float = 5.0
    threads: int = 0
    cuda_graphs: bool = True
    slab_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    host_cache_bytes: int = 0
    adapter_floor: float = 0.0  # share of the pages that K and V leave to adapters
    adapter_ceiling: float = 1.0  # share of the pages that adapters may take


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, ready to step, and what its owner needs to know of it."""

    engine: Engine
    inbox: queue.SimpleQueue[Message | None]
    loader: AdapterLoader
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


# Reads one adapter version from the store: (reference, base shape, serving dtype) -> weights.
ReadAdapter = Callable[[AdapterRef, ModelShape, torch.dtype], AdapterWeights]
# The directory of a version whose bytes have its digest: for probes, which read it by themselves.
AdapterFiles = Callable[[AdapterRef], Path]


def _no_files(ref: AdapterRef) -> Path:
    raise LoradError("engine.failed", f"this engine knows no files of {ref} to compare with")


def build_engine(
    options: EngineOptions,
    read_adapter: ReadAdapter,
    eos_token_ids: frozenset[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
    adapter_files: AdapterFiles = _no_files,
) -> BuiltEngine:
    """Load the model and allocate the slab.

    Raises `model.*`, `config.invalid`, `memory.no_capacity` or `engine.failed`.

    Without `adapter_files` every ProbeAdapter fails.
    """
    config = ModelConfig.from_config(read_config(options.model_dir))
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config, device)
    if options.threads:
        torch.set_num_threads(options.threads)
    max_model_len = _max_model_len(options, config)
    decoder = load_decoder(
        options.model_dir,
        config,
        dtype=dtype,
        device=device,
        max_positions=max_model_len,
        progress=progress,
    )
    capture = _capture(options, config, device)
    return assemble(
        options,
        config,
        decoder,
        read_adapter,
        eos_token_ids,
        max_model_len,
        capture,
        adapter_files,
    )


def assemble(
    options: EngineOptions,
    config: ModelConfig,
    decoder: Decoder,
    read_adapter: ReadAdapter,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    capture: Capture | None,
    adapter_files: AdapterFiles = _no_files,
) -> BuiltEngine:
    """An engine around a decoder that is loaded. Raises `memory.no_capacity`."""
    device, dtype = decoder.device, decoder.dtype
    slab = _allocate_slab(
        options, config, dtype, device, max_model_len, scratch_page=capture is not None
    )
    graphs = _graphs(options, decoder, slab, max_model_len, capture) if capture else None
    inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    host_bytes = options.host_cache_bytes or available_host_bytes() // 4
    keep = _keeper(options, config.shape, dtype, device, host_bytes)
    loader = AdapterLoader(_reader(read_adapter, config.shape, dtype, keep), inbox.put)
    loader.start()
    check = DeltaChecker(adapter_files, config.shape, inbox.put).check
    host = HostCache(options.max_cpu_loras, host_bytes)
    engine = _engine(
        options, decoder, slab, graphs, host, loader, check, eos_token_ids, max_model_len
    )
    return BuiltEngine(engine, inbox, loader, config, dtype, device, max_model_len)


def _reader(
    read_adapter: ReadAdapter,
    shape: ModelShape,
    dtype: torch.dtype,
    keep: Callable[[Tensor], Tensor],
) -> Callable[[AdapterRef], AdapterWeights]:
    """What the loader's thread does for one adapter: read, pack, and lay where it is to wait."""

    def read(ref: AdapterRef) -> AdapterWeights:
        weights = read_adapter(ref, shape, dtype)
        return replace(weights, data=keep(weights.data))

    return read


def _keeper(
    options: EngineOptions,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    host_bytes: int,
) -> Callable[[Tensor], Tensor]:
    """Brings packed adapters to memory that the device can read by itself, where that matters."""
    if device.type != "cuda":
        return lambda data: data
    modules = uniform_modules(shape, tuple(shape.linears), options.max_lora_rank)
    largest = pack_adapter(shape, modules, dtype.itemsize).nbytes
    return cuda_arena(host_bytes, options.max_cpu_loras, largest).keep


def _engine(
    options: EngineOptions,
    decoder: Decoder,
    slab: Slab,
    graphs: DecodeGraphs | None,
    host: HostCache,
    loader: AdapterLoader,
    check: StartCheck,
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> Engine:
    pool = PagePool(
        slab.num_pages,
        adapter_floor=int(options.adapter_floor * slab.num_pages),
        adapter_ceiling=int(options.adapter_ceiling * slab.num_pages),
    )
    eviction = Eviction(pool)
    kv_cache = KVCache(pool, slab, eviction)
    tiers = AdapterTiers(
        AdapterPool(pool, slab, eviction, kv_cache),
        host,
        loader.load,
        loader.cancel,
        prefetch=options.max_loras,
    )
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_loras=options.max_loras,
        max_model_len=max_model_len,
        adapter_wait=options.adapter_wait,
    )
    scheduler = Scheduler(limits, kv_cache, tiers, eos_token_ids)
    runner = ModelRunner(decoder, slab, tiers, graphs)
    if compiled_at_launch(decoder.device):
        with _first_on_device("the kernels cannot be launched", "serve with --device cpu"):
            started = time.monotonic()
            runner.warm_up(max_model_len)
            log.info("first launch of all kernels: %.1f s", time.monotonic() - started)
    return Engine(
        scheduler,
        runner,
        tiers,
        pool,
        slab,
        eviction,
        check,
        weight_bytes=decoder_bytes(decoder),
        adapter_wait=options.adapter_wait,
    )


def _capture(options: EngineOptions, config: ModelConfig, device: torch.device) -> Capture | None:
    """What records decode steps; None where they are launched kernel by kernel."""
    if not captures(device, config.shape.head_dim):
        return None
    if device.type == "cpu":
        return recorded
    return CudaCapture(device) if options.cuda_graphs else None


def _graphs(
    options: EngineOptions, decoder: Decoder, slab: Slab, max_model_len: int, capture: Capture
) -> DecodeGraphs:
    """Captured decode steps. Raises `memory.no_capacity` and `engine.failed`."""
    started = time.monotonic()
    with _first_on_device("the decode steps cannot be captured", "set engine.cuda_graphs = false"):
        graphs = DecodeGraphs(
            decoder,
            slab,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            max_lora_rank=options.max_lora_rank,
            capture=capture,
        )
        if capture is not recorded:  # that costs less than a step, and memory: when needed
            graphs.capture_all()
            seconds = time.monotonic() - started
            log.info("captured %d decode steps in %.1f s", graphs.count, seconds)
    return graphs


@contextmanager
def _first_on_device(trouble: str, way_out: str) -> Iterator[None]:
    """Say what is wrong when the first steps on a device fail, and what may help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LoradError(
            "memory.no_capacity",
            f"{trouble}: {error}",
            hint=f"lower memory.gpu_memory_utilization, or {way_out}",
        ) from None
    except Exception as error:
        log.exception("%s", trouble)
        raise LoradError(
            "engine.failed",
            f"{trouble}: {str(error).partition(chr(10))[0]}",
            hint=_hint_of(error, way_out),
        ) from error


def _hint_of(error: Exception, way_out: str) -> str:
    """The first step on a device is the first to compile kernels: most often it is that."""
    if isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error):
        return "Triton needs a C compiler (gcc, or the one that CC names) and Python's headers"
    return f"{way_out}; the log has the details"


def decoder_bytes(decoder: Decoder) -> int:
    """Bytes of the model's own tensors; one that is used twice counts once."""
    found: dict[int, int] = {}

    def look(thing: object) -> None:
        if isinstance(thing, torch.Tensor):
            found[thing.data_ptr()] = thing.numel() * thing.element_size()
        elif is_dataclass(thing):
            for field in fields(thing):
                look(getattr(thing, field.name))

    for part in (decoder.embed_tokens, *decoder.layers, decoder.final_norm, decoder.lm_head):
        look(part)
    return sum(found.values())


def _max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    own = config.shape.max_position_embeddings
    if options.max_model_len > own:
        raise LoradError(
            "config.invalid",
            f"max_model_len {options.max_model_len} is above the model's own {own}",
            hint="positions beyond those the model was trained on give garbage",
        )
    return options.max_model_len or own


def _allocate_slab(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    *,
    scratch_page: bool,
) -> Slab:
    nbytes = page_bytes(config.shape, options.block_size, dtype.itemsize)
    pages = plan_slab(
        options.slab_bytes or _slab_budget(options, config.shape, dtype, device, max_model_len),
        nbytes,
    )
    needed = -(-max_model_len // options.block_size)
    for_kv = pages - int(options.adapter_floor * pages)
    if for_kv < needed:
        raise LoradError(
            "memory.no_capacity",
            f"the slab has {for_kv} pages for KV, one request of {max_model_len} tokens needs "
            f"{needed}",
            hint=f"lower model.max_model_len, or set memory.slab_bytes to {needed * nbytes}",
            details={"pages": pages, "needed": needed, "page_bytes": nbytes},
        )
    log.info("slab: %d pages of %d bytes on %s", pages, nbytes, device)
    try:
        return Slab.allocate(
            config.shape,
            pages,
            options.block_size,
            dtype,
            device,
            scratch_page=scratch_page,
        )
    except RuntimeError as error:  # torch's kinds of "out of memory" are all of this one
        raise LoradError(
            "memory.no_capacity",
            f"a slab of {pages * nbytes} bytes cannot be allocated on {device}: {error}",
            hint="lower memory.slab_bytes or memory.gpu_memory_utilization",
        ) from None


def _slab_budget(
    options: EngineOptions,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> int:
    """Bytes for the slab: what `loractl plan` prints, unless others fill the card already."""
    if device.type != "cuda":
        return available_host_bytes() // 4
    scratch = scratch_bytes(
        shape,
        options.max_num_batched_tokens,
        options.max_num_seqs,
        dtype.itemsize,
        options.max_lora_rank,
        max_model_len=max_model_len,
        block_size=options.block_size,
    ).reserved
    free, total = torch.cuda.mem_get_info(device)
    weights = weight_bytes(shape, dtype.itemsize)
    planned = device_slab_bytes(total, options.gpu_memory_utilization, weights, scratch)
    return min(planned, free - scratch)
