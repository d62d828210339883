"""The engine as the servers see it: async iterators in front, one engine thread behind."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import TypeVar

from lorad.adapter_ref import AdapterRef
from lorad.engine.detokenizer import Detokenizer
from lorad.engine.engine import Engine, Message, Output
from lorad.engine.messages import (
    AbortRequest,
    AdapterLoaded,
    AdapterProbed,
    AdapterUnloaded,
    CommandFailed,
    EngineStats,
    GenerationRequest,
    LoadAdapter,
    ProbeAdapter,
    RequestOutput,
    StepRecord,
    TokenOutput,
    UnloadAdapter,
)
from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Answer = AdapterLoaded | AdapterProbed | AdapterUnloaded
A = TypeVar("A", AdapterLoaded, AdapterProbed, AdapterUnloaded)

_STATS_INTERVAL = 0.05  # seconds between snapshots while the engine is busy
_IDLE_POLL = 0.02  # seconds between looks at drains and loads when no message comes


class AsyncEngine:
    """Starts and stops the engine thread; every method is called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        inbox: queue.SimpleQueue[Message | None],
        tokenizer: Tokenizer,
        *,
        max_queued: int,
        step_timeout: float = math.inf,
    ) -> None:
        """A pass of the step loop longer than `step_timeout` seconds counts as one that hangs."""
        self._engine = engine
        self._inbox = inbox
        self._tokenizer = tokenizer
        self.max_queued = max_queued
        self._streams: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._commands: dict[str, asyncio.Future[Answer]] = {}
        self._stats = engine.stats()
        self._accepting = True
        self._failure: LoradError | None = None  # what ended the engine thread
        self._has_failed = asyncio.Event()
        self._step_timeout = step_timeout
        # When the pass of the loop began; None while it waits with nothing to do. Of a clock that
        # stands still while the machine sleeps.
        self._pass_began: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lorad-engine", daemon=True)

    # --- life -----------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for a while, then end the thread."""
        self._accepting = False
        deadline = time.monotonic() + drain_timeout
        while self._streams and self.trouble is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._end_all(LoradError("daemon.stopping", "the daemon is stopping"))
        self._inbox.put(None)
        # A thread that hangs does not hear of it, and ends with the process.
        await asyncio.to_thread(self._thread.join, 30 if self.trouble is None else 1)

    @property
    def trouble(self) -> LoradError | None:
        """Why no step can be run: the thread has ended, or hangs in one. None when all is well."""
        if self._failure is not None:
            return self._failure
        if not self._thread.is_alive():
            return LoradError("engine.failed", "the engine thread has ended")
        began = self._pass_began
        seconds = 0.0 if began is None else time.monotonic() - began
        if seconds <= self._step_timeout:
            return None
        return LoradError(
            "engine.hung",
            f"the engine has been in one step for {seconds:.1f} s, of {self._step_timeout:g} that "
            "it may take",
            hint="a kernel that hangs ends with the process; raise engine.step_timeout if this "
            "machine is that slow",
        )

    async def failure(self) -> LoradError:
        """Wait until the engine thread has failed, which it does not recover from."""
        await self._has_failed.wait()
        return self._failure or LoradError("engine.failed", "the engine thread has ended")

    @property
    def accepting(self) -> bool:
        return self._accepting

    # --- requests -------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """The request's outputs as they come. Closing the iterator aborts the request.

        Raises `queue.full` or `daemon.stopping` before the first output, and the adapter's or
        the engine's error whenever it happens.
        """
        self._admit()
        sampling, prompt = request.sampling, len(request.prompt_token_ids)
        detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids, sampling.stop)
        stream: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._inbox.put(request)
        finished = False
        count = 0
        try:
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                if output.token_id is None:
                    continue
                count += 1
                text = detokenizer.push(output.token_id)
                reason = output.finish_reason
                stop_reason: str | int | None = detokenizer.stopped
                if stop_reason is None and reason is not None:
                    text += detokenizer.flush()
                    stop_reason = detokenizer.stopped
                if stop_reason is not None:
                    reason = "stop"
                elif output.token_id in sampling.stop_token_ids and reason == "stop":
                    stop_reason = output.token_id
                yield RequestOutput(
                    request_id=request.request_id,
                    text=text,
                    token_ids=(output.token_id,),
                    logprobs=(output.logprob,) if output.logprob else (),
                    prompt_tokens=prompt,
                    completion_tokens=count,
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    cached_tokens=output.cached_tokens,
                )
                if reason is not None:
                    return
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._inbox.put(AbortRequest(request.request_id))

    def _admit(self) -> None:
        if not self._accepting:
            raise LoradError("daemon.stopping", "the daemon is stopping")
        self._check_alive()
        if len(self._streams) >= self.max_queued:
            raise LoradError(
                "queue.full",
                f"{len(self._streams)} requests are running or waiting already",
                hint="try again in a moment",
                details={"limit": self.max_queued},
            )

    def _check_alive(self) -> None:
        if (trouble := self.trouble) is not None:
            raise trouble

    def _end_all(self, error: LoradError) -> None:
        """Every open stream and command ends with the error: nobody else will answer them."""
        for request_id, stream in self._streams.items():
            stream.put_nowait(TokenOutput(request_id, None, None, "error", error))
        for future in self._commands.values():
            if not future.done():
                future.set_exception(error)

    # --- adapters -------------------------------------------------------------------------

    async def load_adapter(self, ref: AdapterRef, *, pin: bool | None = None) -> AdapterLoaded:
        """Bring an adapter onto the device; returns at once when it is there already."""
        return await self._command(LoadAdapter(uuid.uuid4().hex, ref, pin), AdapterLoaded)

    async def probe_adapter(self, ref: AdapterRef, token_ids: tuple[int, ...]) -> AdapterProbed:
        """Load an adapter and compare its deltas for a short prompt with the version's files.

        The steps wait for one forward pass of the prompt; the files are read and compared on
        another thread. Raises `selftest.failed` naming the module, and what loading raises.
        """
        return await self._command(ProbeAdapter(uuid.uuid4().hex, ref, token_ids), AdapterProbed)

    async def unload_adapter(self, ref: AdapterRef, *, drain_timeout: float) -> AdapterUnloaded:
        """Wait for the adapter's running requests, then free its pages and its host copy."""
        command = UnloadAdapter(uuid.uuid4().hex, ref, drain_timeout)
        return await self._command(command, AdapterUnloaded)

    async def _command(
        self, command: LoadAdapter | ProbeAdapter | UnloadAdapter, kind: type[A]
    ) -> A:
        self._check_alive()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._commands[command.command_id] = future
        self._inbox.put(command)
        try:
            answer = await future
        finally:
            self._commands.pop(command.command_id, None)
        if not isinstance(answer, kind):
            raise TypeError(f"unexpected answer {answer}")
        return answer

    # --- what it tells about itself -------------------------------------------------------

    def stats(self) -> EngineStats:
        """The newest snapshot: at most 50 ms old while the engine is busy."""
        return self._stats

    def recent_steps(self, limit: int) -> list[StepRecord]:
        """The newest steps, oldest first."""
        return list(self._engine.records)[-limit:] if limit > 0 else []

    # --- the engine thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whatever it was, nobody runs steps any more
            log.exception("the engine thread has failed")
            reason = str(error).partition("\n")[0] or type(error).__name__
            failure = LoradError("engine.failed", f"the engine thread has ended: {reason}")
            if isinstance(error, LoradError):
                failure = error
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._fail, failure)

    def _fail(self, failure: LoradError) -> None:
        self._failure = failure
        self._end_all(failure)
        self._has_failed.set()

    def _serve(self) -> None:
        engine, published = self._engine, 0.0
        worked = False
        while True:
            messages = self._receive(worked)
            self._pass_began = time.monotonic()
            for message in messages:
                if message is None:
                    return
                engine.handle(message)
            worked = engine.step()
            outputs = engine.take_outputs()
            now = time.monotonic()
            if outputs and not all(isinstance(o, TokenOutput) for o in outputs):
                published = 0.0  # an adapter moved: tell it together with the answer
            if not worked or now - published > _STATS_INTERVAL:
                self._stats = engine.stats()
                published = now
            if outputs and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _receive(self, worked: bool) -> list[Message | None]:
        """All messages that have come; waits for one when the last step had nothing to do."""
        messages: list[Message | None] = []
        try:
            if not worked:
                self._pass_began = None
                timeout = _IDLE_POLL if self._engine.waits else None
                messages.append(self._inbox.get(timeout=timeout))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, TokenOutput):
                if (stream := self._streams.get(output.request_id)) is not None:
                    stream.put_nowait(output)
                continue
            future = self._commands.pop(output.command_id, None)
            if future is None or future.done():
                continue
            if isinstance(output, CommandFailed):
                future.set_exception(output.error)
            else:
                future.set_result(output)
