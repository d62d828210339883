"""`loractl show`: one adapter with its versions, or everything about one version."""

from __future__ import annotations

import typer

from loractl.options import JsonOption, RefArgument, SocketOption, TimeoutOption
from loractl.output import (
    human_bytes,
    local_time,
    note,
    print_columns,
    print_fields,
    print_json,
    reported,
)
from lorad import wire
from lorad.adapter_ref import split_version
from lorad.admin_client import AdminClient

_COUNTS_HEADER = ("VERSION", "REQUESTS", "ERRORS", "NAN", "TOKENS", "MEAN TTFT")
_HEADER = ("VERSION", "LIVE", "RANK", "TARGETS", "SIZE", "TIER", "PINNED", "PUSHED", "MESSAGE")


def show(
    ref: RefArgument,
    socket: SocketOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Show an adapter and its versions, or with @VERSION all that is known of that one."""
    with reported(json):
        name, label = split_version(ref)
        client = AdminClient(socket, timeout)
        if label is None:
            adapter = client.adapter(str(name))
        else:
            version = client.version(str(name), label)
    if label is None:
        print_json("lorad/adapter/v1", adapter) if json else _print_adapter(adapter)
    elif json:
        print_json("lorad/version/v1", {"name": str(name), **version})
    else:
        _print_version(str(name), version)


def _print_adapter(adapter: wire.AdapterInfo) -> None:
    print_fields(
        {
            "name": adapter["name"],
            "live": adapter["live"] or "none",
            "live since": local_time(adapter["live_since"]),
            "generation": adapter["generation"],
            **_canary_field(adapter["canary"]),
        }
    )
    if adapter["canary"]:
        typer.echo("")
        rows = (_counts_row(label, c) for label, c in adapter["canary"]["counts"].items())
        print_columns(_COUNTS_HEADER, rows)
    typer.echo("")
    canary = adapter["canary"]["version"] if adapter["canary"] else None
    print_columns(_HEADER, (_row(version, canary) for version in adapter["versions"]))
    for version in adapter["versions"]:
        if version["failure"]:
            note(f"{version['version']} failed: {version['failure']}")


def _canary_field(canary: wire.CanaryInfo | None) -> dict[str, object]:
    if canary is None:
        return {}
    guard = ", ends by itself when it fails" if canary["auto_rollback"] else ""
    since = local_time(canary["since"])
    return {"canary": f"{canary['version']}, {canary['percent']:g} % since {since}{guard}"}


def _counts_row(label: str, counts: wire.CountsInfo) -> tuple[object, ...]:
    first = counts["first_tokens"]
    ttft = f"{counts['ttft_seconds'] / first * 1000:.0f} ms" if first else "-"
    tokens = counts["generated_tokens"]
    return label, counts["requests"], counts["errors"], counts["nonfinite"], tokens, ttft


def _row(version: wire.VersionInfo, canary: str | None) -> tuple[object, ...]:
    return (
        version["version"],
        "live" if version["live"] else "canary" if version["version"] == canary else "",
        version["rank"],
        ",".join(version["targets"]),
        human_bytes(version["bytes"]),
        "FAILED" if version["state"] == "failed" else version["residency"]["tier"],
        "pinned" if version["pinned"] else "",
        local_time(version["created_at"]),
        version["message"],
    )


def _print_version(name: str, version: wire.VersionInfo) -> None:
    memory, by = version["residency"], version["created_by"]
    print_fields(
        {
            "name": name,
            "version": version["version"],
            "digest": version["digest"],
            "state": f"{version['state']} {version['failure']}".strip(),
            "live": "yes" if version["live"] else "no",
            "pinned": "yes" if version["pinned"] else "no",
            "rank": version["rank"],
            "targets": ", ".join(version["targets"]),
            "modules": version["modules"],
            "files": human_bytes(version["bytes"]),
            "tier": memory["tier"],
            "device": human_bytes(memory["device_bytes"]),
            "host": human_bytes(memory["host_bytes"]),
            "running": memory["running_requests"],
            "waiting": memory["waiting_requests"],
            "trained on": version["trained_on"] or "-",
            "pushed": f"{local_time(version['created_at'])} by uid {by['uid']}, pid {by['pid']}",
            "message": version["message"] or "-",
        }
    )
    for warning in version["warnings"]:
        note(f"warning: {warning['message']} [{warning['code']}]")
