"""A random Llama of two layers with the demo model's tokenizer: for what needs no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from demo_model import ensure_demo_model
from safetensors.torch import save_file

from lorad.paths import cache_dir
from lorad.sizing.model_shape import ModelShape

NAME = "tiny-llama"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def ensure_tiny_model() -> Path:
    """Written once into the cache: 3 MB in bf16, with an adapter page of 2 kB for 16 tokens."""
    directory = cache_dir() / "models" / NAME
    if (directory / "config.json").exists():
        return directory
    demo = ensure_demo_model()
    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for file in _TOKENIZER:
        shutil.copy(demo / file, directory / file)
    save_file(_tensors(ModelShape.from_config(config)), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
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
    return tensors | {"model.norm.weight": ones}


if __name__ == "__main__":
    print(ensure_tiny_model())
