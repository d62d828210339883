"""Which callers a canary takes: a hash, so that a caller always meets the same version."""

from __future__ import annotations

import hashlib

from lorad.registry.records import Canary

_BUCKETS = 2**64


def takes(canary: Canary, digest: str, sticky: str) -> bool:
    """Whether the caller named by `sticky` is among the canary's percent.

    The same caller always gets the same answer for the same content, and one who is in stays
    in when the share grows. Another version draws other callers.
    """
    drawn = hashlib.blake2b(f"{digest}\0{sticky}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(drawn.digest()) < canary.percent / 100 * _BUCKETS
