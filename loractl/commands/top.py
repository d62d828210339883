"""`loractl top`: what the daemon does right now, on one live screen."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from loractl.memory_text import memory_fields, page_owners
from loractl.options import IntervalOption, JsonOption, SocketOption, TimeoutOption
from loractl.output import cell, console, human_bytes, print_json, reported
from lorad import wire
from lorad.admin_client import AdminClient

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_STEPS = 500
_ROWS = 30  # versions on the screen


@dataclass(frozen=True, slots=True)
class Look:
    """Everything that one screen shows, taken at one time."""

    at: float
    status: wire.StatusInfo
    adapters: wire.AdapterList
    steps: wire.StepList


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the screen once and end.")] = False,
    interval: IntervalOption = 1.0,
    socket: SocketOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Watch the daemon work: pages, tiers, loads and evictions, queue, tokens a second and TTFT."""
    client = AdminClient(socket, timeout)
    with reported(json):
        if json:
            print_json("lorad/top/v1", _summary(look(client)))
        elif once:
            console().print(screen(look(client), None))
        else:
            _live(client, interval)


def look(client: AdminClient) -> Look:
    status, steps = client.status(), client.steps(_STEPS)
    return Look(time.time(), status, client.adapters(in_memory=True), steps)


def _live(client: AdminClient, interval: float) -> None:
    from rich.live import Live

    before = look(client)
    with Live(screen(before, None), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = look(client)
            live.update(screen(now, before), refresh=True)
            before = now


def tokens_per_second(now: Look, before: Look | None) -> float:
    """Generated since the last look, or without one over the daemon's kept steps."""
    if before is not None and now.at > before.at:
        made = (
            now.status["engine"]["generated_tokens"] - before.status["engine"]["generated_tokens"]
        )
        return max(made, 0) / (now.at - before.at)
    return sum(_rates(now).values())


def _rates(now: Look) -> dict[str, float]:
    """Rows a second of each version, prompt tokens too, over the steps that were kept."""
    steps = now.steps["steps"]
    rows: Counter[str] = Counter()
    for step in steps:
        rows.update(step["rows"])
    # Until now, so that the rates of a daemon that has fallen idle go down.
    seconds = now.at - steps[0]["started_at"] if steps else 0.0
    return {label: count / seconds for label, count in rows.items()} if seconds > 0 else {}


def _summary(now: Look) -> dict[str, object]:
    return {
        "status": now.status,
        "tokens_per_second": round(tokens_per_second(now, None), 3),
        "rows_per_second": {k: round(v, 3) for k, v in sorted(_rates(now).items())},
    }


def screen(now: Look, before: Look | None) -> Group:
    """The whole screen as something Rich prints."""
    from rich.console import Group

    parts = (_headline(now, before), _pages(now), _memory(now), _versions(now))
    return Group(*(line for part in parts for line in (part, cell(""))))


def _headline(now: Look, before: Look | None) -> Text:
    status, engine = now.status, now.status["engine"]
    ttft = status["ttft"]
    times = (
        f"TTFT p50 {ttft['p50'] * 1000:.0f} ms, p99 {ttft['p99'] * 1000:.0f} ms"
        if ttft["p50"] is not None and ttft["p99"] is not None
        else "TTFT -"
    )
    draining = "  DRAINING" if status["draining"] else ""
    return cell(
        f"{status['base_model']}  {engine['running']} running, {engine['waiting']} waiting  "
        f"{tokens_per_second(now, before):.0f} tokens/s  {times}{draining}",
        style="bold",
    )


def _pages(now: Look) -> Table:
    from rich.table import Table

    engine = now.status["engine"]
    table = Table.grid(padding=(0, 2))
    total = max(engine["total_pages"], 1)
    for what, pages in page_owners(engine).items():
        bar = "#" * round(40 * pages / total)
        size = human_bytes(pages * engine["page_bytes"])
        table.add_row(cell(what), cell(f"{bar:<40}"), cell(f"{pages} pages, {size}"))
    tiers = ", ".join(f"{count} {tier}" for tier, count in sorted(now.status["tiers"].items()))
    table.add_row(cell("tiers"), cell(tiers or "none in memory"))
    return table


def _memory(now: Look) -> Table:
    """What it has done since the start."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for what, text in memory_fields(now.status["engine"]).items():
        table.add_row(cell(what), cell(text))
    return table


def _versions(now: Look) -> Table:
    from rich.table import Table

    rates, ttft = _rates(now), now.status["ttft"]["p50_by_version"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("VERSION", "ROLE", "TIER", "RUNNING", "WAITING", "ROWS/S", "TTFT"):
        table.add_column(title, justify="left" if title in ("VERSION", "ROLE", "TIER") else "right")
    for label, role, residency in _busiest(now, rates):
        first = f"{ttft[label] * 1000:.0f} ms" if label in ttft else "-"
        table.add_row(
            cell(label),
            cell(role),
            cell(residency["tier"]),
            cell(residency["running_requests"]),
            cell(residency["waiting_requests"]),
            cell(f"{rates.get(label, 0.0):.1f}"),
            cell(first),
        )
    if "base" in rates:
        first = f"{ttft['base'] * 1000:.0f} ms" if "base" in ttft else "-"
        table.add_row(*map(cell, ("base", "", "", "", "", f"{rates['base']:.1f}", first)))
    return table


def _busiest(now: Look, rates: dict[str, float]) -> list[tuple[str, str, wire.ResidencyInfo]]:
    """Versions in memory or in use, by how much they ran lately."""
    found = []
    for adapter in now.adapters["adapters"]:
        canary = adapter["canary"]["version"] if adapter["canary"] else None
        for version in adapter["versions"]:
            label = f"{_qualified(adapter['name'])}@{version['version']}"
            role = "live" if version["live"] else "canary" if version["version"] == canary else ""
            if version["residency"]["tier"] != "disk" or label in rates:
                found.append((label, role, version["residency"]))
    return sorted(found, key=lambda row: (-rates.get(row[0], 0.0), row[0]))[:_ROWS]


def _qualified(name: str) -> str:
    return name if "/" in name else f"default/{name}"
