"""`loractl status`: the daemon, its adapters and its engine on one screen."""

from __future__ import annotations

import time

from loractl.memory_text import memory_fields, page_owners
from loractl.options import (
    IntervalOption,
    JsonOption,
    SocketOption,
    TimeoutOption,
    WatchOption,
)
from loractl.output import human_bytes, print_fields, print_json, reported, watched
from lorad import wire
from lorad.admin_client import AdminClient


def status(
    watch: WatchOption = False,
    interval: IntervalOption = 2.0,
    socket: SocketOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Show what the daemon is doing: requests, pages, adapters by tier."""
    client = AdminClient(socket, timeout)

    def show() -> None:
        found = client.status()
        if json:
            print_json("lorad/status/v1", found, line=watch)
        else:
            _print(found)

    with reported(json):
        watched(show, interval=interval, on=watch)


def _print(found: wire.StatusInfo) -> None:
    engine, page = found["engine"], found["engine"]["page_bytes"]
    tiers = ", ".join(f"{count} {tier}" for tier, count in sorted(found["tiers"].items()))
    used = ", ".join(
        f"{what} {n} ({human_bytes(n * page)})" for what, n in page_owners(engine).items()
    )
    print_fields(
        {
            "daemon": f"lorad {found['daemon_version']}, pid {found['pid']}, uid {found['uid']}",
            "up": _duration(time.time() - found["started_at"]),
            "base model": found["base_model"],
            **({"draining": "yes: new requests are refused"} if found["draining"] else {}),
            "adapters": f"{found['adapters']} ({found['live_adapters']} live, "
            f"{found['canaries']} with a canary)",
            "failed": f"{found['failed_versions']} versions",
            "in memory": tiers or "none",
            "requests": f"{engine['running']} running, {engine['waiting']} waiting",
            "tokens": f"{engine['prompt_tokens']} prompt, {engine['generated_tokens']} generated",
            "steps": engine["steps"],
            "pages": f"{engine['total_pages']} of {human_bytes(page)}: {used}",
            **memory_fields(engine),
        }
    )


def _duration(seconds: float) -> str:
    minutes, left = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (left, "s")]
    shown = [f"{count}{unit}" for count, unit in parts if count]
    return " ".join(shown[:2]) or "0s"
