"""A random llama of two layers with one token a byte, for daemons that start at once."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LEAVES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (112, 64),
    "mlp.up_proj": (112, 64),
    "mlp.down_proj": (64, 112),
}


def write_tiny_model(directory: Path) -> Path:
    """A model directory: config, weights and tokenizer; the same bytes each time."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors = {"model.embed_tokens.weight": normal(256, 64), "lm_head.weight": normal(256, 64)}
    tensors["model.norm.weight"] = torch.ones(64)
    for layer in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}.{norm}.weight"] = torch.ones(64)
        for leaf, shape in LEAVES.items():
            tensors[f"{path}.{leaf}.weight"] = normal(*shape)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": alphabet[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
