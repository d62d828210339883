"""The registry on a real disk: versions, the live pointer, history, and what a crash leaves."""

from __future__ import annotations

import os
import random
import resource
import runpy
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lorad.adapter_ref import AdapterName, AdapterRef
from lorad.adapters.peft_format import read_adapter
from lorad.daemon import store_reader
from lorad.errors import LoradError
from lorad.registry.records import Action, Pushed, VersionState, Who
from lorad.registry.registry import Registry

_SHARED = runpy.run_path(str(Path(__file__).with_name("admin_daemon.py")))
write_adapter, BASE, SHAPE = _SHARED["write_adapter"], _SHARED["BASE"], _SHARED["SHAPE"]
CHECK = partial(read_adapter, shape=SHAPE, max_lora_rank=16)
ME = Who(uid=1234, pid=99)
TINKER = AdapterName("default", "tinker")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def registry(state: Path) -> Iterator[Registry]:
    opened = Registry.open(state, BASE, CHECK)
    yield opened
    opened.close()


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Three adapters that differ in their weights."""
    return [write_adapter(tmp_path / f"adapter{seed}", seed) for seed in range(3)]


def push(registry: Registry, directory: Path, name: str = "tinker", **how: object) -> Pushed:
    return registry.push(directory, AdapterName.parse(name), who=ME, **how)  # type: ignore[arg-type]


def code(caught: pytest.ExceptionInfo[LoradError]) -> str:
    return caught.value.code


def live(registry: Registry, name: str = "tinker") -> str:
    return registry.resolve(name).version


def files(state: Path) -> set[str]:
    """Every file below the store, staging too."""
    store = state / "store"
    return {str(path.relative_to(store)) for path in store.rglob("*") if not path.is_dir()}


# --- push ---------------------------------------------------------------------------------------


def test_pushed_version_lies_in_the_store_and_is_not_live(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    pushed = push(registry, adapters[0], "acme/tinker", message="first try")
    version = pushed.version
    assert pushed.outcome == "created"
    assert str(version.ref) == "acme/tinker@v1"
    assert (version.rank, version.modules, version.targets) == (2, 1, ("q_proj",))
    assert (version.message, version.created_by) == ("first try", ME)
    directory = registry.directory(version.ref)
    assert directory == state / "store" / "org%2FTiny-Base" / "acme" / "tinker" / "v1"
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (directory / file).read_bytes() == (adapters[0] / file).read_bytes()
        assert stat.S_IMODE((directory / file).stat().st_mode) == 0o400
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    with pytest.raises(LoradError) as caught:
        registry.resolve("acme/tinker")
    assert code(caught) == "adapter.not_found"
    assert "promote" in caught.value.hint
    assert registry.resolve("acme/tinker@v1") == version.ref


def test_same_content_is_the_same_version(
    registry: Registry, state: Path, adapters: list[Path], tmp_path: Path
) -> None:
    first = push(registry, adapters[0])
    before = files(state)
    again = push(registry, write_adapter(tmp_path / "copy", 0))
    assert again.outcome == "unchanged"
    assert again.version == first.version
    assert files(state) == before
    assert [e.action for e in registry.history(TINKER)] == [Action.PUSH]


def test_other_scaling_is_other_content(
    registry: Registry, adapters: list[Path], tmp_path: Path
) -> None:
    push(registry, adapters[0])
    louder = push(registry, write_adapter(tmp_path / "louder", 0, lora_alpha=8))
    assert (louder.outcome, louder.version.label) == ("created", "v2")


def test_labels_count_up_past_given_ones(registry: Registry, tmp_path: Path) -> None:
    labels = [None, "v7", None, "summer-2026", None]
    got = [
        push(registry, write_adapter(tmp_path / str(n), n), label=label).version.label
        for n, label in enumerate(labels)
    ]
    assert got == ["v1", "v7", "v8", "summer-2026", "v9"]
    assert list(registry.adapter(TINKER).versions) == got


def test_a_label_never_gets_other_content(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    before = files(state)
    with pytest.raises(LoradError) as other_content:
        push(registry, adapters[1], label="v1")
    with pytest.raises(LoradError) as other_label:
        push(registry, adapters[0], label="v2")
    assert code(other_content) == code(other_label) == "version.exists"
    assert files(state) == before


def test_same_content_under_two_names_is_two_adapters(
    registry: Registry, adapters: list[Path]
) -> None:
    one = push(registry, adapters[0], "a/tinker")
    two = push(registry, adapters[0], "b/tinker")
    assert one.version.ref.digest == two.version.ref.digest
    assert [a.name.tenant for a in registry.adapters()] == ["a", "b"]


def test_dry_run_says_what_it_would_do_and_does_nothing(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    would = push(registry, adapters[0], dry_run=True)
    assert (would.outcome, would.version.label) == ("created", "v1")
    assert files(state) == set()
    assert registry.adapters() == []
    push(registry, adapters[0])
    assert push(registry, adapters[0], dry_run=True).outcome == "unchanged"


def test_name_differing_from_the_base_is_a_warning(registry: Registry, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", 1, base_model_name_or_path="org/Another")
    same = write_adapter(tmp_path / "same", 2, base_model_name_or_path="/models/tiny-base/")
    assert [w.code for w in push(registry, other).version.warnings] == ["base_name_differs"]
    assert push(registry, same).version.warnings == ()


@pytest.mark.parametrize("name", ["org/versions", "history", "acme/history", "base"])
def test_words_of_the_api_are_no_names(registry: Registry, adapters: list[Path], name: str) -> None:
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[0], name)
    assert code(caught) == "name.reserved"


@pytest.mark.parametrize(
    ("base", "name"),
    [("smollm", "smollm"), ("SmolLM", "smollm"), ("smollm", "default/smollm"), ("a/b", "a/b")],
)
def test_base_model_cannot_be_shadowed(
    tmp_path: Path, adapters: list[Path], base: str, name: str
) -> None:
    registry = Registry.open(tmp_path / "s", base, CHECK)
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[0], name)
    assert code(caught) == "name.reserved"
    registry.close()


def test_bad_adapters_leave_nothing(registry: Registry, state: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pickled = write_adapter(tmp_path / "pickled", 0)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    wide = write_adapter(tmp_path / "wide", 0, rank=32)
    fifo = write_adapter(tmp_path / "fifo", 0)
    (fifo / "adapter_model.safetensors").unlink()
    os.mkfifo(fifo / "adapter_model.safetensors")
    expected = {
        tmp_path / "absent": "path.not_found",
        empty: "adapter.config_missing",
        pickled: "adapter.unsafe_format",
        wide: "adapter.rank_exceeds_max",
        fifo: "adapter.unsafe_format",
    }
    for directory, reason in expected.items():
        with pytest.raises(LoradError) as caught:
            push(registry, directory)
        assert code(caught) == reason
        assert caught.value.hint
    assert files(state) == set()
    assert registry.adapters() == []


def test_links_of_a_hub_cache_are_copied_as_files(
    registry: Registry, adapters: list[Path], tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in adapters[0].iterdir():
        (linked / file.name).symlink_to(file)
    version = push(registry, linked).version
    assert not any(file.is_symlink() for file in registry.directory(version.ref).iterdir())


# --- the live pointer -----------------------------------------------------------------------------


def test_promote_and_rollback(registry: Registry, adapters: list[Path]) -> None:
    for directory in adapters:
        push(registry, directory)
    moves = [registry.promote(TINKER, label, who=ME) for label in ("v1", "v2", "v3")]
    assert [(m.from_version, m.to_version, m.generation) for m in moves] == [
        (None, "v1", 1),
        ("v1", "v2", 2),
        ("v2", "v3", 3),
    ]
    for expected in ("v2", "v1"):  # a second rollback goes further back, not forward again
        target = registry.rollback_target(TINKER)
        registry.rollback(TINKER, target.label, who=ME)
        assert live(registry) == expected
    with pytest.raises(LoradError) as caught:
        registry.rollback_target(TINKER)
    assert code(caught) == "rollback.no_previous"


def test_rollback_after_a_new_promote_returns_to_what_was_live_then(
    registry: Registry, adapters: list[Path]
) -> None:
    for directory in adapters:
        push(registry, directory)
    registry.promote(TINKER, "v1", who=ME)
    registry.promote(TINKER, "v2", who=ME)
    registry.rollback(TINKER, "v1", who=ME)
    registry.promote(TINKER, "v3", who=ME)
    assert registry.rollback_target(TINKER).label == "v1"


def test_rollback_passes_over_what_was_deleted(registry: Registry, adapters: list[Path]) -> None:
    for directory in adapters:
        push(registry, directory)
    for label in ("v1", "v2", "v3"):
        registry.promote(TINKER, label, who=ME)
    registry.delete(TINKER, "v2", who=ME)
    assert registry.rollback_target(TINKER).label == "v1"


def test_promoting_what_is_live_changes_nothing(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    registry.promote(TINKER, "v1", who=ME)
    again = registry.promote(TINKER, "v1", who=ME)
    assert (again.changed, again.generation) == (False, 1)
    assert len(registry.history(TINKER)) == 2


def test_retired_name_answers_no_more_and_can_come_back(
    registry: Registry, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    registry.promote(TINKER, "v1", who=ME)
    assert registry.retire(TINKER, who=ME).to_version is None
    with pytest.raises(LoradError):
        registry.resolve("tinker")
    assert registry.live_adapters() == []
    assert registry.rollback_target(TINKER).label == "v1"
    registry.promote(TINKER, "v1", who=ME)
    assert live(registry) == "v1"


def test_generation_guards_against_a_stale_decision(
    registry: Registry, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    push(registry, adapters[1])
    registry.promote(TINKER, "v1", who=ME, expected_generation=0)
    with pytest.raises(LoradError) as caught:
        registry.promote(TINKER, "v2", who=ME, expected_generation=0)
    assert code(caught) == "generation.changed"
    assert live(registry) == "v1"


def test_of_two_promotes_with_one_generation_one_wins(
    registry: Registry, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    push(registry, adapters[1])
    outcomes: list[str] = []
    start = threading.Barrier(2)

    def promote(label: str) -> None:
        start.wait()
        try:
            registry.promote(TINKER, label, who=ME, expected_generation=0)
            outcomes.append("won")
        except LoradError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=promote, args=(label,)) for label in ("v1", "v2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["generation.changed", "won"]


def test_history_says_who_what_and_why(registry: Registry, adapters: list[Path]) -> None:
    other = Who(uid=7, pid=8)
    begun = time.time()
    push(registry, adapters[0], message="trained on tickets")
    registry.promote(TINKER, "v1", who=other, reason="looks good")
    promoted, pushed = registry.history(TINKER)
    assert (pushed.action, pushed.who, pushed.to_version) == (Action.PUSH, ME, "v1")
    assert pushed.reason == "trained on tickets"
    assert (promoted.action, promoted.who, promoted.reason) == (
        Action.PROMOTE,
        other,
        "looks good",
    )
    assert (promoted.from_version, promoted.to_version, promoted.generation) == (None, "v1", 1)
    assert begun <= pushed.at <= promoted.at <= time.time()
    assert pushed.id < promoted.id


# --- resolving ------------------------------------------------------------------------------------


def test_resolve_names_what_it_cannot_find(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    registry.promote(TINKER, "v1", who=ME)
    assert registry.resolve("default/tinker") == registry.resolve("tinker@v1")
    for model in ("nobody", "acme/tinker", "GPT-4", "../etc/passwd", "", "a" * 1_000_000, "\0"):
        with pytest.raises(LoradError) as caught:
            registry.resolve(model)
        assert code(caught) == "adapter.not_found"
        assert len(caught.value.message) < 200
    with pytest.raises(LoradError) as caught:
        registry.resolve("tinker@v2")
    assert code(caught) == "version.not_found"
    assert "v1" in caught.value.hint


def test_unknown_names_leave_no_trace_in_memory(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    for number in range(10_000):
        with pytest.raises(LoradError):
            registry.resolve(f"name-{number}")
    assert len(registry.adapters()) == 1


def test_live_adapters_are_what_models_lists(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0], "zeta")
    push(registry, adapters[1], "alpha")
    push(registry, adapters[2], "unpromoted")
    for name in ("zeta", "alpha"):
        registry.promote(AdapterName.parse(name), "v1", who=ME)
    assert [str(entry.ref) for entry in registry.live_adapters()] == [
        "default/alpha@v1",
        "default/zeta@v1",
    ]


# --- delete, pin, verify --------------------------------------------------------------------------


def test_delete_removes_the_files_and_keeps_the_label(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    registry.delete(TINKER, "v1", who=ME, reason="leaked")
    assert files(state) == set()
    assert registry.adapters() == []
    assert registry.history(TINKER)[0].reason == "leaked"
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[1], label="v1")
    assert code(caught) == "version.exists"
    assert push(registry, adapters[1]).version.label == "v2"
    back = push(registry, adapters[0])
    assert (back.outcome, back.version.label) == ("restored", "v1")
    assert registry.verify(back.version.ref)


def test_delete_refuses_what_is_referred_to(registry: Registry, adapters: list[Path]) -> None:
    push(registry, adapters[0])
    push(registry, adapters[1])
    registry.promote(TINKER, "v1", who=ME)
    registry.set_pinned(TINKER, "v2", True, who=ME)
    for label, reason in (("v1", "version.live"), ("v2", "version.pinned")):
        with pytest.raises(LoradError) as caught:
            registry.delete(TINKER, label, who=ME)
        assert code(caught) == reason
    assert set(registry.adapter(TINKER).versions) == {"v1", "v2"}


def test_pins_are_kept_and_told_once(registry: Registry, adapters: list[Path]) -> None:
    ref = push(registry, adapters[0]).version.ref
    assert registry.set_pinned(TINKER, "v1", True, who=ME)
    assert not registry.set_pinned(TINKER, "v1", True, who=ME)
    assert registry.pinned() == [ref]
    assert registry.set_pinned(TINKER, "v1", False, who=ME)
    assert registry.pinned() == []
    assert [e.action for e in registry.history(TINKER)] == [Action.UNPIN, Action.PIN, Action.PUSH]


def flip_last_byte(registry: Registry, ref: AdapterRef) -> None:
    weights = registry.directory(ref) / "adapter_model.safetensors"
    weights.chmod(0o600)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def test_altered_bytes_are_never_served_until_pushed_again(
    registry: Registry, adapters: list[Path]
) -> None:
    ref = push(registry, adapters[0]).version.ref
    registry.promote(TINKER, "v1", who=ME)
    assert registry.verify(ref) == registry.directory(ref)
    flip_last_byte(registry, ref)
    with pytest.raises(LoradError) as caught:
        registry.verify(ref)
    assert code(caught) == "store.digest_mismatch"
    for ask in ("tinker", "tinker@v1"):
        with pytest.raises(LoradError) as refused:
            registry.resolve(ask)
        assert code(refused) == "version.failed"
    assert registry.live_adapters() == []
    with pytest.raises(LoradError):
        registry.promote(TINKER, "v1", who=ME)
    assert push(registry, adapters[0]).outcome == "restored"
    assert registry.resolve("tinker") == ref
    assert registry.verify(ref)
    assert [e.action for e in registry.history(TINKER)][:2] == [Action.RESTORE, Action.FAIL]


def test_a_load_of_altered_bytes_marks_the_version(
    registry: Registry, adapters: list[Path]
) -> None:
    """The daemon proves the bytes that it packs, in one pass, and leaves the verdict to verify."""
    ref = push(registry, adapters[0]).version.ref
    registry.promote(TINKER, "v1", who=ME)
    read = store_reader(registry, SHAPE)
    assert read(ref, SHAPE, torch.float32).digest == ref.digest
    flip_last_byte(registry, ref)
    with pytest.raises(LoradError) as caught:
        read(ref, SHAPE, torch.float32)
    assert code(caught) == "store.digest_mismatch"
    with pytest.raises(LoradError) as refused:
        registry.resolve("tinker")
    assert code(refused) == "version.failed"


def test_files_that_cannot_be_opened_just_now_are_not_taken_for_lost(
    registry: Registry, adapters: list[Path]
) -> None:
    ref = push(registry, adapters[0]).version.ref
    registry.promote(TINKER, "v1", who=ME)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(LoradError) as caught:
            registry.verify(ref)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code(caught) == "store.unavailable"
    assert registry.verify(ref)
    assert registry.resolve("tinker") == ref


# --- start and restart ----------------------------------------------------------------------------


def test_restart_keeps_everything(registry: Registry, state: Path, adapters: list[Path]) -> None:
    for directory in adapters:
        push(registry, directory, "acme/tinker")
    name = AdapterName("acme", "tinker")
    registry.promote(name, "v2", who=ME)
    registry.set_pinned(name, "v3", True, who=ME)
    before = registry.adapters(), registry.history(name), registry.pinned()
    registry.close()
    again = Registry.open(state, BASE, CHECK)
    assert (again.adapters(), again.history(name), again.pinned()) == before
    assert again.resolve("acme/tinker").version == "v2"
    assert push(again, adapters[0], "acme/tinker").outcome == "unchanged"
    again.close()


def test_each_base_model_has_its_own_adapters(state: Path, adapters: list[Path]) -> None:
    for base in (BASE, "org/Other"):
        registry = Registry.open(state, base, CHECK)
        assert registry.adapters() == []
        push(registry, adapters[0])
        registry.close()
    registry = Registry.open(state, BASE, CHECK)
    assert live_labels(registry) == ["v1"]
    registry.close()


def live_labels(registry: Registry) -> list[str]:
    return [label for adapter in registry.adapters() for label in adapter.versions]


def test_second_process_is_kept_out(registry: Registry, state: Path) -> None:
    with pytest.raises(LoradError) as caught:
        Registry.open(state, BASE, CHECK)
    assert code(caught) == "daemon.already_running"
    registry.close()
    Registry.open(state, BASE, CHECK).close()


def test_start_clears_what_a_crash_left(
    registry: Registry, state: Path, adapters: list[Path], tmp_path: Path
) -> None:
    version = push(registry, adapters[0]).version
    half_pushed = registry.stage()
    (half_pushed / "adapter_config.json").write_text("{}")
    unregistered = registry.directory(version.ref).with_name("v9")
    write_adapter(unregistered, 9)
    registry.close()
    again = Registry.open(state, BASE, CHECK)
    assert {file.split("/")[-2] for file in files(state)} == {"v1"}
    assert list((state / "store" / ".staging").iterdir()) == []
    assert live_labels(again) == ["v1"]
    again.close()


@pytest.mark.parametrize("damage", ["missing", "shorter", "link"])
def test_start_marks_damaged_versions_failed(
    registry: Registry, state: Path, adapters: list[Path], damage: str
) -> None:
    ref = push(registry, adapters[0]).version.ref
    push(registry, adapters[1])
    registry.promote(TINKER, "v1", who=ME)
    weights = registry.directory(ref) / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "shorter":
        weights.write_bytes(content[:-1])
    elif damage == "link":
        weights.symlink_to(adapters[0] / weights.name)
    registry.close()

    again = Registry.open(state, BASE, CHECK)
    version = again.version(TINKER, "v1")
    assert version.state is VersionState.FAILED
    assert "adapter_model.safetensors" in version.failure
    with pytest.raises(LoradError) as caught:
        again.resolve("tinker")
    assert code(caught) == "version.failed"
    assert again.resolve("tinker@v2").version == "v2"
    again.close()

    weights.unlink(missing_ok=True)
    weights.write_bytes(content)  # say, the disk was not mounted
    healed = Registry.open(state, BASE, CHECK)
    assert healed.resolve("tinker") == ref
    healed.close()


def test_lost_database_never_deletes_the_store(
    registry: Registry, state: Path, adapters: list[Path]
) -> None:
    push(registry, adapters[0])
    registry.close()
    before = files(state)
    for file in state.glob("registry.db*"):
        file.unlink()
    for _ in range(2):  # the second start must not take the first one's new file for the truth
        with pytest.raises(LoradError) as caught:
            Registry.open(state, BASE, CHECK)
        assert code(caught) == "store.unavailable"
    assert files(state) == before


def test_database_of_a_newer_lorad_is_left_alone(registry: Registry, state: Path) -> None:
    registry.close()
    with sqlite3.connect(state / "registry.db") as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    with pytest.raises(LoradError) as caught:
        Registry.open(state, BASE, CHECK)
    assert code(caught) == "store.unavailable"


def test_full_disk_changes_nothing(
    registry: Registry, state: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    push(registry, adapters[0])
    before = files(state)

    def no_space(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("lorad.registry.store.os.fsync", no_space)
    with pytest.raises(LoradError) as caught:
        push(registry, adapters[1])
    assert code(caught) == "store.no_space"
    monkeypatch.undo()
    assert files(state) == before
    assert live_labels(registry) == ["v1"]
    assert push(registry, adapters[1]).version.label == "v2"


# --- kill -9 --------------------------------------------------------------------------------------

CHURN = """
    import itertools, sys
    from functools import partial
    from pathlib import Path
    from lorad.adapter_ref import AdapterName
    from lorad.adapters.peft_format import read_adapter
    from lorad.errors import LoradError
    from lorad.registry.records import Who
    from lorad.registry.registry import Registry
    from lorad.sizing.model_shape import ModelShape

    state, adapters = Path(sys.argv[1]), [Path(a) for a in sys.argv[2:]]
    shape = ModelShape("llama", 8, 1, 2, 1, 4, 16, 32)
    registry = Registry.open(state, "org/Tiny-Base", partial(read_adapter, shape=shape))
    name, who = AdapterName("default", "tinker"), Who.daemon()
    print("ready", flush=True)
    for directory in itertools.cycle(adapters):
        label = registry.push(directory, name, who=who).version.label
        registry.promote(name, label, who=who)
        for other in list(registry.adapter(name).versions):
            if other != label:
                registry.delete(name, other, who=who)
"""


def test_kill_at_any_moment_leaves_it_consistent(
    state: Path, adapters: list[Path], tmp_path: Path
) -> None:
    script = tmp_path / "churn.py"
    script.write_text(textwrap.dedent(CHURN))
    rng = random.Random(20261129)
    for _ in range(12):
        command = [sys.executable, str(script), str(state), *map(str, adapters)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.06))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        check_consistent(state)


def check_consistent(state: Path) -> None:
    registry = Registry.open(state, BASE, CHECK)
    adapter = next(iter(registry.adapters()), None)
    expected = set()
    for version in adapter.versions.values() if adapter else ():
        assert version.servable
        directory = registry.verify(version.ref)
        expected |= {str(f.relative_to(state / "store")) for f in directory.iterdir()}
    assert files(state) == expected
    if adapter:
        moves = [e for e in registry.history(TINKER) if e.action is Action.PROMOTE]
        assert adapter.live == (moves[0].to_version if moves else None)
        assert adapter.generation == (moves[0].generation if moves else 0)
    registry.close()
