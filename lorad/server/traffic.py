"""Between the public port and the engine: closed while draining, counted while compared."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.engine.messages import GenerationRequest, RequestOutput
from lorad.errors import LoradError
from lorad.registry.records import Adapter
from lorad.server.canary_watch import CanaryWatch, Tally
from lorad.server.serving import GeneratesText
from lorad.wire import BASE_WORD

_TIMED = 256  # last requests whose time to the first token is kept
_REMEMBERED = 4096  # versions whose order of use is kept

FindAdapter = Callable[[AdapterName], Adapter | None]


class Traffic:
    """The engine as the public port sees it. Used on one event loop."""

    def __init__(self, engine: GeneratesText, find: FindAdapter, watch: CanaryWatch) -> None:
        self._engine = engine
        self._find = find
        self._used: OrderedDict[AdapterRef, None] = OrderedDict()
        self.watch = watch
        self.draining = False
        self.first_tokens: deque[tuple[str, float]] = deque(maxlen=_TIMED)

    def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Raises `daemon.draining` at once; otherwise what the engine gives and raises."""
        if self.draining:
            raise LoradError(
                "daemon.draining",
                "the daemon takes no new requests just now",
                hint="`loractl resume` lets it take requests again",
            )
        ref = request.adapter
        outputs = _Timed(self._engine.generate(request), str(ref or BASE_WORD), self.first_tokens)
        if ref is None:
            return outputs
        self._use(ref)
        tally = self.watch.tally(self._find(ref.name), ref)
        return outputs if tally is None else _counted(outputs, tally)

    def last_used(self) -> list[AdapterRef]:
        """Versions that requests came for, the latest first."""
        return list(reversed(self._used))

    def remember(self, refs: Iterable[AdapterRef]) -> None:
        """Uses of an earlier life, the latest first."""
        for ref in reversed(list(refs)):
            self._use(ref)

    def _use(self, ref: AdapterRef) -> None:
        self._used[ref] = None
        self._used.move_to_end(ref)
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)


class _Timed:
    """The engine's outputs, with the time to the first of them entered into `times`."""

    def __init__(
        self, outputs: AsyncIterator[RequestOutput], label: str, times: deque[tuple[str, float]]
    ) -> None:
        self._outputs = outputs
        self._label = label
        self._times: deque[tuple[str, float]] | None = times
        self._started = time.monotonic()

    def __aiter__(self) -> _Timed:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await anext(self._outputs)
        if self._times is not None:
            self._times.append((self._label, time.monotonic() - self._started))
            self._times = None
        return output

    async def aclose(self) -> None:
        """Abort the request, as closing the engine's own iterator does."""
        close = getattr(self._outputs, "aclose", None)
        if close is not None:
            await close()


async def _counted(outputs: _Timed, tally: Tally) -> AsyncGenerator[RequestOutput, None]:
    failure: LoradError | None = None
    try:
        async with aclosing(outputs) as closing:
            async for output in closing:
                tally.output(output.prompt_tokens, output.completion_tokens)
                yield output
    except LoradError as error:
        failure = error
        raise
    finally:
        tally.end(failure)
