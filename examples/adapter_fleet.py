"""Writes an adapter of a model quickly: PEFT's two files, random factors, no PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorad.sizing.model_shape import ModelShape

QV = ("q_proj", "v_proj")


def write_adapter(
    directory: Path, shape: ModelShape, rank: int, seed: int, leaves: Sequence[str] = QV
) -> Path:
    """One adapter in bf16 with A and B of a size that changes answers but not into noise."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for leaf in leaves:
            out_features, in_features = shape.linears[leaf]
            path = f"base_model.model.{shape.module_path(layer, leaf)}"
            a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
            b = torch.randn(out_features, rank, generator=generator) * 0.05 * rank**-0.5
            tensors[f"{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"{path}.lora_B.weight"] = b.bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(leaves),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
