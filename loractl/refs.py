"""From what a person types to one version."""

from __future__ import annotations

from lorad.adapter_ref import split_version
from lorad.admin_client import AdminClient


def one_version(client: AdminClient, text: str) -> tuple[str, str]:
    """`name@v3` as it is; a bare name means its live version, or the newest if none is live."""
    name, label = split_version(text)
    if label is None:
        adapter = client.adapter(str(name))
        label = adapter["live"] or adapter["versions"][-1]["version"]
    return str(name), label
