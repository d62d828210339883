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


class AdminProtocol(H11Protocol):
    """HTTP/1.1 on the admin socket; requests find the peer in `request.state.peer`."""

    max_connections: ClassVar[int] = 64
    header_seconds: ClassVar[float] = 10.0  # from the first byte of a request, or connecting

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            log.warning("closed a connection: %d are open", self.max_connections)
            transport.close()
            return
        peer = Peer.of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": peer}
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        super().connection_lost(exc)

    def _watch_header(self) -> None:
        """Start the clock while a request's header is awaited, stop it when it is complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_header()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_seconds, self._header_late)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_late(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
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
