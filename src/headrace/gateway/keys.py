"""API keys: made here, kept as hashes only."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, NotFoundError
from headrace.gateway.config import GatewayConfig

if TYPE_CHECKING:
    from headrace.gateway.store import Store

_SECRET = re.compile(r"hr-[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret. Times are seconds since 1970."""

    id: str
    tenant: str
    app: str
    name: str
    created_at: float
    rotated_at: float | None
    revoked_at: float | None


def check_owner(config: GatewayConfig, tenant: str, app: str) -> None:
    """Raises ConfigError if the configuration has no such tenant, or that no such app."""
    found = config.tenants.get(tenant)
    if found is None:
        known = ", ".join(sorted(config.tenants)) or "none yet"
        raise ConfigError(f"there is no tenant {tenant} in the configuration; it has: {known}")
    if app and app not in found.apps:
        known = ", ".join(sorted(found.apps)) or "none yet"
        raise ConfigError(f"the tenant {tenant} has no app {app}; it has: {known}")


class Keys:
    """The keys of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, tenant: str, name: str = "", app: str = "") -> tuple[Key, str]:
        """A new key and its secret, which nobody can read again. ``app``: of the tenant's, if it is one's."""
        key_id = f"key_{secrets.token_hex(6)}"
        key = Key(key_id, tenant, app, name, await self._store.now(), None, None)
        secret = _new_secret()
        await self._store.add_key(key, _hash(secret))
        return key, secret

    async def rotate(self, key_id: str) -> str:
        """A new secret for the key; the old one ends at once. Raises NotFoundError if there is no key."""
        secret = _new_secret()
        if not await self._store.rotate_key(key_id, _hash(secret), await self._store.now()):
            raise _no_key(key_id)
        return secret

    async def revoke(self, key_id: str) -> None:
        """End a key for good. Raises NotFoundError if there is no such key."""
        if not await self._store.revoke_key(key_id, await self._store.now()):
            raise _no_key(key_id)

    async def all(self) -> list[Key]:
        """Every key that was ever made, oldest first."""
        return await self._store.all_keys()

    async def find(self, secret: str) -> Key | None:
        """The key with this secret, unless it is revoked.

        Looked up by its hash, so that how long this takes teaches nothing. A fast hash is enough, because
        secrets are 256 random bits.
        """
        return await self._store.find_key(_hash(secret)) if _SECRET.fullmatch(secret) else None


def _no_key(key_id: str) -> NotFoundError:
    return NotFoundError(f"there is no key {key_id} that works; `headrace gateway keys list` shows all")


def _new_secret() -> str:
    return f"hr-{secrets.token_urlsafe(32)}"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
