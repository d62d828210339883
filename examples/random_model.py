"""Llamas of random weights with the demo model's tokenizer: for what needs no sense.

    python examples/random_model.py llama-1.1b

writes the model once into the cache, and prints its directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from demo_model import ensure_demo_model
from safetensors.torch import save_file

from lorad.paths import cache_dir
from lorad.sizing.model_shape import ModelShape

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SHAPES = {
    # 3 MB in bf16, with an adapter page of 2 kB for 16 tokens.
    "tiny-llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    # TinyLlama-1.1B's, but for the vocabulary: 2.3 GB in bf16.
    "llama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}


def ensure_random_model(name: str) -> Path:
    """Its directory; written if it is not in the cache yet."""
    directory = cache_dir() / "models" / name
    if (directory / "config.json").exists():
        return directory
    demo = ensure_demo_model()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": json.loads((demo / "config.json").read_text())["vocab_size"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[name],
    }
    directory.mkdir(parents=True, exist_ok=True)
    for file in _TOKENIZER:
        shutil.copy(demo / file, directory / file)
    tensors = _tensors(ModelShape.from_config(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))  # last: now it is whole
    return directory


def _tensors(shape: ModelShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return values.bfloat16()

    ones = torch.ones(shape.hidden_size).bfloat16()
    tensors = {"model.embed_tokens.weight": random(shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        for leaf, (out_features, in_features) in shape.linears.items():
            path = f"{shape.module_path(layer, leaf)}.weight"
            tensors[path] = random(out_features, in_features)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ones.clone()
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = random(shape.vocab_size, shape.hidden_size)
    return tensors | {"model.norm.weight": ones}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a model of random weights.")
    parser.add_argument("name", choices=SHAPES)
    print(ensure_random_model(parser.parse_args().name))
