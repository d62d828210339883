"""Reads a checkpoint's safetensors into a Decoder, fusing q|k|v and gate|up on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from lorad_kernels import Arena, base_linear, prepare
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorad.errors import LoradError
from lorad.model.config import ModelConfig
from lorad.model.decoder import Decoder, DecoderLayer
from lorad.model.layers import FusedLinear, RotaryEmbedding, slice_starts
from lorad.sizing.host_memory import available_host_bytes
from lorad.sizing.model_shape import ModelShape, Projection

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
# Buffers that old checkpoints carry and no forward pass reads.
_IGNORED = (".rotary_emb.inv_freq",)


class Checkpoint:
    """The tensors of a model directory, by name, each handed out once."""

    def __init__(self, directory: Path) -> None:
        self._files = [safe_open(str(path), framework="pt") for path in _weight_files(directory)]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._left = {name for name in self._where if not name.endswith(_IGNORED)}
        self._directory = directory

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, checked against the shape config.json promises."""
        if name not in self._where:
            raise _bad(f"{self._directory} has no tensor {name}")
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise _bad(f"{name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        self._left.discard(name)
        return tensor

    def check_all_taken(self) -> None:
        """A tensor nobody asked for means the model would be computed wrong."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise _bad(f"{len(self._left)} tensors of the checkpoint are not used: {some}, ...")

    def skip(self, name: str) -> None:
        self._left.discard(name)


def _bad(message: str) -> LoradError:
    return LoradError(
        "model.invalid", message, hint="the checkpoint does not belong to its config.json"
    )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    names = [WEIGHTS_FILE]
    if index.is_file():
        names = _indexed_files(index)
    files = [directory / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise LoradError(
            "model.not_found",
            f"{directory} has no {', '.join(missing)}",
            hint="lorad reads safetensors checkpoints only, never pickle (.bin)",
        )
    return files


def _indexed_files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _bad(f"{index} is no index of a safetensors checkpoint") from None


def load_decoder(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """The model of a Hugging Face directory on a device; `model.invalid` if it does not fit.

    `progress(done, total)` is called after each layer.
    """
    try:
        checkpoint = Checkpoint(directory)
    except SafetensorError as error:
        raise LoradError("model.invalid", f"{directory}: {error}") from None
    reader = _LayerReader(checkpoint, config, dtype, device)
    shape = config.shape
    vocab = (shape.vocab_size, shape.hidden_size)
    embed = reader.matrix(["model.embed_tokens.weight"], [vocab])
    lm_head = embed
    if shape.tie_word_embeddings:
        checkpoint.skip("lm_head.weight")
    else:
        lm_head = reader.matrix(["lm_head.weight"], [vocab])
    layers = []
    for index in range(shape.num_layers):
        layers.append(reader.layer(index))
        progress(index + 1, shape.num_layers)
    final_norm = reader.norm("model.norm.weight", shape.hidden_size)
    checkpoint.check_all_taken()
    rotary = RotaryEmbedding(config, max_positions, dtype, device)
    decoder = Decoder(config, embed, tuple(layers), final_norm, lm_head, rotary)
    prepare(device, dtype)
    decoder.tune(available_host_bytes() // 8)
    return decoder


class _LayerReader:
    """Reads one decoder layer after the other in the serving dtype."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.device = device
        self._arena = Arena(_matrices(config.shape), dtype, device)

    def matrix(self, names: list[str], shapes: list[tuple[int, int]]) -> Tensor:
        """One or several matrices of the same width, one below the other."""
        whole = self._arena.take((sum(shape[0] for shape in shapes), shapes[0][1]))
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            whole[row : row + shape[0]].copy_(self.checkpoint.take(name, shape))
            row += shape[0]
        return whole

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.checkpoint.take(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int) -> Tensor:
        return self.checkpoint.take(name, (size,)).to(self.device, torch.float32)

    def layer(self, index: int) -> DecoderLayer:
        shape, prefix = self.config.shape, f"model.layers.{index}"
        hidden = shape.hidden_size
        qkv, o, gate_up, down = shape.projections
        bias = {
            "qkv_proj": self.config.qkv_bias,
            "o_proj": self.config.o_bias,
            "gate_up_proj": self.config.mlp_bias,
            "down_proj": self.config.mlp_bias,
        }

        def linear(position: int, projection: Projection) -> FusedLinear:
            return self._linear(index, position, projection, bias[projection.name])

        def qk_norm(name: str) -> Tensor | None:
            path = f"{prefix}.self_attn.{name}.weight"
            return self.norm(path, shape.head_dim) if shape.qk_norm else None

        return DecoderLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm.weight", hidden),
            post_attention_norm=self.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            q_norm=qk_norm("q_norm"),
            k_norm=qk_norm("k_norm"),
            qkv_proj=linear(0, qkv),
            o_proj=linear(1, o),
            gate_up_proj=linear(2, gate_up),
            down_proj=linear(3, down),
        )

    def _linear(
        self, layer: int, position: int, projection: Projection, has_bias: bool
    ) -> FusedLinear:
        paths = [
            f"model.layers.{layer}.{projection.parent}.{part.leaf}" for part in projection.slices
        ]
        sizes = [part.out_features for part in projection.slices]
        weight = self.matrix(
            [f"{path}.weight" for path in paths],
            [(size, projection.in_features) for size in sizes],
        )
        bias = None
        if has_bias:
            parts = zip(paths, sizes, strict=True)
            bias = torch.cat([self.tensor(f"{path}.bias", (size,)) for path, size in parts])
        return FusedLinear(
            weight, bias, base_linear(weight, bias), layer, position, slice_starts(projection)
        )


def _matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """The shapes of all matrices of a model, as they are kept."""
    layer = [(p.out_features, p.in_features) for p in shape.projections]
    vocab = (shape.vocab_size, shape.hidden_size)
    return [vocab] * (1 if shape.tie_word_embeddings else 2) + layer * shape.num_layers
