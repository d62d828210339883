"""Load, unload, pin and delete over the admin socket."""

from __future__ import annotations

from admin_process import Daemon, error, live
from admin_process import adapters as adapters
from admin_process import daemon as daemon
from admin_process import tinker as tinker


def test_load_and_unload(tinker: Daemon) -> None:
    loaded = tinker.post("/v1/adapters/tinker/versions/v2:load").json()
    assert (loaded["pages"], loaded["bytes"], loaded["changed"]) == (1, 4096, True)
    assert tinker.post("/v1/adapters/tinker/versions/v2:load").json()["changed"] is False
    unloaded = tinker.post("/v1/adapters/tinker/versions/v2:unload").json()
    assert (unloaded["freed_device_bytes"], unloaded["freed_host_bytes"]) == (4096, 2048)
    assert tinker.post("/v1/adapters/tinker/versions/v2:unload").json()["changed"] is False
    assert tinker.get("/v1/adapters/tinker/versions/v2")["residency"]["tier"] == "disk"


def test_unload_of_the_live_version_needs_force(tinker: Daemon) -> None:
    path = "/v1/adapters/tinker/versions/v1:unload"
    assert error(tinker.post(path)) == (409, "version.live")
    assert tinker.post(path, {"force": True}).json()["freed_device_bytes"] == 4096
    assert live(tinker) == "v1"  # unloading frees memory; the name still answers


def test_unload_that_cannot_drain_changes_nothing(tinker: Daemon) -> None:
    tinker.post("/v1/adapters/tinker/versions/v2:load")
    tinker.flag("busy")
    path = "/v1/adapters/tinker/versions/v2:unload"
    assert error(tinker.post(path, {"drain_timeout": 0.1})) == (504, "drain.timeout")
    assert tinker.get("/v1/adapters/tinker/versions/v2")["residency"]["tier"] == "device"
    assert error(tinker.post(path, {"drain_timeout": -1})) == (400, "request.invalid")


def test_pin_is_kept_over_a_restart_and_holds_off_unload_and_delete(tinker: Daemon) -> None:
    version = "/v1/adapters/tinker/versions/v2"
    assert tinker.post(f"{version}:pin").json()["changed"] is True
    assert error(tinker.post(f"{version}:unload")) == (409, "version.pinned")
    assert error(tinker.http.delete(version)) == (409, "version.pinned")
    tinker.kill()
    tinker.start()
    assert tinker.get(version)["pinned"] is True
    assert tinker.post(f"{version}:unpin").json()["changed"] is True
    assert tinker.post(f"{version}:unpin").json()["changed"] is False
    assert tinker.http.delete(version).status_code == 200


def test_delete(tinker: Daemon) -> None:
    assert error(tinker.http.delete("/v1/adapters/tinker/versions/v1")) == (409, "version.live")
    assert error(tinker.http.delete("/v1/adapters/tinker")) == (409, "version.live")
    tinker.flag("busy")
    busy = tinker.http.delete("/v1/adapters/tinker/versions/v3")
    assert error(busy) == (504, "drain.timeout")
    tinker.flag("busy", False)
    assert tinker.http.delete("/v1/adapters/tinker/versions/v3").json()["deleted"] == ["v3"]
    everything = tinker.http.delete("/v1/adapters/tinker?force=1").json()
    assert everything["deleted"] == ["v1", "v2"]
    assert error(tinker.http.get("/v1/adapters/tinker")) == (404, "adapter.not_found")
    assert list(tinker.state.glob("store/*/*")) == []
    assert len(tinker.get("/v1/adapters/tinker/history")["events"]) == 8
