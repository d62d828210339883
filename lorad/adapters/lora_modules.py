"""From tensors and settings to LoRA modules: every tensor finds its place, or is an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lorad.adapters.findings import Finding
from lorad.adapters.peft_config import LoraSettings
from lorad.adapters.safetensors_header import TensorEntry
from lorad.adapters.tensor_names import DecoderModule, Kind, TensorName, decoder_module, split_name
from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

SERVED_DTYPES = ("F32", "BF16", "F16")
# Checkpoints of these families hold q|k|v and gate|up as one linear each.
FUSED_MODEL_TYPES = frozenset({"phi3"})
# What one tensor of a fused linear adapts, in the order of its output rows.
FUSED_LEAVES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Checked when there is no base model to ask.
_ANY_DECODER = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted linear: `a` is lora_A `[rank, in]`, `b` is lora_B `[out, rank]`.

    `path` is the name that `ModelShape.module_path` gives, whatever prefix the file uses. A fused
    linear of the Phi-3 kind is one module with the leaf `qkv_proj` or `gate_up_proj`;
    `PeftAdapter.served_factors` takes it apart.
    """

    path: str
    leaf: str
    layer: int
    rank: int
    alpha: float
    scaling: float
    a: TensorEntry
    b: TensorEntry

    @property
    def trained_path(self) -> str:
        """The name of the linear in the model it was trained on, without PEFT's prefix."""
        return split_name(self.a.name).module


@dataclass(frozen=True, slots=True)
class _Base:
    """The linears that an adapter may name: (parent, leaf) -> (out, in), when known."""

    linears: Mapping[tuple[str, str], tuple[int, int] | None]
    num_layers: int | None

    @property
    def module_count(self) -> int | None:
        return None if self.num_layers is None else self.num_layers * len(self.linears)


def base_linears(shape: ModelShape | None) -> _Base:
    """What the base model can have adapted; with no base, the names of the Llama family."""
    if shape is None:
        names = [(parent, leaf) for parent, leaves in _ANY_DECODER.items() for leaf in leaves]
        return _Base(dict.fromkeys(names), None)
    if shape.model_type in FUSED_MODEL_TYPES:
        return _Base(
            {(p.parent, p.name): (p.out_features, p.in_features) for p in shape.projections},
            shape.num_layers,
        )
    return _Base(
        {
            (projection.parent, part.leaf): (part.out_features, projection.in_features)
            for projection in shape.projections
            for part in projection.slices
        },
        shape.num_layers,
    )


def modules_present(shape: ModelShape) -> int:
    """How many linears of the base model an adapter can adapt."""
    return shape.num_layers * len(base_linears(shape).linears)


@dataclass(slots=True)
class _Pair:
    """Both factors of one module, while they are being collected."""

    module: DecoderModule
    trained_path: str
    factors: dict[str, TensorEntry] = field(default_factory=dict)


# Kinds of tensor that are refused by name, in the order in which they are looked for.
_REFUSED_KINDS: dict[Kind, tuple[str, str, str]] = {
    "magnitude": (
        "adapter.dora_unsupported",
        "DoRA's magnitude vectors are not served",
        "merge the adapter into the base model, or train it without use_dora",
    ),
    "lora_bias": (
        "adapter.lora_bias_unsupported",
        "the biases of lora_B are not served",
        "train without lora_bias",
    ),
    "token_rows": (
        "adapter.target_unsupported",
        "retrained rows of the embedding are not served",
        "train without trainable_token_indices",
    ),
    "bias": (
        "adapter.bias_unsupported",
        "trained biases of the base model are not served",
        'train with bias="none"',
    ),
    "full_weight": (
        "adapter.modules_to_save_unsupported",
        "full copies of base weights are not served",
        "train without modules_to_save and without resizing the vocabulary",
    ),
}


def collect_modules(
    entries: Sequence[TensorEntry], settings: LoraSettings, shape: ModelShape | None
) -> tuple[tuple[LoraModule, ...], tuple[Finding, ...]]:
    """All modules in the order of their paths' layers, and what was set aside.

    Raises the `adapter.*` error that names the first tensors that cannot be applied exactly.
    """
    _refuse_empty(entries)
    named = [(entry, split_name(entry.name)) for entry in entries]
    base = base_linears(shape)
    pairs = _pair_up(named, base)
    modules = [_checked_module(path, pair, settings, base) for path, pair in sorted(pairs.items())]
    modules.sort(key=lambda module: module.layer)
    copies = [(entry, name) for entry, name in named if name.kind == "base_layer"]
    return tuple(modules), _base_copies(copies, base, shape)


