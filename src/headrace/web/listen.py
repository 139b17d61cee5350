"""The server's socket, opened before anything slow."""

from __future__ import annotations

import socket

from headrace.errors import ConfigError


def address_of(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on ``host``."""
    shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def listen(host: str, port: int, write_timeout_s: float) -> socket.socket:
    """A listening socket, so that whoever connects from now on waits instead of being refused.

    Raises ConfigError when the address is taken, not ours, or not allowed.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel then drops peers that take nothing for so long
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_timeout_s * 1000))
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason.lower()}; choose another with --port or --host"
        ) from None
    sock.setblocking(False)
    return sock
