"""API keys: made here, kept as hashes only."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass

from headrace.errors import ConfigError, NotFoundError
from headrace.gateway.config import GatewayConfig
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


_COLUMNS = "id, tenant, app, name, created_at, rotated_at, revoked_at"


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

    def create(self, tenant: str, name: str = "", app: str = "") -> tuple[Key, str]:
        """A new key and its secret, which nobody can read again. ``app``: of the tenant's, if it is one's."""
        key = Key(f"key_{secrets.token_hex(6)}", tenant, app, name, time.time(), None, None)
        secret = _new_secret()
        with self._store.transaction() as db:
            db.execute(
                "INSERT INTO keys (id, secret_hash, tenant, app, name, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                (key.id, _hash(secret), key.tenant, key.app, key.name, key.created_at),
            )
        return key, secret

    def rotate(self, key_id: str) -> str:
        """A new secret for the key; the old one ends at once. Raises NotFoundError if there is no key."""
        secret = _new_secret()
        self._change(key_id, "secret_hash = ?, rotated_at = ?", (_hash(secret), time.time()))
        return secret

    def revoke(self, key_id: str) -> None:
        """End a key for good. Raises NotFoundError if there is no such key."""
        self._change(key_id, "revoked_at = ?", (time.time(),))

    def all(self) -> list[Key]:
        """Every key that was ever made, oldest first."""
        rows = self._store.db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_at")
        return [Key(*row) for row in rows]

    def find(self, secret: str) -> Key | None:
        """The key with this secret, unless it is revoked.

        Looked up by its hash, so that how long this takes teaches nothing. A fast hash is enough, because
        secrets are 256 random bits.
        """
        if not _SECRET.fullmatch(secret):
            return None
        query = f"SELECT {_COLUMNS} FROM keys WHERE secret_hash = ? AND revoked_at IS NULL"
        row = self._store.db.execute(query, (_hash(secret),)).fetchone()
        return None if row is None else Key(*row)

    def _change(self, key_id: str, change: str, values: tuple[object, ...]) -> None:
        with self._store.transaction() as db:
            done = db.execute(
                f"UPDATE keys SET {change} WHERE id = ? AND revoked_at IS NULL", (*values, key_id)
            )
            if not done.rowcount:
                raise NotFoundError(
                    f"there is no key {key_id} that works; `headrace gateway keys list` shows all"
                )


def _new_secret() -> str:
    return f"hr-{secrets.token_urlsafe(32)}"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
