"""A compact decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lorad_kernels import paged_attention, write_kv
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from lorad.model.config import ModelConfig
from lorad.model.forward_batch import ForwardBatch
from lorad.model.layers import FusedLinear, RotaryEmbedding, rotate


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
        x = embedding(batch.token_ids, self.embed_tokens).float()
        rope = self.rotary.at(batch.positions)
        for i, layer in enumerate(self.layers):
            x = x + self._attend(i, layer, self._norm(x, layer.input_norm), batch, kv, rope)
            x = x + self._mlp(layer, self._norm(x, layer.post_attention_norm), batch)
        x = self._norm(x[batch.logits_rows], self.final_norm)
        return linear(x, self.lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) in float32."""
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
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = rotate(q, *rope), rotate(k, *rope)
        write_kv(k, v, kv.k[index], kv.v[index], batch.attention)
        out = paged_attention(
            q,
            kv.k[index],
            kv.v[index],
            batch.attention,
            scale=shape.head_dim**-0.5,
            sliding_window=self.config.sliding_windows[index],
        )
        return layer.o_proj(out.reshape(x.shape[0], -1), batch.lora)

    def _mlp(self, layer: DecoderLayer, x: Tensor, batch: ForwardBatch) -> Tensor:
        gate, up = layer.gate_up_proj(x, batch.lora).chunk(2, dim=-1)
        return layer.down_proj(silu(gate) * up, batch.lora)
