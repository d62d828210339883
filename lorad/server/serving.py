"""What the public routes work with, and how a model name becomes an adapter version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from lorad.adapter_ref import AdapterName, AdapterRef, split_version
from lorad.engine.messages import GenerationRequest, RequestOutput
from lorad.errors import LoradError
from lorad.model.chat_template import ChatTemplate
from lorad.model.tokenizer import Tokenizer
from lorad.server.auth import ApiKeys
from lorad.server.limits import Limits

_SHOWN = 200
_UNKNOWN = ("adapter.not_found", "version.not_found", "name.invalid", "name.reserved")


class GeneratesText(Protocol):
    """The engine, as far as the public routes know it."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Raises LoradError before or between outputs; closing the iterator aborts."""
        ...


class LiveAdapter(Protocol):
    """An adapter and the version that its bare name serves now."""

    @property
    def name(self) -> AdapterName: ...
    @property
    def version(self) -> str: ...
    @property
    def created_at(self) -> float: ...


class ResolvesModels(Protocol):
    """The registry, as far as the public routes know it. Answers from memory."""

    def resolve(self, model: str, sticky: str | None = None) -> AdapterRef:
        """`sticky` names the caller, for a canary's share.

        `tenant/name` or `tenant/name@v3`; `adapter.not_found`, `version.not_found`."""
        ...

    def live_adapters(self) -> Iterable[LiveAdapter]: ...


@dataclass(frozen=True)
class Serving:
    """One base model and everything that its public port needs."""

    base_model: str
    engine: GeneratesText
    registry: ResolvesModels
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    limits: Limits
    api_keys: ApiKeys
    started_at: int  # seconds since the epoch

    def resolve(
        self, model: str, tenant: str | None, sticky: str | None = None
    ) -> AdapterRef | None:
        """The adapter version that `model` names for this caller, or None for the base model.

        `sticky` names the caller, and so decides whether a canary answers.
        Another tenant's adapter and one that does not exist give the same error.
        """
        if model == self.base_model:
            return None
        try:
            name, _ = split_version(model)
            if self.api_keys.allow(tenant, name):
                return self.registry.resolve(model, sticky)
        except LoradError as error:
            if error.code not in _UNKNOWN:
                raise
        raise LoradError(
            "adapter.not_found",
            f"the model {model[:_SHOWN]!r} does not exist",
            hint="GET /v1/models lists the models that can be used",
            details={"param": "model"},
        )


def caller(request: Request, user: str | None) -> str:
    """Whom a canary is to treat alike: the request's `user`, else its API key, else its address.

    A `user` is the caller's own word, so two keys' users of one name are two callers.
    """
    key = request.headers.get("authorization", "")
    if user is not None:
        return f"user:{key}:{user}"
    return f"key:{key}" if key else f"address:{request.client.host if request.client else ''}"


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving
