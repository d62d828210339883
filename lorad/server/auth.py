"""Bearer keys of the public port: a key stands for a tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.requests import Request

from lorad.adapter_ref import DEFAULT_TENANT, AdapterName
from lorad.errors import LoradError


class ApiKeys:
    """Which tenant a request acts for. Without any key everybody may see everything."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys` maps each key to its tenant."""
        # Found by hash: how long a look-up takes then tells nothing about the keys.
        self._tenants = {_digest(key): tenant for key, tenant in keys.items()}

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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
