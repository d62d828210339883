"""A canary: who gets it, what is counted, and how it ends."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from lorad.adapter_ref import AdapterName
from lorad.adapters.peft_format import read_adapter
from lorad.engine.messages import GenerationRequest, RequestOutput, SamplingParams
from lorad.errors import LoradError
from lorad.registry.records import Action, Who
from lorad.registry.registry import Registry
from lorad.server.canary_watch import CanaryWatch
from lorad.server.traffic import Traffic

_SHARED = runpy.run_path(str(Path(__file__).with_name("admin_daemon.py")))
write_adapter, BASE, SHAPE = _SHARED["write_adapter"], _SHARED["BASE"], _SHARED["SHAPE"]
ME = Who(uid=1234, pid=99)
TINKER = AdapterName("default", "tinker")
CALLERS = [f"user:{n}" for n in range(2000)]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """`tinker` with v1 live, v2 and v3."""
    check = partial(read_adapter, shape=SHAPE, max_lora_rank=16)
    opened = Registry.open(tmp_path / "state", BASE, check)
    for seed in range(3):
        opened.push(write_adapter(tmp_path / f"a{seed}", seed), TINKER, who=ME)
    opened.promote(TINKER, "v1", who=ME)
    yield opened
    opened.close()


def served(registry: Registry) -> set[str]:
    """The callers that get the canary."""
    return {c for c in CALLERS if registry.resolve("tinker", c).version != "v1"}


def test_share_is_as_asked_and_a_caller_stays_where_it_is(registry: Registry) -> None:
    begun = registry.canaries.begin(TINKER, "v2", 5, who=ME, reason="try it")
    assert (begun.before, begun.after.version, begun.generation) == (None, "v2", 2)
    few = served(registry)
    assert 0.03 < len(few) / len(CALLERS) < 0.07
    assert few == served(registry)
    registry.canaries.begin(TINKER, "v2", 20, who=ME)
    more = served(registry)
    assert few < more
    assert 0.17 < len(more) / len(CALLERS) < 0.23
    registry.canaries.begin(TINKER, "v2", 100, who=ME)
    assert len(served(registry)) == len(CALLERS)
    registry.canaries.begin(TINKER, "v3", 20, who=ME)
    assert served(registry) != more  # another version draws other callers


def test_pinned_requests_and_callers_without_a_name_are_not_moved(registry: Registry) -> None:
    registry.canaries.begin(TINKER, "v2", 100, who=ME)
    assert registry.resolve("tinker@v3", "user:1").version == "v3"
    assert registry.resolve("tinker").version == "v1"
    assert [entry.ref.version for entry in registry.live_adapters()] == ["v1"]


def test_canary_survives_a_restart_and_ends_with_a_move_of_live(
    registry: Registry, tmp_path: Path
) -> None:
    registry.canaries.begin(TINKER, "v2", 12.5, who=ME, auto_rollback=True)
    registry.close()
    again = Registry.open(tmp_path / "state", BASE, lambda _: pytest.fail("nothing is pushed"))
    canary = again.adapter(TINKER).canary
    assert canary is not None
    assert (canary.version, canary.percent, canary.auto_rollback) == ("v2", 12.5, True)
    moved = again.promote(TINKER, "v2", who=ME)
    assert moved.generation == 3
    assert again.adapter(TINKER).canary is None
    assert again.resolve("tinker", "user:1").version == "v2"
    assert [(e.action, e.percent) for e in again.history(TINKER, newest=3)] == [
        (Action.PROMOTE, None),
        (Action.CANARY_END, None),
        (Action.CANARY, 12.5),
    ]
    assert again.rollback_target(TINKER).label == "v1"  # a canary was never live
    again.close()


def test_what_cannot_be_a_canary(registry: Registry) -> None:
    refused = {"v1": "version.live", "v9": "version.not_found"}
    for label, code in refused.items():
        with pytest.raises(LoradError) as caught:
            registry.canaries.begin(TINKER, label, 5, who=ME)
        assert caught.value.code == code
    with pytest.raises(LoradError) as caught:
        registry.canaries.begin(TINKER, "v2", 5, who=ME, expected_generation=0)
    assert caught.value.code == "generation.changed"
    registry.retire(TINKER, who=ME)
    with pytest.raises(LoradError) as caught:
        registry.canaries.begin(TINKER, "v2", 5, who=ME)
    assert caught.value.code == "canary.no_live"


def test_a_canary_is_referred_to(registry: Registry) -> None:
    registry.canaries.begin(TINKER, "v2", 5, who=ME)
    with pytest.raises(LoradError) as caught:
        registry.delete(TINKER, "v2", who=ME)
    assert caught.value.code == "version.canary"
    assert registry.superseded(TINKER, keep=0) == ["v3"]
    registry.canaries.end(TINKER, who=ME)
    assert registry.canaries.end(TINKER, who=ME).changed is False
    assert registry.superseded(TINKER, keep=0) == ["v2", "v3"]
    assert registry.superseded(TINKER, keep=1) == ["v2"]


def test_damaged_canary_serves_nobody(registry: Registry) -> None:
    registry.canaries.begin(TINKER, "v2", 100, who=ME)
    directory = registry.directory(registry.version(TINKER, "v2").ref)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(LoradError):
        registry.verify(registry.version(TINKER, "v2").ref)
    assert registry.resolve("tinker", "user:1").version == "v1"


# --- counting ------------------------------------------------------------------------------------


class Engine:
    """Gives two tokens, or the error that `failing` says."""

    def __init__(self) -> None:
        self.failing: LoradError | None = None
        self.closed = 0

    async def generate(self, request: GenerationRequest):  # type: ignore[no-untyped-def]
        try:
            for count in (1, 2):
                if self.failing and count == 2:
                    raise self.failing
                end = "length" if count == 2 else None
                yield RequestOutput(request.request_id, "x", (1,), (), 7, count, end)  # type: ignore[arg-type]
        finally:
            self.closed += 1


class Front:
    """Traffic over the double engine; what gave up is kept."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.engine = registry, Engine()
        self.given_up: list[tuple[str, str, str]] = []
        watch = CanaryWatch(lambda name, label, why: self.given_up.append((str(name), label, why)))
        self.traffic = Traffic(self.engine, registry.find, watch)

    def ask(self, model: str, times: int = 1, error: LoradError | None = None) -> None:
        self.engine.failing = error

        async def run() -> None:
            for _ in range(times):
                ref = self.registry.resolve(model)
                request = GenerationRequest("r", (1, 2), SamplingParams(2), ref)
                try:
                    async for _ in self.traffic.generate(request):
                        pass
                except LoradError as caught:
                    assert caught is error

        asyncio.run(run())

    def counts(self, label: str):  # type: ignore[no-untyped-def]
        return self.traffic.watch.counts(self.registry.adapter(TINKER))[label]