def _refuse_empty(entries: Sequence[TensorEntry]) -> None:
    empty = [entry.name for entry in entries if 0 in entry.shape]
    if empty:
        raise LoradError(
            "adapter.empty_tensor",
            f"{_listed(empty)} of {len(entries)} tensors hold no numbers",
            hint="a sharded trainer saved before gathering its parameters; save it again",
            details={"tensors": empty[:_SHOWN], "count": len(empty)},
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:200] for name in names[:_SHOWN]) + more


def _pair_up(named: Sequence[tuple[TensorEntry, TensorName]], base: _Base) -> dict[str, _Pair]:
    factors = [(entry, name) for entry, name in named if name.kind in ("lora_A", "lora_B")]
    if factors:
        _refuse_kinds(named)
    pairs: dict[str, _Pair] = {}
    outside: list[str] = []
    unsupported = [entry.name for entry, name in named if name.kind == "embedding_lora"]
    for entry, name in factors:
        module = decoder_module(name.module)
        if module is None:
            is_head = name.module.rpartition(".")[2] in ("lm_head", "embed_tokens")
            (unsupported if is_head else outside).append(entry.name)
        elif (module.parent, module.leaf) not in base.linears:
            unsupported.append(entry.name)
        else:
            pair = pairs.setdefault(module.path, _Pair(module, name.module))
            _add_factor(pair, name, entry)
    others = [entry.name for entry, name in named if name.kind == "other"]
    _refuse_unplaced(len(named), pairs, unsupported, [*outside, *others], base)
    return pairs


def _refuse_kinds(named: Sequence[tuple[TensorEntry, TensorName]]) -> None:
    by_kind: dict[Kind, list[str]] = defaultdict(list)
    for entry, name in named:
        by_kind[name.kind].append(entry.name)
    for kind, (code, what, hint) in _REFUSED_KINDS.items():
        if by_kind[kind]:
            raise LoradError(
                code,
                f"{what}: {_listed(by_kind[kind])}",
                hint=hint,
                details={"tensors": by_kind[kind][:_SHOWN], "count": len(by_kind[kind])},
            )


def _add_factor(pair: _Pair, name: TensorName, entry: TensorEntry) -> None:
    if name.kind in pair.factors:
        raise LoradError(
            "adapter.unmatched_tensor",
            f"{pair.module.path} has two {name.kind}: "
            f"{pair.factors[name.kind].name} and {entry.name}",
            hint="save one adapter per directory",
            details={"tensors": [pair.factors[name.kind].name, entry.name]},
        )
    pair.factors[name.kind] = entry


def _refuse_unplaced(
    total: int,
    pairs: Mapping[str, _Pair],
    unsupported: Sequence[str],
    unmatched: Sequence[str],
    base: _Base,
) -> None:
    if unsupported:
        raise LoradError(
            "adapter.target_unsupported",
            f"the base model serves no LoRA on {_listed(unsupported)}",
            hint=f"served are {', '.join(leaf for _, leaf in base.linears)} of decoder layers",
            details={"tensors": list(unsupported[:_SHOWN]), "count": len(unsupported)},
        )
    if not pairs:
        present = "" if base.module_count is None else f" of {base.module_count}"
        first = f"; the first tensors are {_listed(unmatched)}" if unmatched else ""
        raise LoradError(
            "adapter.no_module_matched",
            f"0{present} modules matched by {total} tensors{first}",
            hint="the adapter is for another model, or the file is not a LoRA adapter",
            details={"matched": 0, "present": base.module_count, "tensors": total},
        )
    if unmatched:
        raise LoradError(
            "adapter.unmatched_tensor",
            f"no module of the base model takes {_listed(unmatched)}",
            hint="they belong to another model, or to a method other than LoRA",
            details={"tensors": list(unmatched[:_SHOWN]), "count": len(unmatched)},
        )


