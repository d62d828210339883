"""Output tokens a second of any server with OpenAI's completions route, lorad's or another's.

    python examples/bench_server.py --port 8000 --models base --concurrency 1 8 32

Prompts are random token ids, so nothing of them is cached; answers are greedy unless a temperature
is given, streamed, and of a fixed length. The client speaks plain HTTP, because on a small machine
a client library would take a good part of the cores from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Load:
    port: int
    models: Sequence[str]
    prompt_tokens: int
    new_tokens: int
    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 0})


@dataclass(frozen=True)
class Answer:
    tokens: int
    first: float  # seconds to the first event
    gaps: list[float]  # seconds between events


@dataclass(frozen=True)
class Row:
    """Seconds are medians, but for `itl_p99`."""

    concurrency: int
    requests: int
    tokens_per_s: float
    ttft: float
    itl: float
    itl_p99: float


async def answer(load: Load, model: str, prompt: list[int]) -> Answer:
    """One streamed completion; raises RuntimeError for any answer but the whole one."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.new_tokens,
        **load.sampling,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port, limit=2**22)
    begin = time.perf_counter()
    writer.write(_request(json.dumps(body).encode()))
    times, tokens, said = [], 0, b""
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            usage = json.loads(line[6:]).get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
        elif line.startswith(b"data: [DONE]"):
            break
        else:
            said = line or said
    writer.close()
    if tokens != load.new_tokens:
        raise RuntimeError(f"{model}: {tokens} of {load.new_tokens} tokens; {said.decode()!r}")
    return Answer(tokens, times[0] - begin, [b - a for a, b in pairwise(times)])


def _request(body: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def measure(load: Load, concurrency: int, requests: int, seed: int) -> Row:
    """A closed loop of `concurrency` clients; the models take turns."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(1000, 40000), k=load.prompt_tokens) for _ in range(requests)]
    waiting = iter(enumerate(prompts))
    answers: list[Answer] = []

    async def client(work: Iterator[tuple[int, list[int]]]) -> None:
        for i, prompt in work:
            answers.append(await answer(load, load.models[i % len(load.models)], prompt))

    begin = time.perf_counter()
    await asyncio.gather(*(client(waiting) for _ in range(concurrency)))
    seconds = time.perf_counter() - begin
    gaps = sorted(gap for one in answers for gap in one.gaps)
    return Row(
        concurrency,
        requests,
        sum(one.tokens for one in answers) / seconds,
        statistics.median(one.first for one in answers),
        statistics.median(gaps),
        gaps[int(len(gaps) * 0.99)],
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)


def sampling(options: argparse.Namespace) -> dict[str, float]:
    """The fields of a request for `add_sampling`'s options."""
    return {"temperature": options.temperature, "top_p": options.top_p}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    add_sampling(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = Load(
        options.port,
        options.models,
        options.prompt_tokens,
        options.new_tokens,
        sampling(options),
    )
    asyncio.run(measure(load, 2 * len(options.models), 2 * len(options.models), seed=0))
    if not options.json:
        print("| c | tokens/s | TTFT ms | ITL ms | ITL p99 ms |\n|---|---|---|---|---|")
    for turn in range(options.rounds):
        for concurrency in options.concurrency:
            row = asyncio.run(
                measure(load, concurrency, max(2, concurrency), seed=1000 * turn + concurrency)
            )
            if options.json:
                print(json.dumps(asdict(row)), flush=True)
            else:
                times = " | ".join(f"{1e3 * t:.1f}" for t in (row.ttft, row.itl, row.itl_p99))
                print(f"| {concurrency} | {row.tokens_per_s:.1f} | {times} |", flush=True)


if __name__ == "__main__":
    main()
