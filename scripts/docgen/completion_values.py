"""What completion offers for the value of an option or an argument."""

from __future__ import annotations

from dataclasses import dataclass

from docgen.commands import Argument, Option
from lorad.config import DEVICES, DTYPES, LEVELS
from lorad.sizing.catalogue import known_models
from lorad.sizing.gpus import GPUS

# Options that take one of a few words, by "program command --option".
CHOICES: dict[str, tuple[str, ...]] = {
    "lorad start --device": DEVICES,
    "lorad start --dtype": DTYPES,
    "lorad start --log-level": LEVELS,
    "loractl plan --model": tuple(model.name for model in known_models()),
    "loractl plan --targets": ("qv", "qkv", "attn", "mlp", "all-linear", "experts", "experts-3d"),
    "loractl plan --dtype": ("bfloat16", "float16", "float32"),
    "loractl plan --kv-dtype": ("auto", "bfloat16", "float16", "float32", "fp8"),
    "loractl plan --gpu": tuple(GPUS),
    "loractl plan --popularity": ("uniform", "zipf:1.0", "slora:0.1"),
    "loractl plan --routing": ("affinity", "random"),
    "loractl plan --speculation": ("eagle", "medusa", "ngram"),
    "loractl plan --compare": ("vllm", "sglang", "vllm,sglang"),
    "loractl plan --sweep": ("rank", "slots", "context"),
    "loractl plan --plot": ("term",),
    "loractl plan --emit": ("lorad", "vllm", "sglang", "k8s"),
}
# Values that may be a path although they are not of type Path, because a hub id or a word may
# stand there too.
PATHS = {
    "lorad start --model",
    "lorad start --socket",
    "lorad start --registry",
    "lorad start --api-keys",
    "lorad stop --socket",
    "lorad status --socket",
    "loractl plan --model",
    "loractl plan --plot",
    "loractl inspect --base",
    "loractl inspect PATH",
    "loractl push SOURCE",
}


@dataclass(frozen=True)
class Values:
    """The words to offer, and whether file names are offered as well."""

    words: tuple[str, ...]
    paths: bool


def values_of(program: str, command: str, what: Option | Argument) -> Values:
    name = what.name if isinstance(what, Option) else what.metavar
    key = f"{program} {command} {name}"
    return Values(CHOICES.get(key, ()), what.is_path or key in PATHS)