def _checked_module(path: str, pair: _Pair, settings: LoraSettings, base: _Base) -> LoraModule:
    a, b = pair.factors.get("lora_A"), pair.factors.get("lora_B")
    if a is None or b is None:
        only, lost = ("lora_A", "lora_B") if b is None else ("lora_B", "lora_A")
        raise LoradError(
            "adapter.unpaired_tensor",
            f"{path} has a {only} but no {lost}",
            hint="the file is incomplete; save the adapter again",
            details={"module": path, "missing": lost},
        )
    for entry in (a, b):
        _check_factor(path, entry)
    rank, alpha, scaling = settings.resolve(pair.trained_path)
    _check_rank(path, rank, a, b)
    _check_base(path, pair.module, a, b, base)
    return LoraModule(path, pair.module.leaf, pair.module.layer, rank, alpha, scaling, a, b)


def _check_factor(path: str, entry: TensorEntry) -> None:
    if entry.dtype not in SERVED_DTYPES:
        raise LoradError(
            "adapter.dtype_unsupported",
            f"{entry.name} is {entry.dtype}; served are {', '.join(SERVED_DTYPES)}",
            hint="save the adapter in float32, bfloat16 or float16",
            details={"tensor": entry.name, "dtype": entry.dtype},
        )
    if len(entry.shape) != 2:
        raise LoradError(
            "adapter.shape_mismatch",
            f"{path}: {entry.name} has the shape {list(entry.shape)}; a factor is a matrix",
            hint="only LoRA on linear layers is served",
            details={"tensor": entry.name, "shape": list(entry.shape)},
        )


def _check_rank(path: str, rank: int, a: TensorEntry, b: TensorEntry) -> None:
    if not rank == a.shape[0] == b.shape[1]:
        raise LoradError(
            "adapter.rank_mismatch",
            f"{path}: the config says rank {rank}, lora_A {list(a.shape)} has {a.shape[0]} "
            f"and lora_B {list(b.shape)} has {b.shape[1]}",
            hint="r and rank_pattern must be those the adapter was trained with",
            details={"module": path, "config": rank, "a": list(a.shape), "b": list(b.shape)},
        )


def _check_base(
    path: str, module: DecoderModule, a: TensorEntry, b: TensorEntry, base: _Base
) -> None:
    if base.num_layers is not None and module.layer >= base.num_layers:
        raise _base_mismatch(
            f"{path} is in layer {module.layer}, but the base model has {base.num_layers} layers",
            module=path,
            layers=base.num_layers,
        )
    expected = base.linears[module.parent, module.leaf]
    found = (b.shape[0], a.shape[1])
    if expected is not None and found != expected:
        raise _base_mismatch(
            f"{path} is {list(expected)} (out, in) in the base model, "
            f"but the adapter was trained on {list(found)}",
            module=path,
            base=list(expected),
            adapter=list(found),
        )


def _base_mismatch(message: str, **details: object) -> LoradError:
    return LoradError(
        "adapter.base_mismatch",
        message,
        hint="the adapter was trained on another base model",
        details=details,
    )


def _base_copies(
    copies: Iterable[tuple[TensorEntry, TensorName]], base: _Base, shape: ModelShape | None
) -> tuple[Finding, ...]:
    """Copies of the base's own weights, which PEFT saves beside some targets: not needed."""
    names = []
    for entry, name in copies:
        _check_copy(entry, name, base, shape)
        names.append(entry.name)
    if not names:
        return ()
    message = f"copies of base weights are not read: {_listed(names)}"
    return (Finding("base_layer_ignored", message, {"tensors": names[:_SHOWN]}),)


def _check_copy(
    entry: TensorEntry, name: TensorName, base: _Base, shape: ModelShape | None
) -> None:
    if shape is None or not entry.name.endswith(".weight"):
        return
    module = decoder_module(name.module)
    if module is not None:
        expected = base.linears.get((module.parent, module.leaf))
    else:
        expected = (shape.vocab_size, shape.hidden_size)
    if expected is not None and entry.shape != expected:
        raise _base_mismatch(
            f"{entry.name} is {list(entry.shape)}, but the base model's is {list(expected)}",
            tensor=entry.name,
            base=list(expected),
            adapter=list(entry.shape),
        )
