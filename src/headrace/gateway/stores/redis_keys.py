"""Where things lie in Redis, beside what the scripts name (``lua/``), and in which form."""

from __future__ import annotations

import msgspec
import orjson

from headrace.gateway.keys import Key
from headrace.gateway.ledger import Entry, values

KEYS = "headrace:keys"
"""Hash of API keys by their ids."""
SECRETS = "headrace:secrets"
"""Hash of API keys' ids by the hashes of their secrets, in hexadecimal, of those that work."""
LEDGER = "headrace:ledger"
FEEDBACK = "headrace:feedback"


class KeptKey(msgspec.Struct):
    """A key as it lies in the hash. ``secret_hash``: in hexadecimal."""

    key: Key
    secret_hash: str


def release(name: str) -> str:
    """Where a release's state lies."""
    return f"headrace:release:{name}"


def history(name: str) -> str:
    """The list of what happened to a release, the last first."""
    return f"headrace:history:{name}"


def template(name: str) -> str:
    """Where the versions of a template lie."""
    return f"headrace:template:{name}"


def row_of(entry: Entry) -> bytes:
    """A row of the ledger, but for its time, which lies beside it."""
    return orjson.dumps(values(entry)[1:])
