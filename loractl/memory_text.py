"""What the memory has done, in words: for `status` and `top`."""

from __future__ import annotations

from collections.abc import Mapping

from loractl.output import human_bytes
from lorad import wire


def page_owners(engine: wire.EngineInfo) -> dict[str, int]:
    """The pages by who has them, in the order of the screen."""
    return {
        "KV": engine["kv_pages"],
        "cached KV": engine["cached_pages"],
        "adapters": engine["adapter_pages"],
        "free": engine["free_pages"],
    }


def memory_fields(engine: wire.EngineInfo) -> dict[str, str]:
    """One line for each matter; counts are since the daemon's start."""
    memory = engine["memory"]
    return {
        "host cache": f"{human_bytes(engine['host_cache_bytes'])}, "
        f"{memory['host_evictions']} left it",
        "tier hits": tier_hits(memory["lookups"]),
        "loads": _loads(memory),
        "evicted": _counts(memory["evictions"]),
        "moved": _moved(memory),
        "prefixes": _prefixes(memory),
        "preempted": f"{memory['preemptions']} requests",
    }


def tier_hits(lookups: Mapping[str, int]) -> str:
    """On which tier requests found their adapters."""
    whole = sum(lookups.values())
    shares = [f"{n / whole:.0%} {tier}" for tier, n in sorted(lookups.items())] if whole else []
    return ", ".join(shares) or "no request for one yet"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()) if n) or "none"


def _loads(memory: wire.MemoryInfo) -> str:
    done = memory.get("loads_done", 0)  # an older daemon does not tell
    each = f"; {_seconds(memory['load_seconds'] / done)} each" if done else ""
    cancelled = memory["cancelled_loads"]
    return _counts(memory["loads"]) + each + (f"; {cancelled} cancelled" if cancelled else "")


def _moved(memory: wire.MemoryInfo) -> str:
    pages, adapters = memory["moved_pages"], memory["moved_adapters"]
    if not pages and not adapters:
        return "nothing"
    return f"{pages} pages, {adapters} adapters in {_seconds(memory['move_seconds'])}"


def _prefixes(memory: wire.MemoryInfo) -> str:
    found, whole = memory["prefix_hit_tokens"], memory["prefix_lookup_tokens"]
    if not whole:
        return "no prompt yet"
    return f"{found} of {whole} prompt tokens found ({found / whole:.0%})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
