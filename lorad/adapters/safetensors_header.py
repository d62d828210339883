"""The header of a safetensors file, read without trusting one byte of it.

A file is an 8-byte little-endian length, a JSON object of that length, and the data. The
object has one shape only: `{"name": {"dtype": .., "shape": [..], "data_offsets": [..]}}` and
an optional `__metadata__` of strings. So it is scanned with a fixed grammar instead of a general
JSON reader: no nesting to bound, no values that are thrown away, duplicate keys seen, and the
memory used stays proportional to the tensors accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lorad.errors import LoradError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 1024
MAX_METADATA = 10_000
_REMEMBERED_BYTES = 256 << 10  # a larger header is parsed each time

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `start` and `end` are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def corrupt(message: str, **details: object) -> LoradError:
    """`adapter.weights_corrupt`, with the hint that helps for every one of its causes."""
    return LoradError(
        "adapter.weights_corrupt",
        message,
        hint="copy or download the file again, and compare its size and checksum with the source",
        details=details,
    )


def header_length(first: bytes, file_bytes: int) -> int:
    """Bytes of the JSON after the 8-byte length `first`; raises `adapter.weights_corrupt`."""
    if len(first) < LENGTH_BYTES:
        raise corrupt(f"the weights file has {file_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length < 2 or length > file_bytes - LENGTH_BYTES:
        raise corrupt(
            f"the header is said to be {length} bytes long, in a file of {file_bytes} bytes",
            header_bytes=length,
            file_bytes=file_bytes,
        )
    if length > MAX_HEADER_BYTES:
        raise LoradError(
            "adapter.too_large",
            f"the header is {length} bytes long; at most {MAX_HEADER_BYTES} are read",
            hint="an adapter of a decoder has some hundred tensors: is this one?",
            details={"header_bytes": length, "limit": MAX_HEADER_BYTES},
        )
    return length


def parse_header(header: bytes, file_bytes: int) -> tuple[TensorEntry, ...]:
    """All tensors, in the order of their data, which fills the file without gap or overlap.

    `header` is the JSON alone. Raises `adapter.weights_corrupt`, `adapter.dtype_unsupported` or
    `adapter.too_large`.

    Adapters of one form have the same header to the byte, so the last few are remembered.
    """
    parse = _remembered if len(header) <= _REMEMBERED_BYTES else _parse
    return parse(header, file_bytes)


def _parse(header: bytes, file_bytes: int) -> tuple[TensorEntry, ...]:
    entries = _Scanner(header, data_start=LENGTH_BYTES + len(header)).entries()
    ordered = sorted(entries, key=lambda entry: (entry.start, entry.end))
    _check_tiling(ordered, LENGTH_BYTES + len(header), file_bytes)
    return tuple(ordered)


_remembered = lru_cache(maxsize=16)(_parse)


def _check_tiling(entries: list[TensorEntry], start: int, file_bytes: int) -> None:
    position = start
    for entry in entries:
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a hole"
            raise corrupt(
                f"tensor {entry.name!r} begins at byte {entry.start} and {what} "
                f"(expected byte {position})",
                tensor=entry.name,
            )
        position = entry.end
    if position != file_bytes:
        raise corrupt(
            f"the header describes {position} bytes, but the file has {file_bytes}",
            expected_bytes=position,
            file_bytes=file_bytes,
        )


_SPACE = rb"[ \t\n\r]*"
_STRING = rb'"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+)"'
_COUNT = rb"(?:0|[1-9][0-9]{0,17})"  # below 2**63, and far below Python's digit limit
_OPEN = re.compile(_SPACE + rb"\{" + _SPACE)
_KEY = re.compile(_STRING + _SPACE + rb":" + _SPACE)
_TEXT = re.compile(_STRING + _SPACE)
_COUNTS = re.compile(rb"\[" + _SPACE + rb"([0-9 \t\n\r,]*+)\]" + _SPACE)
_COUNT_LIST = re.compile(
    rb"(?:" + _COUNT + _SPACE + rb"(?:," + _SPACE + _COUNT + _SPACE + rb")*+)?"
)
_NEXT = re.compile(rb"," + _SPACE)
_CLOSE = re.compile(rb"\}" + _SPACE)


class _Scanner:
    """One pass over the header bytes; every method moves `at` forward or raises."""

    def __init__(self, text: bytes, data_start: int) -> None:
        self.text = text
        self.at = 0
        self.data_start = data_start

    def entries(self) -> list[TensorEntry]:
        found: dict[str, TensorEntry] = {}
        seen_metadata = False
        for name in self._keys():
            if name in found or (name == "__metadata__" and seen_metadata):
                raise corrupt(f"the header names {name!r} twice", tensor=name)
            if name == "__metadata__":
                seen_metadata = True
                self._skip_metadata()
                continue
            if len(found) == MAX_TENSORS:
                raise LoradError(
                    "adapter.too_large",
                    f"the file has more than {MAX_TENSORS} tensors",
                    hint="an adapter of a decoder has some hundred tensors: is this one?",
                    details={"limit": MAX_TENSORS},
                )
            found[name] = self._entry(name)
        if self.at != len(self.text):
            raise self._unexpected("more text after the header's last brace")
        return list(found.values())

    def _keys(self) -> Iterator[str]:
        """Walk one JSON object: yields each key with `at` on its value."""
        self._match(_OPEN, "an object")
        if self._try(_CLOSE):
            return
        while True:
            yield self._decode(self._match(_KEY, "a quoted name and a colon"))
            if self._try(_CLOSE):
                return
            self._match(_NEXT, "a comma or a closing brace")

    def _skip_metadata(self) -> None:
        seen: set[str] = set()
        for key in self._keys():
            if key in seen or len(seen) == MAX_METADATA:
                raise self._unexpected("a metadata key that is there twice, or too many keys")
            seen.add(key)
            self._match(_TEXT, "a string")

    def _entry(self, name: str) -> TensorEntry:
        fields: dict[str, str | tuple[int, ...]] = {}
        for key in self._keys():
            if key in fields:
                raise corrupt(f"tensor {name!r} has {key!r} twice", tensor=name)
            if key == "dtype":
                fields[key] = self._decode(self._match(_TEXT, "a dtype in quotes"))
            elif key in ("shape", "data_offsets"):
                fields[key] = self._counts(name, key)
            else:
                raise corrupt(f"tensor {name!r} has the unknown field {key!r}", tensor=name)
        return self._checked(name, fields)

    def _counts(self, name: str, key: str) -> tuple[int, ...]:
        listed = self._match(_COUNTS, f"{key} as a list of whole numbers")
        if not _COUNT_LIST.fullmatch(listed):
            raise corrupt(f"tensor {name!r}: {key} is not a list of whole numbers", tensor=name)
        parts = listed.split(b",", MAX_DIMENSIONS) if listed.strip() else []
        if len(parts) > MAX_DIMENSIONS:
            raise corrupt(f"tensor {name!r}: {key} has too many numbers", tensor=name)
        return tuple(int(part) for part in parts)

    def _checked(self, name: str, fields: dict[str, str | tuple[int, ...]]) -> TensorEntry:
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and isinstance(shape, tuple) and isinstance(offsets, tuple)):
            raise corrupt(f"tensor {name!r} lacks dtype, shape or data_offsets", tensor=name)
        if dtype not in DTYPE_BITS:
            raise LoradError(
                "adapter.dtype_unsupported",
                f"tensor {name!r} has the unknown dtype {dtype!r}",
                hint="save the adapter in float32, bfloat16 or float16",
                details={"tensor": name, "dtype": dtype},
            )
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise corrupt(f"tensor {name!r} has the byte range {list(offsets)}", tensor=name)
        needed = prod(shape) * DTYPE_BITS[dtype] // 8
        if needed != offsets[1] - offsets[0]:
            raise corrupt(
                f"tensor {name!r} is {dtype} {list(shape)}, which takes {needed} bytes, "
                f"but has {offsets[1] - offsets[0]}",
                tensor=name,
            )
        start = self.data_start + offsets[0]
        return TensorEntry(name, dtype, shape, start, start + needed)

    def _match(self, pattern: re.Pattern[bytes], wanted: str) -> bytes:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self._unexpected(f"expected {wanted}")
        self.at = match.end()
        return match.group(1) if pattern.groups else b""

    def _try(self, pattern: re.Pattern[bytes]) -> bool:
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match is not None

    def _decode(self, quoted: bytes) -> str:
        if len(quoted) > MAX_NAME_BYTES:
            raise self._unexpected(f"a name of {len(quoted)} bytes")
        try:
            text = quoted.decode("utf-8")
            if "\\" in text:
                text = json.loads(f'"{text}"')
                text.encode("utf-8")  # a lone surrogate, which no file may hold
        except UnicodeError:
            raise self._unexpected("a name that is not valid Unicode") from None
        return text

    def _unexpected(self, what: str) -> LoradError:
        return corrupt(
            f"the header is not a safetensors header: {what} at byte {self.at + LENGTH_BYTES}",
            byte=self.at + LENGTH_BYTES,
        )