NAN = LoradError("engine.nonfinite_logits", "NaN")


def test_counts_are_kept_for_the_two_versions_while_there_is_a_canary(registry: Registry) -> None:
    front = Front(registry)
    front.ask("tinker", 3)
    assert front.traffic.watch.counts(registry.adapter(TINKER)) == {}
    registry.canaries.begin(TINKER, "v2", 5, who=ME)
    front.ask("tinker", 3)
    front.ask("tinker@v2", 2)
    front.ask("tinker@v2", 1, NAN)
    front.ask("tinker@v3", 9)
    live, canary = front.counts("v1"), front.counts("v2")
    assert (live.requests, live.errors, live.generated_tokens, live.prompt_tokens) == (3, 0, 6, 21)
    assert (canary.requests, canary.errors, canary.nonfinite) == (3, 1, 1)
    assert (canary.first_tokens, canary.generated_tokens) == (3, 5)
    assert canary.ttft_seconds > 0
    assert set(front.traffic.watch.counts(registry.adapter(TINKER))) == {"v1", "v2"}
    registry.canaries.begin(TINKER, "v2", 50, who=ME)
    assert front.counts("v2").requests == 3  # another share is the same canary
    registry.canaries.end(TINKER, who=ME)
    registry.canaries.begin(TINKER, "v2", 5, who=ME)
    assert front.counts("v2").requests == 0


