"""From what a person types to one version."""

from __future__ import annotations

from lorad.adapter_ref import AdapterName, check_version_label, split_version
from lorad.admin_client import AdminClient
from lorad.errors import LoradError


def one_version(client: AdminClient, text: str) -> tuple[str, str]:
    """`name@v3` as it is; a bare name means its live version, or the newest if none is live."""
    name, label = split_version(text)
    if label is None:
        adapter = client.adapter(str(name))
        label = adapter["live"] or adapter["versions"][-1]["version"]
    return str(name), label


def name_and_version(ref: str, version: str | None) -> tuple[AdapterName, str | None]:
    """`NAME VERSION` and `NAME@VERSION` mean the same; raises `usage.invalid` for both at once."""
    name, label = split_version(ref)
    if version is None:
        return name, label
    if label is not None:
        raise LoradError("usage.invalid", f"the version is given twice: {label} and {version}")
    return name, check_version_label(version)
