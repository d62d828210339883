"""Names over the admin socket: attacks, huge ones, and tenants."""

from __future__ import annotations

from pathlib import Path

from admin_process import Daemon, error, live
from admin_process import adapters as adapters
from admin_process import daemon as daemon
from admin_process import tinker as tinker

ATTACKS = [
    "../x", "..", ".", "/etc", "a/../../b", "a\\..\\b", "", "a/", "/a", "a/b/c", "-rf", "nul\0",
    "new\nline", "\x1b[2J", "[red]x[/red]", "ａdmin", "аdmin", "Tinker", "tinker.", "tinker ",
    "name@v1", "name:1", "a" * 65, "a" * 60_000,
]  # fmt: skip


def test_attack_names_are_refused(daemon: Daemon) -> None:
    for name in ATTACKS:
        status, code = error(daemon.post("/v1/uploads", {"name": name}))
        assert (status, code) in ((400, "name.invalid"), (400, "request.invalid")), name
        if len(name) <= 1000:
            path = "/v1/adapters/" + "".join(f"%{byte:02x}" for byte in name.encode())
            status, code = error(daemon.http.get(path))
            assert code in ("name.invalid", "adapter.not_found", "route.not_found"), name
    assert daemon.staged() == []
    assert {entry.name for entry in daemon.state.iterdir()} == {
        *("registry.db", "registry.db-shm", "registry.db-wal", "store")
    }


def test_half_a_character_is_refused_wherever_it_stands(tinker: Daemon) -> None:
    half = r'"\ud800"'
    promote = "/v1/adapters/tinker:promote"
    for path, body in (
        (promote, f'{{"version": {half}}}'),
        (promote, f'{{"version": "v2", "reason": {half}}}'),
        (promote, f'{{"version": "v2", "checks": [{{"prompt": {half}, "must_contain": "x"}}]}}'),
        (promote, f'{{{half}: "v2"}}'),
        ("/v1/adapters/tinker:retire", f'{{"reason": {half}}}'),
        ("/v1/uploads", f'{{"name": {half}}}'),
        ("/v1/uploads", f'{{"name": "up", "message": {half}}}'),
    ):
        answer = tinker.http.post(path, content=body.encode())
        assert error(answer) == (400, "request.invalid"), body
    assert live(tinker) == "v1"
    assert tinker.staged() == []


def test_a_field_that_is_given_twice_is_refused(tinker: Daemon) -> None:
    answer = tinker.http.post("/v1/gc?dry_run=1", content=b'{"keep": 1, "keep": 0}')
    assert error(answer) == (400, "request.invalid")


def test_huge_body_is_refused(daemon: Daemon) -> None:
    answer = daemon.post("/v1/uploads", {"name": "a" * 1_000_000})
    assert error(answer) == (400, "request.too_large")


def test_name_with_tenant_both_encoded_and_plain(daemon: Daemon, adapters: list[Path]) -> None:
    daemon.push(adapters[0], "acme/tinker")
    for path in ("acme/tinker", "acme%2Ftinker"):
        assert daemon.get(f"/v1/adapters/{path}")["name"] == "acme/tinker"
        assert daemon.get(f"/v1/adapters/{path}/history")["events"]
        assert daemon.get(f"/v1/adapters/{path}/versions/v1")["version"] == "v1"
        assert daemon.post(f"/v1/adapters/{path}:promote").status_code == 200
    assert error(daemon.post("/v1/uploads", {"name": "acme/history"})) == (400, "name.reserved")
    assert daemon.get("/v1/adapters?tenant=acme")["adapters"][0]["live"] == "v1"
    assert daemon.get("/v1/adapters?tenant=other")["adapters"] == []
