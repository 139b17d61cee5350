"""Requests as httpx's own functions make them: a connection each. What differs is that certificates, of which
no test needs any, are not read for each of them, and that a busy machine has a minute to answer.
"""

from __future__ import annotations

import httpx

_client = httpx.Client(
    verify=False, timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)
get, post, stream = _client.get, _client.post, _client.stream


def client(url: str, headers: dict[str, str] | None = None) -> httpx.Client:
    """A client of one server, which keeps its connections."""
    return httpx.Client(base_url=url, headers=headers, verify=False, timeout=60)
