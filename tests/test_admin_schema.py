"""The admin API against its own OpenAPI document: requests made from it, answers held to it.

SCHEMA_EXAMPLES=150 makes it a search of minutes, as `make soak` does.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import requests
import schemathesis
import urllib3
from hypothesis import HealthCheck, settings
from requests.adapters import HTTPAdapter
from schemathesis.core import NotSet
from schemathesis.specs.openapi import checks

from lorad import wire
from lorad.admin_client import AdminClient
from lorad.server.admin import ROUTES
from lorad.server.admin_openapi import openapi

DAEMON = Path(__file__).with_name("admin_daemon.py")
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "4"))
ENDS_THE_DAEMON = wire.SHUTDOWN

schema = schemathesis.openapi.from_dict(openapi(ROUTES))
# A good request may still meet a directory that is no adapter (422), a limit (503), or requests
# that run on (504); each is documented, and has a code of its own.
schema.config.checks.positive_data_acceptance.expected_statuses += ["422"]
schema.config.checks.not_a_server_error.expected_statuses += ["503", "504"]


class UnixConnection(urllib3.connection.HTTPConnection):
    """To the daemon's socket, whatever the host is called."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(os.environ["SCHEMA_SOCKET"])


class UnixPool(urllib3.HTTPConnectionPool):
    ConnectionCls = UnixConnection


class UnixAdapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> UnixPool:
        return UnixPool("lorad")


class Daemon:
    """Registry and admin API in a process; `cats` is there in two versions."""

    def __init__(self, root: Path) -> None:
        self.socket, self.log = root / "run" / "lorad.sock", root / "log"
        command = [sys.executable, str(DAEMON), str(root / "state"), str(self.socket)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        write_adapter = runpy.run_path(str(DAEMON))["write_adapter"]
        self.adapters = [write_adapter(root / f"a{seed}", seed) for seed in range(2)]
        self.admin = AdminClient(self.socket)
        self.uploads: list[str] = []
        self.session = requests.Session()
        self.session.mount("http://lorad", UnixAdapter())

    def seed(self) -> None:
        self.drop_uploads()
        self.admin.resume(dry_run=False)
        for label, adapter in zip(("v1", "v2"), self.adapters, strict=True):
            self.admin.push(adapter, "cats", label=label)
        self.admin.promote("cats", "v1")

    def upload(self) -> str:
        self.drop_uploads()
        answer = self.session.post(f"http://lorad{wire.UPLOADS}", json={"name": "cats"})
        self.uploads.append(answer.json()["id"])
        return self.uploads[-1]

    def drop_uploads(self) -> None:
        while self.uploads:
            self.session.delete(f"http://lorad{wire.UPLOADS}/{self.uploads.pop()}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("schema"))
    os.environ["SCHEMA_SOCKET"] = str(daemon.socket)
    yield daemon
    daemon.process.terminate()
    daemon.process.communicate(timeout=20)
    assert "Traceback" not in daemon.log.read_text()


@pytest.fixture
def daemon(running: Daemon) -> Daemon:
    running.seed()
    return running


def meet_what_is_there(case: schemathesis.Case, daemon: Daemon) -> None:
    """Half of the requests are about things that exist."""
    if crc32(repr(case.path_parameters).encode()) % 2:
        return
    for parameter in case.path_parameters or {}:
        if parameter == "id":
            case.path_parameters["id"] = daemon.upload() if "uploads" in case.path else "op-none"
        else:
            real = {"name": "cats", "version": "v2", "file": wire.CONFIG_FILE}
            case.path_parameters[parameter] = real[parameter]


@schema.exclude(path=ENDS_THE_DAEMON).parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_documented(case: schemathesis.Case, daemon: Daemon) -> None:
    meet_what_is_there(case, daemon)
    if "follow" in (case.query or {}):
        case.query["follow"] = False  # true has no end
    if case.path == wire.DRAIN and isinstance(case.body, dict | NotSet):
        given = {} if isinstance(case.body, NotSet) else case.body
        if isinstance(seconds := given.get("timeout", 0.0), int | float):
            case.body = {**given, "timeout": min(seconds, 0.01)}
    if case.path == wire.GC and isinstance(case.body, dict | NotSet):
        given = {} if isinstance(case.body, NotSet) else case.body
        case.body = {"keep": 2, **given}  # this daemon has no policy of its own
    response = case.call(base_url="http://lorad", session=daemon.session, timeout=20)
    if response.status_code == 201:
        daemon.uploads.append(response.json()["id"])
        daemon.drop_uploads()
    # What is taken on as an operation may still be refused, as the operation's outcome.
    later = [checks.negative_data_rejection] if response.status_code == 202 else []
    case.validate_response(response, excluded_checks=later)
