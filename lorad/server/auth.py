"""Bearer keys of the public port: a key stands for a tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request

from lorad.adapter_ref import DEFAULT_TENANT, AdapterName
from lorad.errors import LoradError


class ApiKeys:
    """Which tenant a request acts for. Without any key everybody may see everything."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys` maps each key to its tenant."""
        self._tenants = _by_digest(keys)

    def replace(self, keys: Mapping[str, str]) -> tuple[int, int]:
        """Take these instead, for requests from now on; how many came or changed, and went."""
        before, self._tenants = self._tenants, _by_digest(keys)
        came = sum(before.get(key) != tenant for key, tenant in self._tenants.items())
        return came, len(before.keys() - self._tenants.keys())

    def tenant(self, request: Request) -> str | None:
        """The caller's tenant, None when no keys are set; raises `auth.invalid_key`."""
        if not self._tenants:
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = self._tenants.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise LoradError(
                "auth.invalid_key",
                "the API key is missing or unknown",
                hint="send it as Authorization: Bearer KEY",
            )
        return tenant

    def allow(self, tenant: str | None, name: AdapterName) -> bool:
        """A tenant may use its own adapters and the shared ones, of the default tenant."""
        return tenant is None or name.tenant in (tenant, DEFAULT_TENANT)

    def check_operator(self, request: Request) -> None:
        """For what names every tenant's adapters: a key of the default tenant, if keys are set."""
        if self.tenant(request) not in (None, DEFAULT_TENANT):
            raise LoradError(
                "auth.invalid_key",
                "this needs an API key of the default tenant",
                hint="metrics name the adapters of every tenant",
            )


def read_api_keys(file: Path) -> dict[str, str]:
    """`key tenant` a line, `#` begins a comment; a key alone is for the default tenant.

    Raises `config.invalid`, also for a file without any key: it would open the port to everybody.
    """
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except OSError as error:
        raise LoradError("config.invalid", f"server.api_keys: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LoradError("config.invalid", f"server.api_keys: {file} is not UTF-8") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or words[0] in keys:
            raise LoradError(
                "config.invalid",
                f"{file}:{number}: not `key tenant`, or a key that is there already",
                hint="one key and the tenant it stands for a line",
            )
        keys[words[0]] = words[1] if len(words) == 2 else DEFAULT_TENANT
    if not keys:
        raise LoradError(
            "config.invalid", f"{file} holds no key", hint="add one, or unset api_keys"
        )
    return keys


def _by_digest(keys: Mapping[str, str]) -> dict[bytes, str]:
    """Found by hash: how long a look-up takes then tells nothing about the keys."""
    return {_digest(key): tenant for key, tenant in keys.items()}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
