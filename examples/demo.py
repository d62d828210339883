"""The demo: two fine-tunes of one real model in the same batch, promote and rollback under load.

Starts a daemon of its own, drives it with `loractl` and the `openai` client as a user would,
checks what it claims, and stops it. With --serve it leaves the daemon running instead.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from demo_model import ensure_demo_model
from openai import AsyncOpenAI
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lorad.admin_client import AdminClient
from lorad.wire import StepInfo

HERE = Path(__file__).resolve().parent
MODEL = "SmolLM2-135M-Instruct"
PORT = 8471
QUESTION = "What should I pack for a trip to the mountains?"
CONSOLE = Console()


@dataclass
class Answer:
    """One streamed answer, as it grows."""

    model: str
    served_by: str = ""
    text: str = ""
    tokens: int = 0
    first_token: float = 0.0  # seconds
    seconds: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)


class Demo:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "run/lorad.sock"
        self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none")

    # --- the daemon and loractl ---------------------------------------------------------

    def start(self) -> None:
        model = ensure_demo_model()
        self.lorad(
            "start",
            *("--model", str(model), "--name", MODEL, "--port", str(PORT)),
            *("--dtype", "float32", "--registry", str(self.directory / "registry")),
            *("--log-file", str(self.directory / "lorad.log"), "--detach"),
        )

    def lorad(self, command: str, *options: str) -> None:
        _run([sys.executable, "-m", "lorad.main", command, *options, "--socket", str(self.socket)])

    def loractl(self, *words: str) -> None:
        CONSOLE.print(Text(f"$ loractl {' '.join(words)}", style="bold"))
        _run([sys.executable, "-m", "loractl.main", *words, "--socket", str(self.socket)])

    def push_all(self) -> None:
        adapters = HERE / "adapters"
        for name, folder in (("pirate", "pirate-v1"), ("json", "json"), ("pirate", "pirate-v2")):
            self.loractl("push", name, str(adapters / folder))
        self.loractl("promote", "pirate", "v1")
        self.loractl("promote", "json", "v1")

    def promote(self, name: str, label: str) -> float:
        """What `loractl promote` does, without the time Python takes to start; in seconds."""
        CONSOLE.print(Text(f"$ loractl promote {name} {label}", style="bold"))
        begin = time.monotonic()
        AdminClient(self.socket).promote(name, label)
        return time.monotonic() - begin

    # --- requests -------------------------------------------------------------------------

    async def ask(self, answer: Answer, *, ignore_eos: bool = False) -> Answer:
        begin = time.monotonic()
        response = await self.client.chat.completions.with_raw_response.create(
            model=answer.model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=96 if ignore_eos else 64,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": ignore_eos},
        )
        answer.served_by = response.headers["x-lorad-adapter"]
        async for chunk in response.parse():
            delta = chunk.choices[0].delta.content if chunk.choices else None
            if delta:
                answer.first_token = answer.first_token or time.monotonic() - begin
                answer.text += delta
                answer.started.set()
            if chunk.usage is not None:
                answer.tokens = chunk.usage.completion_tokens
        answer.seconds = time.monotonic() - begin
        answer.started.set()
        return answer

    async def side_by_side(self, models: list[str]) -> list[Answer]:
        """All at once, drawn as they stream."""
        answers = [Answer(model) for model in models]
        with Live(console=CONSOLE, refresh_per_second=12) as live:
            tasks = [asyncio.create_task(self.ask(answer)) for answer in answers]
            while not all(task.done() for task in tasks):
                live.update(_panels(answers))
                await asyncio.sleep(0.08)
            await asyncio.gather(*tasks)
            live.update(_panels(answers))
        if not CONSOLE.is_terminal:
            CONSOLE.print()  # Live ends without a line end there
        return answers

    def mixed_steps(self) -> list[StepInfo]:
        """The daemon's own record of the steps that ran more than one adapter."""
        steps = AdminClient(self.socket).steps(1000)["steps"]
        return [step for step in steps if len(step["rows"]) > 1]


def _panels(answers: list[Answer]) -> Table:
    """Side by side, in columns of one width."""
    row = Table.grid(expand=True)
    for _ in answers:
        row.add_column(ratio=1)
    row.add_row(
        *(
            Panel(
                Text(answer.text or "..."),
                title=Text(answer.model, style="bold"),
                subtitle=Text(answer.served_by),
            )
            for answer in answers
        )
    )
    return row


