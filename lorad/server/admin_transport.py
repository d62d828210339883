"""How uvicorn serves the admin app: each connection with its peer, and with time limits."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lorad.sockets import Peer

log = logging.getLogger("lorad.admin")

_WARN_SECONDS = 5.0


class AdminProtocol(H11Protocol):
    """HTTP/1.1 on the admin socket; requests find the peer in `request.state.peer`."""

    max_connections: ClassVar[int] = 64
    max_of_one_process: ClassVar[int] = 16
    header_seconds: ClassVar[float] = 10.0  # from the first byte of a request, or connecting

    _warned_at: ClassVar[float] = -_WARN_SECONDS
    _header_timer: asyncio.TimerHandle | None = None
    _peer: tuple[int, int] | None = None  # uid and pid
    _made_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = Peer.of(transport.get_extra_info("socket"))
        self._peer = (peer.uid, peer.pid)
        self._made_at = self.loop.time()
        if self._of_the_same_process() > self.max_of_one_process:
            self._warn("closed connections: pid %d has %d", peer.pid, self.max_of_one_process)
            transport.close()
            return
        if len(self._open()) > self.max_connections and not self._make_room():
            self._warn("closed connections: %d are busy", self.max_connections)
            transport.close()
            return
        self.app_state = {**self.app_state, "peer": peer}
        self._watch_header()

    def _make_room(self) -> bool:
        """Close the connection that has gone longest without asking for anything.

        So whoever opens many and says nothing shuts out only itself.
        """
        silent = [o for o in self._open() if o is not self and o.waits_for_a_request]
        if not silent:
            return False
        min(silent, key=lambda other: other._made_at).transport.close()
        return True

    def _open(self) -> list[AdminProtocol]:
        """Connections that nobody has begun to close."""
        mine = (other for other in self.connections if isinstance(other, AdminProtocol))
        return [other for other in mine if not other.transport.is_closing()]

    @property
    def waits_for_a_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _warn(self, message: str, *values: int) -> None:
        """A line now and then: a flood of connections must not become one of the log."""
        now = self.loop.time()
        if now - AdminProtocol._warned_at > _WARN_SECONDS:
            AdminProtocol._warned_at = now
            log.warning(message, *values)

    def _of_the_same_process(self) -> int:
        return sum(other._peer == self._peer for other in self._open())

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        super().connection_lost(exc)

    def _watch_header(self) -> None:
        """Start the clock while a request's header is awaited, stop it when it is complete."""
        if not self.waits_for_a_request:
            self._forget_header()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_seconds, self._header_late)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_late(self) -> None:
        self._header_timer = None
        if self.waits_for_a_request:
            self.transport.close()


def admin_server_config(app: ASGIApp) -> uvicorn.Config:
    """For `uvicorn.Server(config).serve(sockets=[admin_socket.socket])`."""
    return uvicorn.Config(
        app,
        http=AdminProtocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=30,
    )
