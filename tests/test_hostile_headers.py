"""Weights files and configs made to hurt: every one ends in a clean error, soon and small."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from lorad.adapters.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS
from lorad.errors import LoradError

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny"}
GOOD: dict[str, Any] = {
    NAME: {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
    NAME.replace("_A", "_B"): {"dtype": "F32", "shape": [8, 2], "data_offsets": [64, 128]},
}
DATA = bytes(128)


def file(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def changed(**fields: Any) -> bytes:
    """A good file whose first tensor has other fields; None takes a field away."""
    entry = {**GOOD[NAME], **fields}
    entry = {key: value for key, value in entry.items() if value is not None}
    return file(json.dumps({**GOOD, NAME: entry}).encode())


def text(old: str, new: str) -> bytes:
    """A good file with a piece of its header replaced."""
    header = json.dumps(GOOD)
    assert old in header
    return file(header.replace(old, new, 1).encode("utf-8", "surrogatepass"))


def many_tensors(count: int) -> bytes:
    entries = ",".join(
        f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count)
    )
    return file(b"{" + entries.encode() + b"}", b"")


CORRUPT = "adapter.weights_corrupt"
LARGE = "adapter.too_large"
DTYPE = "adapter.dtype_unsupported"
EMPTY = "adapter.empty_tensor"

HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty file": (lambda: b"", CORRUPT),
    "seven bytes": (lambda: bytes(7), CORRUPT),
    "length only": (lambda: bytes(8), CORRUPT),
    "length 0": (lambda: file(b"{}", length=0), CORRUPT),
    "length 1": (lambda: file(b"{}", length=1), CORRUPT),
    "length one too many": (lambda: file(b"{}", b"", length=3), CORRUPT),
    "length 2**63": (lambda: file(b"{}", length=2**63), CORRUPT),
    "length 2**64 - 1": (lambda: file(b"{}", length=2**64 - 1), CORRUPT),
    "length into the data": (lambda: file(json.dumps(GOOD).encode(), length=400), CORRUPT),
    "length short of the object": (lambda: file(json.dumps(GOOD).encode(), length=40), CORRUPT),
    "zip file": (lambda: b"PK\x03\x04" + bytes(400), CORRUPT),
    "pickle": (lambda: b"\x80\x04\x95" + bytes(400), CORRUPT),
    "not JSON": (lambda: file(b"hello, world"), CORRUPT),
    "a list": (lambda: file(b"[]"), CORRUPT),
    "a number": (lambda: file(b"12"), CORRUPT),
    "not UTF-8": (lambda: file(b'{"\xff\xfe": {}}'), CORRUPT),
    "overlong UTF-8": (lambda: file(b'{"\xc0\xaf": {}}'), CORRUPT),
    "lone surrogate": (lambda: text('"base', '"\\ud800base'), CORRUPT),
    "control character in a name": (lambda: text('"base', '"\nbase'), CORRUPT),
    "bad escape": (lambda: text('"base', '"\\x41base'), CORRUPT),
    "text after the object": (lambda: file(json.dumps(GOOD).encode() + b"{}"), CORRUPT),
    "NUL padding": (lambda: file(json.dumps(GOOD).encode() + bytes(8)), CORRUPT),
    "comments": (lambda: text("{", "{/**/"), CORRUPT),
    "trailing comma": (lambda: text("}}", "},}"), CORRUPT),
    "duplicate tensor": (lambda: text(NAME.replace("_A", "_B"), NAME), CORRUPT),
    "duplicate tensor, escaped": (
        lambda: text(NAME.replace("_A", "_B"), NAME.replace("base", "\\u0062ase")),
        CORRUPT,
    ),
    "duplicate field": (lambda: text('"dtype"', '"dtype": "F16", "dtype"'), CORRUPT),
    "duplicate metadata": (
        lambda: text("{", '{"__metadata__": {}, "__metadata__": {}, '),
        CORRUPT,
    ),
    "metadata of numbers": (lambda: text("{", '{"__metadata__": {"a": 1}, '), CORRUPT),
    "metadata is a list": (lambda: text("{", '{"__metadata__": [], '), CORRUPT),
    "unknown field": (lambda: changed(strides=[1]), CORRUPT),
    "no dtype": (lambda: changed(dtype=None), CORRUPT),
    "no shape": (lambda: changed(shape=None), CORRUPT),
    "no offsets": (lambda: changed(data_offsets=None), CORRUPT),
    "dtype is a number": (lambda: changed(dtype=32), CORRUPT),
    "unknown dtype": (lambda: changed(dtype="F4"), DTYPE),
    "dtype in lower case": (lambda: changed(dtype="f32"), DTYPE),
    "integers": (lambda: changed(dtype="I32"), DTYPE),
    "booleans": (lambda: changed(dtype="BOOL", shape=[8, 8]), DTYPE),
    "eight-bit floats": (lambda: changed(dtype="F8_E4M3", shape=[8, 8]), DTYPE),
    "negative shape": (lambda: changed(shape=[-2, -8]), CORRUPT),
    "shape of floats": (lambda: changed(shape=[2.0, 8.0]), CORRUPT),
    "shape in exponents": (lambda: text("[2, 8]", "[2e0, 8]"), CORRUPT),
    "shape of strings": (lambda: changed(shape=["2", "8"]), CORRUPT),
    "shape with NaN": (lambda: text("[2, 8]", "[NaN, 8]"), CORRUPT),
    "shape with true": (lambda: changed(shape=[True, 16]), CORRUPT),
    "shape with leading zeros": (lambda: text("[2, 8]", "[02, 8]"), CORRUPT),
    "shape product wraps to 16": (lambda: changed(shape=[2**32, 2**32, 16]), CORRUPT),
    "huge whole number": (lambda: text("[2, 8]", f"[{'9' * 5000}, 8]"), CORRUPT),
    "shape of a million": (lambda: text("[2, 8]", f"[{'1, ' * 10**6}8]"), CORRUPT),
    "scalar": (lambda: changed(shape=[]), CORRUPT),
    "zero dimension": (lambda: changed(shape=[0, 8]), CORRUPT),
    "negative offset": (lambda: changed(data_offsets=[-64, 0]), CORRUPT),
    "begin after end": (lambda: changed(data_offsets=[64, 0]), CORRUPT),
    "three offsets": (lambda: changed(data_offsets=[0, 32, 64]), CORRUPT),
    "one offset": (lambda: changed(data_offsets=[64]), CORRUPT),
    "offset past the end": (lambda: changed(data_offsets=[1 << 40, (1 << 40) + 64]), CORRUPT),
    "overlap": (lambda: changed(data_offsets=[64, 128]), CORRUPT),
    "partial overlap": (lambda: changed(data_offsets=[32, 96]), CORRUPT),
    "hole at the start": (
        lambda: file(json.dumps(GOOD).replace("[0, 64]", "[4, 68]").encode()),
        CORRUPT,
    ),
    "size is not shape x dtype": (lambda: changed(shape=[2, 9]), CORRUPT),
    "data too short": (lambda: file(json.dumps(GOOD).encode(), DATA[:-1]), CORRUPT),
    "data too long": (lambda: file(json.dumps(GOOD).encode(), DATA + b"x"), CORRUPT),
    "no data": (lambda: file(json.dumps(GOOD).encode(), b""), CORRUPT),
    "no tensors": (lambda: file(b"{}", b""), "adapter.no_module_matched"),
    "only metadata": (
        lambda: file(b'{"__metadata__":{"format":"pt"}}', b""),
        "adapter.no_module_matched",
    ),
    "deep lists": (lambda: file(b"[" * 100_000), CORRUPT),
    "deep objects": (lambda: file(b'{"a":' * 100_000), CORRUPT),
    "deep shape": (lambda: text("[2, 8]", "[" * 50_000), CORRUPT),
    "endless string": (lambda: file(b'{"' + b"a" * 5_000_000), CORRUPT),
    "endless backslashes": (lambda: file(b'{"' + b"\\" * 2_000_001 + b'"'), CORRUPT),
    "name of 5 MB": (lambda: text(NAME, "a" * 5_000_000), CORRUPT),
    "header of spaces": (lambda: file(b" " * (MAX_HEADER_BYTES - 8)), CORRUPT),
    "header too long": (lambda: file(b" " * (MAX_HEADER_BYTES + 1)), LARGE),
    "a million metadata keys": (
        lambda: file(
            b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(10**6)) + b"}}", b""
        ),
        CORRUPT,
    ),
    "a million tensors": (lambda: many_tensors(1_000_000), LARGE),
    "half a million tensors": (lambda: many_tensors(500_000), LARGE),
    "tensors up to the limit": (lambda: many_tensors(MAX_TENSORS), EMPTY),
}


def adapter(directory: Path, weights: bytes, config: bytes | None = None) -> Path:
    (directory / CONFIG_FILE).write_bytes(json.dumps(CONFIG).encode() if config is None else config)
    (directory / WEIGHTS_FILE).write_bytes(weights)
    return directory


def test_the_file_they_are_made_from_is_good(tmp_path: Path) -> None:
    found = read_adapter(adapter(tmp_path, file(json.dumps(GOOD).encode())), None)
    assert [module.rank for module in found.modules] == [2]
    padded = file(json.dumps(GOOD).encode() + b"  ")
    assert read_adapter(adapter(tmp_path, padded), None).modules[0].a.start == len(padded) - 128


@pytest.mark.parametrize("kind", HEADERS)
def test_hostile_header(tmp_path: Path, kind: str) -> None:
    make, code = HEADERS[kind]
    directory = adapter(tmp_path, make())
    started = perf_counter()
    with pytest.raises(LoradError) as caught:
        read_adapter(directory, None)
    assert caught.value.code == code
    assert caught.value.hint
    assert len(caught.value.message) < 2000
    json.dumps(caught.value.to_dict()).encode()
    assert perf_counter() - started < 10


def test_a_header_that_was_seen_before_is_not_trusted_in_another_file(tmp_path: Path) -> None:
    """Headers are remembered, for adapters of one form; the size of the file is part of that."""
    good = file(json.dumps(GOOD).encode())
    first = read_adapter(adapter(tmp_path, good), None)
    assert read_adapter(adapter(tmp_path, good), None).modules[0].a is first.modules[0].a
    with pytest.raises(LoradError) as caught:
        read_adapter(adapter(tmp_path, good[:-1]), None)
    assert caught.value.code == CORRUPT


PEAK = """
import resource, sys
from pathlib import Path
from lorad.adapters.peft_format import read_adapter
from lorad.errors import LoradError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
try:
    read_adapter(Path(sys.argv[1]), None)
