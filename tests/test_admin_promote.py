"""Promote, rollback and canary over the admin socket, and their dry runs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from admin_process import WEIGHTS, Daemon, error, live
from admin_process import adapters as adapters
from admin_process import daemon as daemon
from admin_process import tinker as tinker


def test_promote_loads_first_and_then_moves_the_name(tinker: Daemon) -> None:
    shown = tinker.http.get("/v1/adapters/tinker")
    assert shown.headers["etag"] == '"1"'
    moved = tinker.post(
        "/v1/adapters/tinker:promote",
        {"version": "v2", "reason": "better"},
        headers={"if-match": shown.headers["etag"]},
    ).json()
    assert moved == {
        "name": "tinker",
        "from_version": "v1",
        "to_version": "v2",
        "generation": 2,
        "changed": True,
        "dry_run": False,
        "self_test": None,  # this daemon has no engine to try it with
        "checks": 0,
    }
    version = tinker.get("/v1/adapters/tinker/versions/v2")
    assert (version["live"], version["residency"]["tier"]) == (True, "device")
    newest = tinker.get("/v1/adapters/tinker/history?limit=1")["events"]
    assert [(e["action"], e["reason"]) for e in newest] == [("promote", "better")]
    assert newest[0]["who"] == {"uid": os.geteuid(), "pid": os.getpid()}


def test_promote_takes_the_newest_unless_told(tinker: Daemon) -> None:
    assert tinker.post("/v1/adapters/tinker:promote").json()["to_version"] == "v3"
    again = tinker.post("/v1/adapters/tinker:promote").json()
    assert (again["changed"], again["generation"]) == (False, 2)


def test_failed_load_leaves_the_old_version_live(tinker: Daemon) -> None:
    tinker.flag("full")
    refused = tinker.post("/v1/adapters/tinker:promote", {"version": "v2"})
    assert error(refused) == (503, "memory.no_capacity")
    shown = tinker.get("/v1/adapters/tinker")
    assert (shown["live"], shown["generation"]) == ("v1", 1)
    tinker.flag("full", False)
    assert tinker.post("/v1/adapters/tinker:promote", {"version": "v2"}).status_code == 200


def test_altered_files_are_never_promoted(tinker: Daemon) -> None:
    weights = next(tinker.state.glob(f"store/*/default/tinker/v2/{WEIGHTS}"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(content)
    refused = tinker.post("/v1/adapters/tinker:promote", {"version": "v2"})
    assert error(refused) == (500, "store.digest_mismatch")
    assert live(tinker) == "v1"
    assert tinker.get("/v1/adapters/tinker/versions/v2")["state"] == "failed"
    assert tinker.get("/v1/status")["failed_versions"] == 1
    again = tinker.post("/v1/adapters/tinker:promote", {"version": "v2"})
    assert error(again) == (409, "version.failed")


def test_generation_conflict(tinker: Daemon) -> None:
    for header in ('"0"', "0"):
        answer = tinker.post("/v1/adapters/tinker:promote", headers={"if-match": header})
        assert error(answer) == (409, "generation.changed")
        assert answer.json()["error"]["details"] == {"generation": 1, "live": "v1"}
    malformed = tinker.post("/v1/adapters/tinker:promote", headers={"if-match": "latest"})
    assert error(malformed) == (400, "request.invalid")
    assert live(tinker) == "v1"


def test_of_two_promotes_at_once_with_one_generation_one_wins(tinker: Daemon) -> None:
    tinker.flag("slow")  # both are past the first look before either flips

    def promote(label: str) -> int:
        return tinker.post(
            "/v1/adapters/tinker:promote", {"version": label}, headers={"if-match": "1"}
        ).status_code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(promote, ["v2", "v3"])) == [200, 409]
    assert tinker.get("/v1/adapters/tinker")["generation"] == 2


def test_rollback_goes_back_in_time(tinker: Daemon) -> None:
    for label in ("v2", "v3"):
        tinker.post("/v1/adapters/tinker:promote", {"version": label})
    for expected in ("v2", "v1"):
        rolled = tinker.post("/v1/adapters/tinker:rollback", {"reason": "worse"}).json()
        assert rolled["to_version"] == expected == live(tinker)
    none_left = tinker.post("/v1/adapters/tinker:rollback")
    assert error(none_left) == (409, "rollback.no_previous")
    to_v3 = tinker.post("/v1/adapters/tinker:rollback", {"to": "v3"}).json()
    assert (to_v3["from_version"], to_v3["to_version"]) == ("v1", "v3")


def test_dry_runs_change_nothing(tinker: Daemon) -> None:
    before = tinker.get("/v1/adapters/tinker"), tinker.get("/v1/adapters/tinker/history")
    tried = {
        "POST /v1/adapters/tinker:promote": True,
        "POST /v1/adapters/tinker:rollback": None,
        "POST /v1/adapters/tinker:retire": True,
        "POST /v1/adapters/tinker/versions/v2:load": True,
        "POST /v1/adapters/tinker/versions/v2:unload": False,
        "POST /v1/adapters/tinker/versions/v2:pin": True,
        "POST /v1/adapters/tinker/versions/v2:unpin": False,
        "DELETE /v1/adapters/tinker/versions/v2": True,
    }
    for request, would_change in tried.items():
        method, path = request.split()
        answer = tinker.http.request(method, path, params={"dry_run": "1"})
        if would_change is None:
            assert error(answer) == (409, "rollback.no_previous")
        else:
            assert (answer.json()["changed"], answer.json()["dry_run"]) == (would_change, True)
    assert before == (
        tinker.get("/v1/adapters/tinker"),
        tinker.get("/v1/adapters/tinker/history"),
    )


def test_canary(tinker: Daemon) -> None:
    path = "/v1/adapters/tinker:canary"
    would = tinker.post(f"{path}?dry_run=1", {"percent": 5}).json()
    assert (would["version"], would["changed"], would["dry_run"]) == ("v3", True, True)
    begun = tinker.post(path, {"percent": 5, "version": "v2"}, headers={"if-match": "1"}).json()
    assert begun == {
        "name": "tinker",
        "from_version": None,
        "version": "v2",
        "percent": 5.0,
        "auto_rollback": False,
        "generation": 2,
        "changed": True,
        "dry_run": False,
    }
    shown = tinker.get("/v1/adapters/tinker")
    assert shown["live"] == "v1"
    assert set(shown["canary"]["counts"]) == {"v1", "v2"}
    assert tinker.get("/v1/adapters/tinker/versions/v2")["residency"]["tier"] == "device"
    assert tinker.post(path, {"percent": 5}).json()["changed"] is False
    assert tinker.post(path, {"percent": 9}).json()["version"] == "v2"
    unload = tinker.post("/v1/adapters/tinker/versions/v2:unload")
    assert error(unload) == (409, "version.canary")
    for body in ({}, {"percent": 101}, {"percent": True}, {"percent": 0, "version": "v2"}):
        assert error(tinker.post(path, body)) == (400, "request.invalid")
    assert error(tinker.post(path, {"percent": 5, "version": "v1"})) == (409, "version.live")
    ended = tinker.post(path, {"percent": 0}).json()
    assert (ended["from_version"], ended["version"], ended["changed"]) == ("v2", None, True)
    assert tinker.get("/v1/adapters/tinker")["canary"] is None


def test_canary_that_cannot_be_loaded_gets_no_requests(tinker: Daemon) -> None:
    tinker.flag("full")
    refused = tinker.post("/v1/adapters/tinker:canary", {"percent": 5})
    assert error(refused) == (503, "memory.no_capacity")
    assert tinker.get("/v1/adapters/tinker")["canary"] is None
