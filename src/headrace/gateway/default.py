"""The gateway that needs no file: ``headrace serve MODEL --gateway default``.

One upstream, the server in this process; open to everybody, or to whoever has the server's key; no limits and
no caches: what it adds is the ledger. That is a SQLite file in the user's cache folder, one for each served
name, which the commands find by the word ``default`` in place of a file, or by ``default:NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from headrace.errors import ConfigError
from headrace.gateway.config import IN_PROCESS, GatewayConfig
from headrace.gateway.fields import NAME
from headrace.paths import cache_dir

WORD = "default"
_MOST = 10**6  # requests at a time: how many the server takes, it says itself
_LONG_S = 86_400.0  # it has its own limits of time as well


def default_config(names: Sequence[str], *, max_body_bytes: int = 8 * 2**20) -> GatewayConfig:
    """The settings for a server of ``names``, of which the first one names its ledger.

    Raises ConfigError for a name that a gateway's model cannot have.
    """
    for name in names:
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"{name} is no name for a gateway's model: give it one by --served-model-name")
    waits = {"first_byte_s": _LONG_S, "answer_s": _LONG_S, "idle_s": _LONG_S}
    local = {"url": IN_PROCESS, "models": {name: {} for name in names}, "timeouts": waits}
    return GatewayConfig.model_validate(
        {
            "upstreams": {"local": local},
            "authentication": "none",
            "tenants": {"default": {"most_urgent": -1000}},
            "state": _folder() / quote(names[0], safe=""),
            "request_timeout_s": _LONG_S,
            "max_body_mib": -(-max_body_bytes // 2**20),
            "retries": {"attempts": 1},
            "admission": {"max_running": _MOST, "max_waiting": 0},
            "cache": {"enabled": False},
        }
    )


def is_default(given: str) -> bool:
    """Whether ``default`` or ``default:NAME`` was given in place of a file; a file of that name is
    told by its whole path.
    """
    return given.partition(":")[0] == WORD


def config_of(word: str) -> GatewayConfig | None:
    """The settings whose ledger ``default`` or ``default:NAME`` means; None for any other word.

    Raises ConfigError if no server of that name, or none or several at all, have written one.
    """
    if not is_default(word):
        return None
    name = word.partition(":")[2]
    known = sorted(unquote(path.name) for path in _folder().glob("*") if path.is_dir())
    if not known:
        raise ConfigError("there is no ledger yet: `headrace serve MODEL --gateway default` begins one")
    told = ", ".join(f"{WORD}:{each}" for each in known)
    if not name and len(known) > 1:
        raise ConfigError(f"there are several ledgers; say which: {told}")
    name = name or known[0]
    if name not in known:
        raise ConfigError(f"there is no ledger of {name}; there is {told}")
    return default_config([name])


def _folder() -> Path:
    return cache_dir() / "gateway"