except LoradError:
    print(before, peak())
"""


@pytest.mark.parametrize(
    "kind", ["half a million tensors", "a million metadata keys", "name of 5 MB", "deep objects"]
)
def test_memory_stays_flat(tmp_path: Path, kind: str) -> None:
    directory = adapter(tmp_path, HEADERS[kind][0]())
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(directory)], capture_output=True, text=True, check=True
    )
    before, after = map(int, run.stdout.split())
    header_kib = (directory / WEIGHTS_FILE).stat().st_size >> 10
    assert after - before < 2 * header_kib + (100 << 10)


def test_a_sparse_terabyte_is_not_read(tmp_path: Path) -> None:
    directory = adapter(tmp_path, file(json.dumps(GOOD).encode()))
    with (directory / WEIGHTS_FILE).open("r+b") as sparse:
        sparse.truncate(1 << 40)
    started = perf_counter()
    with pytest.raises(LoradError) as caught:
        read_adapter(directory, None)
    assert caught.value.code == CORRUPT
    assert perf_counter() - started < 5


CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "adapter.config_invalid"),
    "not JSON": (b"r: 8", "adapter.config_invalid"),
    "a list": (b"[]", "adapter.config_invalid"),
    "null": (b"null", "adapter.config_invalid"),
    "not UTF-8": (b'{"r": "\xff"}', "adapter.config_invalid"),
    "UTF-16": ('{"peft_type": "LORA"}'.encode("utf-16"), "adapter.config_invalid"),
    "lone surrogate": (b'{"peft_type": "\\ud800"}', "adapter.config_invalid"),
    "NaN": (b'{"peft_type": "LORA", "lora_alpha": NaN}', "adapter.config_invalid"),
    "Infinity": (b'{"peft_type": "LORA", "lora_alpha": -Infinity}', "adapter.config_invalid"),
    "1e999": (b'{"peft_type": "LORA", "lora_alpha": 1e999}', "adapter.config_invalid"),
    "a number of 10,000 digits": (
        b'{"peft_type": "LORA", "r": ' + b"9" * 10_000 + b"}",
        "adapter.config_invalid",
    ),
    "duplicate key": (b'{"r": 8, "peft_type": "LORA", "r": 16}', "adapter.config_invalid"),
    "duplicate pattern": (
        b'{"peft_type": "LORA", "rank_pattern": {"a": 1, "a": 2}}',
        "adapter.config_invalid",
    ),
    "a hundred thousand duplicates": (
        b"{" + b'"a":1,' * 100_000 + b'"a":1}',
        "adapter.config_invalid",
    ),
    "deep": (b'{"a":' * 100_000, "adapter.config_invalid"),
    "deep lists": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "adapter.config_invalid"),
    "two megabytes": (b'{"a": "' + b"x" * (2 << 20) + b'"}', LARGE),
    "no peft_type": (b"{}", "adapter.config_invalid"),
    "five thousand patterns": (
        json.dumps({**CONFIG, "rank_pattern": {f"layers.{i}": 2 for i in range(5000)}}).encode(),
        "adapter.pattern_unsupported",
    ),
    "a hundred regexes": (
        json.dumps({**CONFIG, "rank_pattern": {f"(a+)+{i}$": 2 for i in range(100)}}).encode(),
        "adapter.pattern_unsupported",
    ),
    "sixty regex bombs": (
        json.dumps(
            {**CONFIG, "rank_pattern": {f"(.?.?.?.?){{20}}z{i}": 3 for i in range(60)}}
        ).encode(),
        "",
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_hostile_config(tmp_path: Path, kind: str) -> None:
    config, code = CONFIGS[kind]
    directory = adapter(tmp_path, file(json.dumps(GOOD).encode()), config)
    started = perf_counter()
    if code:
        with pytest.raises(LoradError) as caught:
            read_adapter(directory, None)
        assert caught.value.code == code
        assert len(caught.value.message) < 2000
    else:
        assert len(read_adapter(directory, None).modules) == 1
    assert perf_counter() - started < 5


# --- fuzz ---------------------------------------------------------------------------------

BYTES = file(json.dumps(GOOD).encode())
TOKENS = st.sampled_from([*'"{}[],:0\\ ', "-1", "1e9", "F32", "\\u0000", "null", "\xff"])


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(BYTES)), st.integers(0, 20), TOKENS), min_size=1, max_size=6
    ),
    keep_length=st.booleans(),
)
def test_damaged_headers_never_do_worse_than_an_error(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[int, int, str]],
    keep_length: bool,
) -> None:
    raw = bytearray(BYTES)
    for at, removed, inserted in edits:
        raw[at : at + removed] = inserted.encode("latin-1")
    if not keep_length:
        raw[:8] = max(0, len(raw) - 8 - 128).to_bytes(8, "little")
    directory = adapter(tmp_path_factory.mktemp("fuzz"), bytes(raw))
    try:
        found = read_adapter(directory, None)
    except LoradError as error:
        assert error.code.startswith("adapter.")
        json.dumps(error.to_dict()).encode()
    else:
        # Whatever was accepted can be read: the factors lie inside the file.
        assert all(entry.end <= found.file_bytes for m in found.modules for entry in (m.a, m.b))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "bias",
        "peft_type",
        "other",
        "init_lora_weights",
        "target_modules",
        "base_model_name_or_path",
        "modules_to_save",
    ]
)


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(KEYS, JSON_VALUES, max_size=4))
def test_odd_configs_never_do_worse_than_an_error(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    config = json.dumps({**CONFIG, **changes}).encode()
    directory = adapter(tmp_path_factory.mktemp("fuzz"), file(json.dumps(GOOD).encode()), config)
    try:
        found = read_adapter(directory, None)
    except LoradError as error:
        assert error.code.startswith("adapter.")
        json.dumps(error.to_dict()).encode()
    else:
        assert found.modules[0].rank == 2
