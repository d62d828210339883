"""The engine behind its thread: streams, aborts, limits, commands, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from lorad.engine.async_engine import AsyncEngine
from lorad.engine.messages import (
    AbortRequest,
    EngineStats,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
)
from lorad.errors import LoradError
from lorad.model.tokenizer import Tokenizer

PROMPTS = [(17, 3, 90), (5,) * 20, tuple(range(40, 74)), (9, 8, 7, 6, 5, 4)]
ADAPTERS = (None, "a", "b")
TOKENS = 12


def byte_tokenizer() -> Tokenizer:
    """One token for each of the 256 bytes, as many as the tiny model's vocabulary has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()


def text_of(prompt: tuple[int, ...], token_ids: list[int]) -> str:
    """What the tokens add to the prompt's text, decoded at once."""
    bytes_of = b"".join(map(TOKENIZER.token_bytes, prompt))
    whole = bytes_of + b"".join(map(TOKENIZER.token_bytes, token_ids))
    return whole.decode(errors="replace")[len(bytes_of.decode(errors="replace")) :]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama3-rope")


@pytest.fixture(scope="module")
def adapters(model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    made = {
        name: random_adapter(model, root / name, 4, ("q_proj", "down_proj"), seed=seed)
        for seed, name in enumerate("ab")
    }
    return {**made, "broken": root / "nowhere"}


@pytest.fixture(scope="module")
def answers() -> dict[tuple[tuple[int, ...], str | None], list[int]]:
    return {}


class Bench:
    """A running AsyncEngine, and requests for it."""

    def __init__(self, sync, cold, max_queued: int) -> None:
        self.sync = sync
        self.cold = cold
        self.engine = AsyncEngine(
            sync.built.engine, sync.built.inbox, TOKENIZER, max_queued=max_queued
        )
        self.ref = sync.ref
        self._count = 0

    def request(
        self, prompt: tuple[int, ...] = PROMPTS[0], adapter: str | None = None, **sampling
    ) -> GenerationRequest:
        self._count += 1
        settings = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
        ref = self.ref(adapter) if adapter else None
        return GenerationRequest(f"r{self._count}", prompt, SamplingParams(**settings), ref)

    async def outputs(self, request: GenerationRequest) -> list[RequestOutput]:
        return [output async for output in self.engine.generate(request)]

    async def tokens(self, request: GenerationRequest) -> list[int]:
        return [token for output in await self.outputs(request) for token in output.token_ids]

    async def begin(
        self, request: GenerationRequest, count: int
    ) -> tuple[AsyncIterator[RequestOutput], list[int]]:
        """The stream of a request that has given `count` tokens."""
        stream = self.engine.generate(request)
        tokens = [token for _ in range(count) for token in (await anext(stream)).token_ids]
        return stream, tokens

    async def settled(self) -> EngineStats:
        """A snapshot taken after all that was sent so far, once the engine holds nothing."""
        old = self.engine.stats()
        self.sync.built.inbox.put(AbortRequest("nobody"))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if stats is not old and not (stats.running or stats.waiting or stats.kv_pages):
                return stats
            await asyncio.sleep(0.01)
        raise AssertionError(f"still busy: {self.engine.stats()}")


async def rest(stream: AsyncIterator[RequestOutput]) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


@pytest.fixture
def run(model, adapters, sync_engine, answers) -> Callable[..., None]:
    """Runs a scenario against a fresh engine; fails if it takes 60 seconds or leaves anything."""

    def cold(prompt: tuple[int, ...], adapter: str | None) -> list[int]:
        if (prompt, adapter) not in answers:
            fresh = sync_engine(model, adapters)
            answers[prompt, adapter] = fresh.generate([(list(prompt), adapter)], max_tokens=TOKENS)[
                0
            ]
        return answers[prompt, adapter]

    def runner(
        scenario: Callable[[Bench], Awaitable[None]], max_queued: int = 1000, **options
    ) -> None:
        async def main() -> None:
            bench = Bench(sync_engine(model, adapters, **options), cold, max_queued)
            await bench.engine.start()
            try:
                async with asyncio.timeout(60):
                    await scenario(bench)
            finally:
                await bench.engine.stop()
            assert bench.engine.trouble is not None

        asyncio.run(main())

    return runner


# --- streams ----------------------------------------------------------------------------------


def test_an_answer_as_it_comes(run) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.request(PROMPTS[1], "a", logprobs=2)
        outputs = await bench.outputs(request)
        expected = bench.cold(PROMPTS[1], "a")
        assert [output.token_ids for output in outputs] == [(token,) for token in expected]
        assert [output.completion_tokens for output in outputs] == list(range(1, TOKENS + 1))
        assert {output.request_id for output in outputs} == {request.request_id}
        assert {output.prompt_tokens for output in outputs} == {20}
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (TOKENS - 1)
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("length", None)
        assert "".join(output.text for output in outputs) == text_of(PROMPTS[1], expected)
        for output in outputs:
            [logprob] = output.logprobs
            assert logprob.token_id == output.token_ids[0] == logprob.top[0][0]
            assert len(logprob.top) == 2

    run(scenario)


def test_concurrent_requests_share_steps(run) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.engine.load_adapter(bench.ref("a"))
        requests = [bench.request(PROMPTS[0], "a"), bench.request(PROMPTS[1]), bench.request()]
        got = await asyncio.gather(*map(bench.tokens, requests))
        assert got == [
            bench.cold(PROMPTS[0], "a"),
            bench.cold(PROMPTS[1], None),
            bench.cold(PROMPTS[0], None),
        ]
        names = {request.request_id for request in requests}
        shared = [r for r in bench.engine.recent_steps(100) if set(r.requests) == names]
        assert len(shared) >= TOKENS // 2
        assert shared[-1].rows == {"default/a@v1": 1, "base": 2}
        assert bench.engine.recent_steps(0) == []
        steps = (await bench.settled()).steps
        assert [record.step for record in bench.engine.recent_steps(2)] == [steps - 1, steps]

    run(scenario)


def test_closing_the_iterator_aborts_and_frees_the_pages(run) -> None:
    async def scenario(bench: Bench) -> None:
        stream, _ = await bench.begin(bench.request(PROMPTS[2], "a", max_tokens=400), 3)
        other, first = await bench.begin(bench.request(PROMPTS[1]), 2)
        await stream.aclose()
        assert first + await rest(other) == bench.cold(PROMPTS[1], None)
        stats = await bench.settled()
        assert stats.generated_tokens < 100, "it went on for nobody"

    run(scenario)


def test_cancelling_the_task_aborts_too_also_while_it_waits(run) -> None:
    async def scenario(bench: Bench) -> None:
        tasks = [
            asyncio.create_task(bench.outputs(bench.request(PROMPTS[2], adapter, max_tokens=400)))
            for adapter in ADAPTERS
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bench.settled()
        assert await bench.tokens(bench.request()) == bench.cold(PROMPTS[0], None)

    run(scenario, max_num_seqs=1)


def test_beyond_the_queue_a_request_is_refused_at_once(run) -> None:
    async def scenario(bench: Bench) -> None:
        streams = [await bench.begin(bench.request(max_tokens=200), 1) for _ in range(2)]
        with pytest.raises(LoradError) as refused:
            await bench.outputs(bench.request())
        assert refused.value.code == "queue.full"
        assert refused.value.details == {"limit": 2}
        await streams[0][0].aclose()
        assert await bench.tokens(bench.request()) == bench.cold(PROMPTS[0], None)

    run(scenario, max_queued=2)


def test_stop_strings_end_an_answer_and_are_not_shown(run) -> None:
    async def scenario(bench: Bench) -> None:
        for prompt in PROMPTS:
            answer = bench.cold(prompt, None)
            whole = text_of(prompt, answer)
            stop = whole[3:5]
            request = bench.request(prompt, stop=("never in it", stop))
            outputs = await bench.outputs(request)
            assert "".join(output.text for output in outputs) == whole[: whole.index(stop)]
            assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
            assert len(outputs) < TOKENS
            assert [output.token_ids[0] for output in outputs] == answer[: len(outputs)]
        await bench.settled()

    run(scenario)


def test_a_stop_token_is_named(run) -> None:
    async def scenario(bench: Bench) -> None:
        answer = bench.cold(PROMPTS[0], None)
        outputs = await bench.outputs(bench.request(stop_token_ids=(answer[4],)))
        place = answer.index(answer[4])
        assert [output.token_ids[0] for output in outputs] == answer[: place + 1]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", answer[4])

    run(scenario)


def test_200_requests_at_once_all_end_as_if_each_had_been_alone(run) -> None:
    async def scenario(bench: Bench) -> None:
        rows = [(PROMPTS[i % 4], ADAPTERS[i % 3]) for i in range(200)]
        requests = [bench.request(*row, max_tokens=1 + i % TOKENS) for i, row in enumerate(rows)]
        got = await asyncio.gather(*map(bench.tokens, requests))
        for i, (row, tokens) in enumerate(zip(rows, got, strict=True)):
            assert tokens == bench.cold(*row)[: 1 + i % TOKENS]
        stats = await bench.settled()
        assert stats.generated_tokens == sum(map(len, got))
        # Blocks that another request has computed are not computed again. A preempted one's are.
        prompts = sum(len(prompt) for prompt, _ in rows)
        assert stats.memory.prefix_lookup_tokens == prompts
        assert stats.memory.prefix_hit_tokens > 0
        assert stats.prompt_tokens >= prompts - stats.memory.prefix_hit_tokens

    run(scenario, max_num_seqs=32, slab_bytes=96 * 8192, max_model_len=64)


# --- errors -----------------------------------------------------------------------------------


def test_an_error_in_mid_stream_ends_that_stream(run) -> None:
    async def scenario(bench: Bench) -> None:
        bad, _ = await bench.begin(bench.request(adapter="a", max_tokens=400), 2)
        good, first = await bench.begin(bench.request(adapter="b"), 2)
        core = bench.sync.built.engine
        resident = core._adapters.get(bench.ref("a").digest)
        start = resident.first_page * core._slab.page_elements
        core._slab.data[start : start + 64] = torch.nan
        with pytest.raises(LoradError) as failed:
            await rest(bad)
        assert failed.value.code == "engine.nonfinite_logits"
        assert first + await rest(good) == bench.cold(PROMPTS[0], "b")
        await bench.settled()

    run(scenario)


def test_an_adapter_that_cannot_be_read_is_the_requests_error(run) -> None:
    async def scenario(bench: Bench) -> None:
        got = await asyncio.gather(
            bench.tokens(bench.request(adapter="broken")),
            bench.tokens(bench.request(adapter="a")),
            return_exceptions=True,
        )
        assert got[0].code == "path.not_found"
        assert got[1] == bench.cold(PROMPTS[0], "a")

    run(scenario)


def test_a_failed_step_is_told_and_the_next_request_works(run, monkeypatch) -> None:
    async def scenario(bench: Bench) -> None:
        stream, _ = await bench.begin(bench.request(max_tokens=400), 2)
        runner = bench.sync.built.engine._runner
        works = runner.run

        def broken_once(batch):
            monkeypatch.setattr(runner, "run", works)
            raise RuntimeError("broken")

        monkeypatch.setattr(runner, "run", broken_once)
        with pytest.raises(LoradError) as failed:
            await rest(stream)
        assert failed.value.code == "engine.failed"
        assert bench.engine.trouble is None
        assert await bench.tokens(bench.request()) == bench.cold(PROMPTS[0], None)

    run(scenario)


def test_when_the_engine_thread_dies_nobody_waits_for_ever(run, monkeypatch) -> None:
    """Streams and commands alike; later ones are refused, and health tells it."""

    async def scenario(bench: Bench) -> None:
        core = bench.sync.built.engine
        stream, _ = await bench.begin(bench.request(max_tokens=400), 1)

        def broken():
            raise RuntimeError("a bug in the scheduler")

        monkeypatch.setattr(core._scheduler, "schedule", broken)
        unload = bench.engine.unload_adapter(bench.ref("a"), drain_timeout=60)
        got = await asyncio.gather(rest(stream), unload, return_exceptions=True)
        assert got[0].code == "engine.failed"
        assert "a bug in the scheduler" in got[0].message
        assert isinstance(got[1], LoradError) or got[1].freed_device_bytes == 0
        assert bench.engine.trouble is not None
        for refused in (bench.tokens(bench.request()), bench.engine.load_adapter(bench.ref("a"))):
            with pytest.raises(LoradError) as error:
                await refused
            assert error.value.code == "engine.failed"

    run(scenario)


# --- commands ---------------------------------------------------------------------------------


def test_load_and_unload(run) -> None:
    async def scenario(bench: Bench) -> None:
        ref = bench.ref("a")
        first, second = await asyncio.gather(
            bench.engine.load_adapter(ref, pin=True), bench.engine.load_adapter(ref)
        )
        assert (first.pages, first.bytes) == (second.pages, second.bytes)
        [state] = bench.engine.stats().adapters
        assert (state.digest, state.residency, state.pinned) == (ref.digest, "device", True)
        assert (state.device_pages, state.device_bytes) == (first.pages, first.bytes)

        stream, tokens = await bench.begin(bench.request(adapter="a"), 2)
        unload = asyncio.create_task(bench.engine.unload_adapter(ref, drain_timeout=30))
        tokens += await rest(stream)
        assert tokens == bench.cold(PROMPTS[0], "a")
        answer = await unload
        assert answer.freed_device_bytes == answer.freed_host_bytes == first.bytes
        assert answer.drained_requests <= 1
        assert bench.engine.stats().adapters == (), "the answer came before the snapshot"
        assert await bench.tokens(bench.request(adapter="a")) == bench.cold(PROMPTS[0], "a")

    run(scenario)


def test_commands_that_fail_raise(run) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoradError) as failed:
            await bench.engine.load_adapter(bench.ref("broken"))
        assert failed.value.code == "path.not_found"
        stream, tokens = await bench.begin(bench.request(adapter="a", max_tokens=300), 1)
        with pytest.raises(LoradError) as timed_out:
            await bench.engine.unload_adapter(bench.ref("a"), drain_timeout=0.05)
        assert timed_out.value.code == "drain.timeout"
        tokens += [token for _ in range(11) for token in (await anext(stream)).token_ids]
        assert tokens == bench.cold(PROMPTS[0], "a")
        await stream.aclose()
        await bench.engine.unload_adapter(bench.ref("a"), drain_timeout=10)

    run(scenario)


# --- the end ----------------------------------------------------------------------------------


def test_stop_lets_running_requests_finish(run) -> None:
    async def scenario(bench: Bench) -> None:
        streams = [await bench.begin(bench.request(adapter=name), 1) for name in ADAPTERS]
        rests = [asyncio.create_task(rest(stream)) for stream, _ in streams]
        stopping = asyncio.create_task(bench.engine.stop(drain_timeout=30))
        await asyncio.sleep(0)
        assert not bench.engine.accepting
        with pytest.raises(LoradError) as refused:
            await bench.outputs(bench.request())
        assert refused.value.code == "daemon.stopping"
        for name, (_, first), task in zip(ADAPTERS, streams, rests, strict=True):
            assert first + await task == bench.cold(PROMPTS[0], name)
        started = time.monotonic()
        await stopping
        assert time.monotonic() - started < 5, "nothing was running any more"

    run(scenario)


def test_what_still_runs_when_the_time_is_up_is_told(run) -> None:
    async def scenario(bench: Bench) -> None:
        stream, _ = await bench.begin(bench.request(PROMPTS[0], max_tokens=480), 1)
        await bench.engine.stop(drain_timeout=0.0)
        with pytest.raises(LoradError) as stopped:
            await rest(stream)
        assert stopped.value.code == "daemon.stopping"

    run(scenario)


def test_a_command_that_waits_when_the_engine_stops_is_told(run) -> None:
    async def scenario(bench: Bench) -> None:
        stream, _ = await bench.begin(bench.request(adapter="a", max_tokens=480), 1)
        unload = asyncio.create_task(
            bench.engine.unload_adapter(bench.ref("a"), drain_timeout=3600)
        )
        await asyncio.sleep(0.05)
        await bench.engine.stop()
        with pytest.raises(LoradError) as stopped:
            async with asyncio.timeout(5):
                await unload
        assert stopped.value.code == "daemon.stopping"
        with contextlib.suppress(LoradError):
            await rest(stream)

    run(scenario)
