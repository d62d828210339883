"""Between the public port and the engine: closed while draining, counted while compared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.engine.messages import GenerationRequest, RequestOutput
from lorad.errors import LoradError
from lorad.registry.records import Adapter
from lorad.server.canary_watch import CanaryWatch, Tally
from lorad.server.serving import GeneratesText

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

    def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Raises `daemon.draining` at once; otherwise what the engine gives and raises."""
        if self.draining:
            raise LoradError(
                "daemon.draining",
                "the daemon takes no new requests just now",
                hint="`loractl resume` lets it take requests again",
            )
        ref = request.adapter
        if ref is None:
            return self._engine.generate(request)
        self._use(ref)
        tally = self.watch.tally(self._find(ref.name), ref)
        outputs = self._engine.generate(request)
        return outputs if tally is None else _counted(outputs, tally)

    def last_used(self) -> list[AdapterRef]:
        """Versions that requests came for, the latest first."""
        return list(reversed(self._used))

    def _use(self, ref: AdapterRef) -> None:
        self._used[ref] = None
        self._used.move_to_end(ref)
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)


async def _counted(
    outputs: AsyncIterator[RequestOutput], tally: Tally
) -> AsyncGenerator[RequestOutput, None]:
    failure: LoradError | None = None
    try:
        # The engine gives an async generator; closing it is what aborts the request.
        async with aclosing(outputs) as closing:  # type: ignore[type-var]
            async for output in closing:
                tally.output(output.prompt_tokens, output.completion_tokens)
                yield output
    except LoradError as error:
        failure = error
        raise
    finally:
        tally.end(failure)