async def show(demo: Demo) -> int:
    """The whole story; returns the exit status."""
    claims: list[tuple[str, bool]] = []
    CONSOLE.rule("push two versions of one adapter, and another adapter")
    demo.push_all()

    CONSOLE.rule("the base model and both adapters, at the same time")
    CONSOLE.print(Text(f"> {QUESTION}"))
    first = await demo.side_by_side([MODEL, "pirate", "json"])
    together = [step for step in demo.mixed_steps() if len(step["rows"]) == 3]
    claims.append(("the base and two adapters ran in one batch", bool(together)))

    CONSOLE.rule("promote v2 while an answer of v1 is running")
    # Told to go on after its end, so that it is surely still running at the promote.
    cold = await demo.ask(Answer("pirate"), ignore_eos=True)
    running = Answer("pirate")
    task = asyncio.create_task(demo.ask(running, ignore_eos=True))
    await running.started.wait()
    moved = await asyncio.to_thread(demo.promote, "pirate", "v2")
    still_running = not task.done()
    await task
    after = await demo.ask(Answer("pirate"))
    CONSOLE.print(Text(f"promoted in {moved * 1000:.0f} ms, its weights loaded before the flip"))
    # What comes after the answer's own end was only there to keep it running.
    CONSOLE.print(_panels([replace(running, text=running.text[: len(first[1].text)]), after]))
    claims.append(("an answer of v1 was running when v2 became live", still_running))
    claims.append(("it stayed v1 to its last token", running.text == cold.text))
    claims.append(("and its header says so", running.served_by.endswith("@v1")))
    claims.append(("the next request got v2", after.served_by.endswith("@v2")))
    claims.append(("v2 answers differently", after.text != first[1].text))

    CONSOLE.rule("and roll back")
    await asyncio.to_thread(demo.loractl, "rollback", "pirate", "--reason", "demo")
    back = await demo.ask(Answer("pirate"))
    claims.append(("after the rollback v1 answers, word for word", back.text == first[1].text))
    demo.loractl("history", "pirate")

    CONSOLE.rule("what happened")
    CONSOLE.print(_answers_table([*first, running, after, back]))
    if together:
        CONSOLE.print(_steps_table(together))
    demo.loractl("status")
    for claim, holds in claims:
        mark = Text("yes", style="green") if holds else Text("NO ", style="bold red")
        CONSOLE.print(mark, Text(claim))
    return 0 if all(holds for _, holds in claims) else 1


def _answers_table(answers: list[Answer]) -> Table:
    table = Table(title="answers")
    for column in ("model", "answered by", "tokens", "first token", "tokens/s"):
        table.add_column(column, justify="left" if len(table.columns) < 2 else "right")
    for answer in answers:
        table.add_row(
            answer.model,
            answer.served_by,
            str(answer.tokens),
            f"{answer.first_token * 1000:.0f} ms",
            f"{answer.tokens / answer.seconds:.1f}",
        )
    return table


def _steps_table(steps: list[StepInfo]) -> Table:
    table = Table(title=f"rows of the steps that mixed all three ({len(steps)} steps)")
    for column in ("step", "rows", "ms"):
        table.add_column(column)
    for step in steps[:3]:
        rows = ", ".join(f"{name}: {count}" for name, count in step["rows"].items())
        table.add_row(str(step["step"]), rows, f"{step['seconds'] * 1000:.0f}")
    return table


def serve(demo: Demo) -> int:
    """Leave the daemon running, and say what to try."""
    demo.push_all()
    demo.loractl("list")
    socket = demo.socket
    CONSOLE.print(
        Text(
            f"""
Try:
  curl http://127.0.0.1:{PORT}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "pirate", "messages": [{{"role": "user", "content": "How are you?"}}]}}'
  curl http://127.0.0.1:{PORT}/v1/models
  export LORAD_SOCKET={socket.resolve()} PATH=$PWD/.venv/bin:$PATH
  loractl status
  loractl promote pirate v2
  loractl rollback pirate
  loractl history pirate
  make stop"""
        ),
        soft_wrap=True,
    )
    return 0


def _run(command: list[str]) -> None:
    sys.stdout.flush()
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".demo"))
    parser.add_argument("--serve", action="store_true", help="leave the daemon running")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    demo = Demo(arguments.directory)
    try:
        demo.start()
        if arguments.serve:
            return serve(demo)
        try:
            return asyncio.run(show(demo))
        finally:
            demo.lorad("stop")
    except subprocess.CalledProcessError as error:
        return int(error.returncode)


if __name__ == "__main__":
    sys.exit(main())
