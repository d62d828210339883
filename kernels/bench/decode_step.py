"""One step of a model with random adapters: what the benchmarks here measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lorad_kernels import (
    AdapterFactors,
    AttentionBatch,
    base_linear,
    group_rows,
    long_rows,
    pack_adapter,
    row_max,
    step_tables,
)
from torch import Tensor

from lorad.memory.adapter_pool import factors_at
from lorad.memory.slab import Slab
from lorad.model.config import ModelConfig
from lorad.model.decoder import Decoder, DecoderLayer, KVCacheViews
from lorad.model.forward_batch import ForwardBatch, LoraBatch
from lorad.model.layers import FusedLinear, RotaryEmbedding, slice_starts
from lorad.sizing.adapter_size import AdapterLayout, uniform_modules
from lorad.sizing.adapter_size import pack_adapter as lay_out
from lorad.sizing.memory_plan import page_bytes
from lorad.sizing.model_shape import ModelShape, Projection

BLOCK = 16


@dataclass(frozen=True)
class DecodeStep:
    """A decoder, a slab with adapters at its start and K and V at its end."""

    decoder: Decoder
    slab: Slab
    kv: KVCacheViews
    adapters: list[AdapterFactors]
    adapter_bytes: list[int]
    context: int

    @classmethod
    def prepare(
        cls, decoder: Decoder, context: int, batch: int, ranks: Sequence[int]
    ) -> DecodeStep:
        shape, dtype = decoder.config.shape, decoder.dtype
        page = page_bytes(shape, BLOCK, dtype.itemsize)
        layouts = [_layout(shape, rank, dtype) for rank in ranks]
        pages = sum(-(-layout.nbytes // page) for layout in layouts)
        pages += batch * -(-context // BLOCK)
        slab = Slab.allocate(shape, pages, BLOCK, dtype, decoder.device)
        for part in slab.data.split(2**24):
            part.normal_(std=0.02)
        sizes = [layout.nbytes for layout in layouts]
        kv = KVCacheViews(*slab.kv_views(shape))
        return cls(decoder, slab, kv, _placed(layouts, slab), sizes, context)

    def batch(self, size: int, adapters: int, rows: int = 1) -> ForwardBatch:
        """`size` sequences of `rows` new tokens each; the first `adapters` adapters in turn."""
        device = self.decoder.device
        blocks = -(-self.context // BLOCK)
        first = self.slab.num_pages - size * blocks
        tables = torch.arange(first, self.slab.num_pages, device=device).view(size, blocks)
        positions = torch.arange(self.context - rows, self.context, device=device)
        attention = AttentionBatch(
            query_starts=tuple(range(0, size * rows + 1, rows)),
            context_lens=(self.context,) * size,
            num_decodes=size if rows == 1 else 0,
            block_tables=tables,
            context_lens_device=torch.full((size,), self.context, device=device),
            kv_pages=tables[:, positions // BLOCK].flatten(),
            kv_offsets=(positions % BLOCK).repeat(size),
        )
        tokens = torch.arange(size * rows, device=device)
        return ForwardBatch(
            token_ids=tokens * 977 % self.decoder.config.shape.vocab_size,
            positions=positions.repeat(size),
            attention=attention,
            logits_rows=tokens[rows - 1 :: rows].contiguous(),
            lora=self._lora(size, adapters, rows),
        )

    def _lora(self, size: int, adapters: int, rows: int) -> LoraBatch | None:
        if not adapters:
            return None
        used = self.adapters[:adapters]
        packed = [pack_adapter(adapter) for adapter in used]
        tables = step_tables(used, packed, self.decoder.device)
        slots = sorted(i % adapters for i in range(size))
        most = long_rows(self.decoder.device, self.decoder.dtype)
        return LoraBatch(self.slab.data, tables, group_rows(slots, [rows] * size, most))

    def run(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Logits' greatest value and token of each row."""
        return row_max(self.decoder.forward(batch, self.kv))

    def bytes_read(self, size: int, adapters: int) -> int:
        """Weights, K and V and the used adapters, each once."""
        shape = self.decoder.config.shape
        weights = sum(p.in_features * p.out_features for p in shape.projections)
        elements = weights * shape.num_layers + shape.vocab_size * shape.hidden_size
        elements += size * self.context * shape.kv_elements_per_token
        return elements * self.slab.data.element_size() + sum(self.adapter_bytes[:adapters])


def _layout(shape: ModelShape, rank: int, dtype: torch.dtype) -> AdapterLayout:
    modules = uniform_modules(shape, tuple(shape.linears), rank)
    return lay_out(shape, modules, dtype.itemsize)


def _placed(layouts: Sequence[AdapterLayout], slab: Slab) -> list[AdapterFactors]:
    """Packed from the slab's start on, as the device tier packs them."""
    adapters: list[AdapterFactors] = []
    start = 0
    for layout in layouts:
        adapters.append(factors_at(layout, start))
        start += -(-layout.nbytes // slab.page_bytes) * slab.page_elements
    return adapters


def random_decoder(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int
) -> Decoder:
    """A decoder of random weights, without a checkpoint."""
    shape = config.shape

    def tensor(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device).mul_(size[-1] ** -0.5)

    def linear(layer: int, index: int, projection: Projection) -> FusedLinear:
        weight = tensor(projection.out_features, projection.in_features)
        base = base_linear(weight)
        return FusedLinear(weight, None, base, layer, index, slice_starts(projection))

    def layer(index: int) -> DecoderLayer:
        linears = [linear(index, i, p) for i, p in enumerate(shape.projections)]
        ones = torch.ones(shape.hidden_size, device=device)
        return DecoderLayer(ones, ones, None, None, *linears)

    embed = tensor(shape.vocab_size, shape.hidden_size)
    rotary = RotaryEmbedding(config, max_positions, dtype, device)
    layers = tuple(layer(index) for index in range(shape.num_layers))
    final = torch.ones(shape.hidden_size, device=device)
    return Decoder(config, embed, layers, final, embed, rotary)
