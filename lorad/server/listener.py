"""The TCP socket of the public port."""

from __future__ import annotations

import errno
import socket

from lorad.errors import LoradError


def public_listener(host: str, port: int) -> socket.socket:
    """A bound TCP socket, for a server to listen on; port 0 takes a free one.

    asyncio turns Nagle's algorithm off only on sockets that name their protocol. Without that
    every answer waits 40 ms for the client's acknowledgement between its headers and its body.
    Raises `socket.in_use`, `socket.permission` or `config.invalid`.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise LoradError("config.invalid", f"{host}: {port} is no port: 0 to 65535 are")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise LoradError(
            "config.invalid",
            f"the address {host!r}, port {port} cannot be resolved: {error}",
            hint="127.0.0.1 serves this machine alone, 0.0.0.0 every network",
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    return listener


def _bind_error(host: str, port: int, error: OSError) -> LoradError:
    what = f"cannot bind {host} port {port}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return LoradError("socket.in_use", what, hint="choose another --port")
    if error.errno in (errno.EACCES, errno.EPERM):
        return LoradError("socket.permission", what, hint="ports below 1024 need privileges")
    return LoradError("config.invalid", what, hint="the host must be an address of this machine")
