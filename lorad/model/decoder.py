"""A compact decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lorad_kernels import (
    add_rms_norm,
    base_linear,
    finish,
    forward_pass,
    paged_attention,
    rotate_and_store,
    silu_mul,
    take_rows,
    tune_linears,
)
from torch import Tensor
from torch.nn.functional import rms_norm

from lorad.model.config import ModelConfig
from lorad.model.forward_batch import ForwardBatch
from lorad.model.layers import FusedLinear, RotaryEmbedding


@dataclass(frozen=True, slots=True)
class KVCacheViews:
    """Per layer, K and V as `[pages, block_size, kv_heads, head_dim]` views of the slab."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer; norms in float32, matrices in the serving dtype."""

    input_norm: Tensor  # [hidden]
    post_attention_norm: Tensor  # [hidden]
    q_norm: Tensor | None  # [head_dim], Qwen3
    k_norm: Tensor | None
    qkv_proj: FusedLinear
    o_proj: FusedLinear
    gate_up_proj: FusedLinear
    down_proj: FusedLinear


class Decoder:
    """Token ids to logits, over paged K and V."""

    def __init__(
        self,
        config: ModelConfig,
        embed_tokens: Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        lm_head: Tensor,
        rotary: RotaryEmbedding,
    ) -> None:
        self.config = config
        self.embed_tokens = embed_tokens  # [vocab, hidden]
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head  # [vocab, hidden]; the same tensor when embeddings are tied
        self.rotary = rotary
        self._logits = base_linear(lm_head)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    def forward(self, batch: ForwardBatch, kv: KVCacheViews) -> Tensor:
        """Logits `[S, vocab]` of the rows the batch asks for; writes the rows' K and V.

        The residual stream is float32: in bf16 its large channels (SmolLM2's reach 25,000) lose
        what the layers add, and the logits' error is half as large again.
        """
        with forward_pass(self.device):
            x = take_rows(self.embed_tokens, batch.token_ids, torch.float32)
            rope = self.rotary.at(batch.positions)
            delta = None
            for i, layer in enumerate(self.layers):
                normed = self._add_norm(x, delta, layer.input_norm)
                delta = self._attend(i, layer, normed, batch, kv, rope)
                normed = self._add_norm(x, delta, layer.post_attention_norm)
                activated = silu_mul(layer.gate_up_proj(normed, batch.lora))
                delta = layer.down_proj(activated, batch.lora)
            normed = self._add_norm(x, delta, self.final_norm)
            return self._logits(take_rows(normed, batch.logits_rows))

    def tune(self, spare_bytes: int) -> None:
        """Measure once how each projection is computed best; may copy weights (see ops)."""
        projections = [
            projection.base
            for layer in self.layers
            for projection in (
                layer.qkv_proj,
                layer.o_proj,
                layer.gate_up_proj,
                layer.down_proj,
            )
        ]
        tune_linears([*projections, self._logits], spare_bytes)

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Adds to the residual stream `x`, in place, and norms it."""
        return add_rms_norm(x, delta, weight, self.config.rms_norm_eps, self.dtype)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Qwen3's norm over each head of q or k, in float32."""
        normed = rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps)
        return normed.to(self.dtype)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        x: Tensor,
        batch: ForwardBatch,
        kv: KVCacheViews,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        shape = self.config.shape
        qkv = layer.qkv_proj(x, batch.lora).view(x.shape[0], -1, shape.head_dim)
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            finish(self.device)
            q, k = self._head_norm(q, layer.q_norm), self._head_norm(k, layer.k_norm)
        q = rotate_and_store(q, k, v, *rope, kv.k[index], kv.v[index], batch.attention)
        out = paged_attention(
            q,
            kv.k[index],
            kv.v[index],
            batch.attention,
            scale=shape.head_dim**-0.5,
            sliding_window=self.config.sliding_windows[index],
        )
        return layer.o_proj(out.reshape(x.shape[0], -1), batch.lora)
