"""What a version must pass before a name may point at it: run through the engine's own path."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from lorad.adapter_ref import AdapterRef
from lorad.engine.messages import (
    AdapterProbed,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from lorad.errors import LoradError
from lorad.model.chat_template import ChatTemplate
from lorad.model.tokenizer import Tokenizer
from lorad.server.answer import new_id
from lorad.server.promote_checks import Check, Outcome

# Prose, counting, code, and a language with accents: short, so that a promote stays quick.
_PROMPTS = (
    "Hello",
    "The capital of France is",
    "1, 2, 3,",
    "def add(a, b):\n    return",
    "¿Qué hora es?",
)
_TOKENS = 4
# For the comparison with the files: the steps wait for one forward pass of so many tokens.
_PROBE = "1, 2, 3, def f(x): ¿Qué hora es?"
_PROBE_TOKENS = 12
_AT_ONCE = 8  # checks that run beside each other
_SHOWN = 10
_REMEMBERED = 4096  # contents that have passed


class TriesVersions(Protocol):
    async def probe_adapter(self, ref: AdapterRef, token_ids: tuple[int, ...]) -> AdapterProbed: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]: ...


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """`effect`: the largest change of a log-probability against the base model, in nats.
    `delta_error`: how far a module's delta is from what the files say, relative, at most."""

    prompts: int
    effect: float
    delta_error: float


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class SelfTest:
    """Runs on the event loop, in the same batches as everything else."""

    def __init__(
        self, engine: TriesVersions, tokenizer: Tokenizer, chat_template: ChatTemplate | None
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = chat_template
        self._passed: OrderedDict[str, SelfTestResult] = OrderedDict()  # by digest

    async def run(self, ref: AdapterRef) -> SelfTestResult:
        """Raises `selftest.failed` when a module's delta is not what the version's files say, or
        when an answer meets NaN or infinity, or does not come.

        Content that has passed once is not tried again while the daemon lives: it cannot change.
        """
        if ref.digest in self._passed:
            return self._passed[ref.digest]
        probed = await self._probed(ref)
        result = await self._tried(ref, probed.error)
        self._passed[ref.digest] = result
        if len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)
        return result

    async def _probed(self, ref: AdapterRef) -> AdapterProbed:
        tokens = tuple(self._tokenizer.encode(_PROBE)[:_PROBE_TOKENS]) or (0,)
        try:
            return await self._engine.probe_adapter(ref, tokens)
        except LoradError as error:
            if error.code != "selftest.failed":
                raise
            raise _failed(ref, error, error.hint) from error

    async def _tried(self, ref: AdapterRef, delta_error: float) -> SelfTestResult:
        prompts = [tuple(self._tokenizer.encode(text)) or (0,) for text in _PROMPTS]
        runs = [self._answer(p, who, _TOKENS, stop=False) for p in prompts for who in (ref, None)]
        try:
            answers = await asyncio.gather(*runs)
        except LoradError as error:
            if error.code in ("queue.full", "daemon.stopping"):
                raise
            hint = "push another checkpoint; the name still points where it did"
            raise _failed(ref, error, hint) from error
        effect = max(_difference(answers[i], answers[i + 1]) for i in range(0, len(answers), 2))
        if not math.isfinite(effect):
            raise LoradError(
                "selftest.failed", f"{ref} gives log-probabilities that are not finite"
            )
        return SelfTestResult(len(prompts), effect, delta_error)

    async def check(self, ref: AdapterRef, checks: Sequence[Check]) -> None:
        """Raises `check.failed` with the answers that were not as they must be."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(check: Check) -> Outcome:
            async with slots:
                answer = await self._answer(self._tokens(check), ref, check.max_tokens, stop=True)
                return check.outcome(answer.text, answer.tokens)

        outcomes = await asyncio.gather(*map(one, checks))
        failed = [outcome for outcome in outcomes if outcome.wrong]
        if failed:
            first = failed[0]
            raise LoradError(
                "check.failed",
                f"{ref} fails {len(failed)} of {len(checks)} checks; "
                f"the first, number {first.number}: {first.wrong}",
                hint="the name still points where it did",
                details={"failed": [outcome.details() for outcome in failed[:_SHOWN]]},
            )

    def _tokens(self, check: Check) -> tuple[int, ...]:
        if check.prompt is not None:
            return tuple(self._tokenizer.encode(check.prompt)) or (0,)
        if self._template is None:
            raise LoradError(
                "request.invalid",
                "the model has no chat template for the messages of a check",
                hint="give a prompt",
            )
        text = self._template.render(list(check.messages))
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    async def _answer(
        self, prompt: tuple[int, ...], ref: AdapterRef | None, max_tokens: int, *, stop: bool
    ) -> _Answer:
        """Greedy, so that the same version always gives the same."""
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=not stop, logprobs=0)
        request = GenerationRequest(new_id("selftest"), prompt, sampling, ref)
        text, tokens, logprobs = "", [], []
        async with aclosing(_closable(self._engine.generate(request))) as outputs:
            async for output in outputs:
                text += output.text
                tokens += output.token_ids
                logprobs += output.logprobs
        return _Answer(text, tuple(tokens), tuple(logprobs))


def _failed(ref: AdapterRef, error: LoradError, hint: str) -> LoradError:
    about = {"adapter": str(ref.name), "version": ref.version, "code": error.code}
    return LoradError(
        "selftest.failed",
        f"{ref} fails its self-test: {error.message}",
        hint=hint,
        details={**error.details, **about},
    )


def _closable(outputs: AsyncIterator[RequestOutput]) -> Any:
    """The engine gives async generators; closing one aborts its request."""
    return outputs


def _difference(one: _Answer, other: _Answer) -> float:
    """Of the log-probabilities, up to the first token that differs."""
    found = 0.0
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=False):
        found = max(found, abs(mine.logprob - theirs.logprob))
        if mine.token_id != theirs.token_id:
            break
    return found
