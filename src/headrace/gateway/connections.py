"""Connections to upstreams over HTTP, and what their failures mean.

aiohttp, which makes them, is imported for the first upstream that needs one: a gateway that asks only the
server in its own process neither waits for it nor holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

Reason = Literal["connect", "dropped", "protocol"]
"""Why there is no answer: no connection was made, it was closed, or what came broke off or is no HTTP."""

_KEEP_ALIVE_S = 4.0  # shorter than the 5 s after which uvicorn, and so vLLM, closes idle connections


class ConnectTimeoutError(OSError):
    """No connection was made in the time that the upstream's settings give it."""


class Connections:
    """A pool of connections. ``most_per_upstream``: at a time. For one event loop."""

    def __init__(self, most_per_upstream: int) -> None:
        self._most_per_upstream = most_per_upstream
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, url: str, *, data: bytes, headers: Mapping[str, str], connect_s: float
    ) -> aiohttp.ClientResponse:
        """The answer, whose head is here. Raises ConnectTimeoutError, or another of :func:`failures`."""
        import aiohttp

        try:
            return await self._opened().post(
                url,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            )
        except aiohttp.ServerTimeoutError:
            raise ConnectTimeoutError(f"no connection within {connect_s:g} seconds") from None

    async def get(self, url: str, *, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """As :meth:`post`, without a body; it may take any time."""
        return await self._opened().get(url, headers=headers, allow_redirects=False)

    async def aclose(self) -> None:
        """Close all of them."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=self._most_per_upstream, keepalive_timeout=_KEEP_ALIVE_S
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
                read_bufsize=2**18,
                auto_decompress=False,  # nobody asked for it: what small bytes grow to is not ours to hold
            )
        return self._session


def need_http(upstream: str) -> None:
    """Import what connections take, now rather than when a request waits. Raises ConfigError without it."""
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError(f"the upstream {upstream} needs aiohttp: pip install 'headrace[gateway]'") from None


def failures() -> tuple[type[Exception], ...]:
    """What is raised where the way to an upstream, or back, fails. It stands behind ``except``, which asks
    for it only once something was raised.
    """
    aiohttp = sys.modules.get("aiohttp")  # else nobody was asked over HTTP
    return (OSError, ValueError) if aiohttp is None else (aiohttp.ClientError, OSError, ValueError)


def reason_of(error: Exception) -> Reason:
    """Of one of :func:`failures`."""
    aiohttp = sys.modules.get("aiohttp")
    if isinstance(error, ConnectTimeoutError):
        return "connect"
    if aiohttp is not None:
        if isinstance(error, aiohttp.ClientConnectorError):
            return "connect"
        if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
            return "dropped"
    return "dropped" if isinstance(error, ConnectionError) else "protocol"