def test_auto_rollback_at_failures_that_live_does_not_have(registry: Registry) -> None:
    front = Front(registry)
    registry.canaries.begin(TINKER, "v2", 5, who=ME, auto_rollback=True)
    front.ask("tinker", 20)
    front.ask("tinker@v2", 20)
    front.ask("tinker@v2", 2, NAN)
    assert front.given_up == []  # two may be chance
    front.ask("tinker@v2", 1, NAN)
    why = "auto-rollback: 3 of its last 23 requests failed, 3 by NaN"
    assert front.given_up == [("tinker", "v2", why)]
    front.ask("tinker@v2", 5, NAN)
    assert len(front.given_up) == 1


def test_no_auto_rollback_for_what_is_not_the_versions_fault(registry: Registry) -> None:
    front = Front(registry)
    registry.canaries.begin(TINKER, "v2", 5, who=ME, auto_rollback=True)
    for code in ("queue.full", "daemon.stopping", "request.context_length"):
        front.ask("tinker@v2", 20, LoradError(code, "not served"))
    front.ask("tinker", 10, LoradError("engine.failed", "both fail alike"))
    front.ask("tinker@v2", 10, LoradError("engine.failed", "both fail alike"))
    assert front.given_up == []
    assert front.counts("v2").requests == 10


def test_a_client_that_leaves_is_no_error_and_still_aborts(registry: Registry) -> None:
    front = Front(registry)
    registry.canaries.begin(TINKER, "v2", 5, who=ME)
    ref = registry.resolve("tinker@v2")

    async def leave() -> None:
        outputs = front.traffic.generate(GenerationRequest("r", (1,), SamplingParams(2), ref))
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert front.engine.closed == 1
    assert (front.counts("v2").requests, front.counts("v2").errors) == (1, 0)


def test_draining_refuses_new_requests(registry: Registry) -> None:
    front = Front(registry)
    front.traffic.draining = True
    request = GenerationRequest("r", (1,), SamplingParams(2), None)
    with pytest.raises(LoradError) as caught:
        front.traffic.generate(request)
    assert caught.value.code == "daemon.draining"


# --- the whole route -----------------------------------------------------------------------------


def test_canary_under_real_requests(start_daemon, tiny_chat_model, random_adapter, tmp_path):
    daemon = start_daemon(tiny_chat_model, "--slab-bytes", "64MiB", "--threads", "1")
    for seed in (1, 2):
        folder = random_adapter(tiny_chat_model, tmp_path / f"v{seed}", 4, ("q_proj",), seed=seed)
        daemon.loractl("push", "cats", str(folder))
    daemon.loractl("promote", "cats", "v1")
    shown = daemon.loractl("canary", "cats", "v2", "--percent", "50", "--auto-rollback")
    assert "canary is v2 with 50 %" in shown.stdout

    def ask(user: str | None, key: str = "none") -> str:
        client = daemon.openai().with_options(api_key=key)
        named = {"user": user} if user else {}
        answer = client.completions.with_raw_response.create(
            model="cats", prompt="Hello", max_tokens=2, **named
        )
        return answer.headers["x-lorad-adapter"].rpartition("@")[2]

    by_user = {user: ask(user) for user in map(str, range(24))}
    assert set(by_user.values()) == {"v1", "v2"}
    assert by_user == {user: ask(user) for user in by_user}
    by_key = {key: ask(None, key) for key in map(str, range(12))}
    assert set(by_key.values()) == {"v1", "v2"}
    canary = daemon.admin.adapter("cats")["canary"]
    assert sum(c["requests"] for c in canary["counts"].values()) == 60
    assert all(c["errors"] == 0 for c in canary["counts"].values())
    assert "MEAN TTFT" in daemon.loractl("show", "cats").stdout
    metrics = httpx.get(f"{daemon.url}/metrics").text
    assert 'lorad_canary_percent{adapter="default/cats",version="v2"} 50.0' in metrics
    assert 'lorad_version_requests_total{adapter="default/cats",role="canary"' in metrics
    ended = daemon.loractl("canary", "cats", "--off")
    assert "the canary v2 is over" in ended.stdout
    assert set(map(ask, by_user)) == {"v1"}
