"""What one token adds to the text, as bytes, read from a tokenizer's decoder settings.

The `tokenizers` library decodes whole sequences only. Streaming needs the step from n to n+1
tokens, and log-probabilities need the bytes of a single token, so the decoder is taken apart
here once, into functions from a token to its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorad.errors import LoradError

ToText = Callable[[str], str]
ToBytes = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoding:
    """How tokens become text: the bytes of all tokens joined, then the start stripped."""

    token_bytes: ToBytes
    first_token_bytes: ToBytes  # of the token that starts the sequence
    strip_char: str = ""
    strip_count: int = 0  # how many leading `strip_char` the whole text loses at most


def _printable_byte_alphabet() -> dict[str, int]:
    """The inverse of byte-level BPE's alphabet: one printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _printable_byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token outside the alphabet (an added token with a space, say) stands for itself."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


def _replace(old: str, new: str) -> ToText:
    return lambda token: token.replace(old, new)


def _chain(stages: list[ToText], last: ToBytes) -> ToBytes:
    def run(token: str) -> bytes:
        for stage in stages:
            token = stage(token)
        return last(token)

    return run


def _unsupported(what: str) -> LoradError:
    return LoradError(
        "model.unsupported",
        f"the tokenizer decodes with {what}, which cannot be streamed",
        hint="byte-level BPE and SentencePiece-style tokenizers are supported",
    )


def _words(token: str) -> bytes:
    return b" " + token.encode()


def token_decoding(decoder: dict[str, Any] | None) -> TokenDecoding:
    """Read the `decoder` object of a tokenizer.json; raises `model.unsupported` naming a part.

    Without a decoder the library joins tokens with spaces.
    """
    if decoder is None:
        return TokenDecoding(_words, str.encode)
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[ToText] = []
    first_stages: list[ToText] = []
    to_bytes: ToBytes = str.encode
    strip_char, strip_count, fused = "", 0, False
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                stages.append(_replace(old, new))
                first_stages.append(_replace(old, new))
            case {"type": "Metaspace", "replacement": mark} if not fused:
                # Only the sequence's first token loses its marks; "never" keeps them there too.
                at_start = " " if part.get("prepend_scheme", "always") == "never" else ""
                stages.append(_replace(mark, " "))
                first_stages.append(_replace(mark, at_start))
            case {"type": "ByteFallback"} if not fused:
                to_bytes = _byte_fallback
            case {"type": "ByteLevel"} if not fused:
                to_bytes = _byte_level
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": char, "start": start, "stop": 0} if fused:
                strip_char, strip_count = char, start
            case _:
                raise _unsupported(str(part.get("type")))
    return TokenDecoding(
        _chain(stages, to_bytes), _chain(first_stages, to_bytes), strip_char, strip_count
    )
