"""Who sends a request, and how urgent it is: from its body and from the headers of a gateway.

A gateway knows its clients and speaks for them in ``x-headrace-*`` headers. They count only together with the
credential that this server shares with its gateway; anybody else's are ignored.
"""

from __future__ import annotations

import hmac
import math
from typing import TYPE_CHECKING

from headrace.engine.request import Sender
from headrace.errors import AuthenticationError, InvalidRequestError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

CREDENTIAL = "x-headrace-gateway"
TENANT = "x-headrace-tenant"
WEIGHT = "x-headrace-tenant-weight"
PRIORITY = "x-headrace-priority"
TIMEOUT = "x-headrace-timeout-s"
CACHE_SALT = "x-headrace-cache-salt"

_INT32 = 2**31 - 1


def sender_of(
    headers: Headers, credential: str | None, *, priority: int | None, timeout_s: float | None
) -> tuple[Sender, float | None]:
    """The sender of a request whose body says ``priority`` and ``timeout_s``, and the timeout that holds.

    ``credential``: the gateway's; None: there is no gateway. Its priority replaces the body's, the shorter
    timeout holds. Raises AuthenticationError for a wrong credential, InvalidRequestError for headers that a
    gateway got wrong.
    """
    given = headers.get(CREDENTIAL)
    if credential is None or given is None:
        return Sender(priority=priority or 0), timeout_s
    if not hmac.compare_digest(given.encode(), credential.encode()):
        raise AuthenticationError(f"the credential in `{CREDENTIAL}` is not this server's")
    asked = _number(headers, PRIORITY, -_INT32, _INT32)
    weight = _number(headers, WEIGHT, 1e-3, 1e9)
    limit = _number(headers, TIMEOUT, 1e-3, 1e9)
    if limit is not None:
        timeout_s = limit if timeout_s is None else min(limit, timeout_s)
    sender = Sender(
        priority=int(asked if asked is not None else priority or 0),
        tenant=headers.get(TENANT, ""),
        tenant_weight=1.0 if weight is None else weight,
        cache_salt=headers.get(CACHE_SALT, ""),
    )
    return sender, timeout_s


def _number(headers: Headers, name: str, low: float, high: float) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = name != PRIORITY or value.is_integer()
    if not (low <= value <= high and whole):
        kind = "a number" if name != PRIORITY else "a whole number"
        raise InvalidRequestError(f"`{name}` must be {kind} from {low:g} to {high:g}, not {text[:40]!r}")
    return value
