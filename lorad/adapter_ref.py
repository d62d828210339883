"""Names: `tenant/name`, a version label `v3`, and the reference a request holds to its end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lorad.errors import LoradError

DEFAULT_TENANT = "default"
PART = r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?"
_PART = re.compile(PART)
_RULE = "1 to 64 of a-z 0-9 . _ - , starting and ending with a letter or digit"
_SHOWN = 80


def _checked_part(part: str, what: str, whole: str) -> str:
    if not _PART.fullmatch(part):
        raise LoradError(
            "name.invalid",
            f"{what} {part[:_SHOWN]!r} is not a valid name",
            hint=f"use {_RULE}",
            details={"name": whole[:_SHOWN]},
        )
    return part


@dataclass(frozen=True, order=True, slots=True)
class AdapterName:
    """The logical name of an adapter; it stays the same when a new version ships."""

    tenant: str
    name: str

    @classmethod
    def parse(cls, text: str) -> AdapterName:
        """`name` or `tenant/name`; raises `name.invalid` for anything else."""
        tenant, slash, name = text.partition("/")
        if not slash:
            tenant, name = DEFAULT_TENANT, text
        return cls(_checked_part(tenant, "tenant", text), _checked_part(name, "adapter", text))

    @property
    def qualified(self) -> str:
        """Always with the tenant: what the `x-lorad-adapter` header and the store use."""
        return f"{self.tenant}/{self.name}"

    def __str__(self) -> str:
        """As people write it: the default tenant is left out."""
        return self.name if self.tenant == DEFAULT_TENANT else self.qualified


def check_version_label(label: str) -> str:
    """A version label follows the same grammar as a name; raises `name.invalid`."""
    return _checked_part(label, "version", label)


def split_version(text: str) -> tuple[AdapterName, str | None]:
    """`tenant/name@v3` -> (name, "v3"); without `@`, the version is None (= live)."""
    name, at, version = text.partition("@")
    return AdapterName.parse(name), check_version_label(version) if at else None


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of one adapter.

    A request resolves its model name to a reference once, at admission, and keeps it. The
    engine knows adapters by `digest` alone: content decides what may share memory or KV.
    """

    name: AdapterName
    version: str
    digest: str  # "sha256:" + 64 hex digits, over canonical config and tensor bytes

    def __str__(self) -> str:
        return f"{self.name.qualified}@{self.version}"
