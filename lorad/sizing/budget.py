"""Where the memory of one GPU goes, and what is left for KV and adapters."""

from __future__ import annotations

from dataclasses import dataclass

from lorad.sizing.architecture import Architecture
from lorad.sizing.memory_plan import (
    Scratch,
    device_slab_bytes,
    page_bytes,
    pages_for,
    scratch_bytes,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of one GPU (or of the CPU, where the slab is given) and the paths into it."""

    label: str  # "h100-80g"
    total: int  # bytes a process sees; 0 where only the slab is known
    slab: int  # bytes given for the slab; 0 = what is left of `total`
    utilization: float  # the share of `total` a daemon may use
    host_ram: int  # bytes for adapters in host memory; 0 = not said
    host_link_gb_s: float  # host memory to device
    disk_gb_s: float  # store to host memory


@dataclass(frozen=True, slots=True)
class Demand:
    """What must run at once."""

    context: int  # tokens per sequence
    concurrency: int  # sequences in one batch
    max_num_batched_tokens: int
    block_size: int = 16
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Itemsizes:
    """Bytes per element of weights, KV and adapters."""

    weights: int
    kv: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Budget:
    """One GPU's memory in bytes, and its slab in pages."""

    usable: int  # 0 where only the slab is known
    weights: int
    scratch: Scratch | None
    slab: int  # negative: short of it before the first page
    page: int
    pages: int
    kv_per_token: int
    kv_per_sequence_pages: int
    kv_pages: int  # for all sequences at their full context
    adapter_pages: int  # what KV leaves

    @property
    def kv_fits(self) -> bool:
        return self.kv_pages <= self.pages


def make_budget(
    arch: Architecture, machine: Machine, demand: Demand, sizes: Itemsizes, max_rank: int
) -> Budget:
    """The budget of one of `demand.tp` GPUs; it never raises, it says what does not fit."""
    weights = arch.elements_per_gpu(demand.tp) * sizes.weights
    scratch = None
    slab = machine.slab
    if not slab:
        scratch = scratch_bytes(
            arch,
            demand.max_num_batched_tokens,
            demand.concurrency,
            sizes.weights,
            max_rank,
            demand.tp,
            max_model_len=demand.context,
            block_size=demand.block_size,
        )
        slab = device_slab_bytes(machine.total, machine.utilization, weights, scratch.reserved)
    page = page_bytes(arch, demand.block_size, sizes.kv, demand.tp)
    pages = max(0, slab) // page
    per_sequence = pages_for(demand.context, demand.block_size)
    kv_pages = demand.concurrency * per_sequence
    return Budget(
        usable=int(machine.total * machine.utilization),
        weights=weights,
        scratch=scratch,
        slab=slab,
        page=page,
        pages=pages,
        kv_per_token=page // demand.block_size,
        kv_per_sequence_pages=per_sequence,
        kv_pages=kv_pages,
        adapter_pages=max(0, pages - kv_pages),
    )
