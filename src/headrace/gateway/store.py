"""What a gateway may not forget: keys, quotas, ledger, releases, templates. Two stores keep one protocol.

SQLite (:mod:`~headrace.gateway.stores.sqlite`) is one gateway's own file; Redis
(:mod:`~headrace.gateway.stores.redis`) is shared by several. Nothing outside of ``stores`` knows which it is.
Every method is all or nothing, whatever others do at the same time, and raises StateError where the store
cannot be reached, read or written.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.keys import Key
    from headrace.gateway.ledger import Answered, Entry
    from headrace.gateway.quotas import Held, Refused, Reservation, Scope, Use
    from headrace.gateway.releases.book import PastEvent
    from headrace.gateway.releases.state import Event

Change = Callable[["bytes | None", float], "tuple[bytes, Event | None]"]
"""Makes a release's next state of what it was (None: nothing ever happened) and the time, and says what its
history is to say. It may be called again, if another was quicker; what it raises changes nothing.
"""

TemplateRow = tuple[str, int, float, str]
"""A version of a template: its name, number, when it was put, and what it says."""


class Store(Protocol):
    """The state of one or several gateways. Times are seconds since 1970, by the store's clock."""

    @property
    def where(self) -> str:
        """What messages call it: no secrets."""

    async def open(self) -> None:
        """Make it ready. Raises ConfigError if it cannot be used, or was written by a newer headrace."""

    async def aclose(self) -> None:
        """Let go of it; also of one that could not be opened."""

    async def now(self) -> float:
        """The time. Of Redis, all gateways have the same."""

    # quotas
    async def hold(self, made: Reservation, scopes: Sequence[Scope], lease_s: float) -> Held | Refused:
        """Reserve ``made`` for all scopes or for none, until ``lease_s`` from now; what is older has ended.

        For scopes that it is reserved for already, nothing happens.
        """

    async def settle(
        self, reservation: Reservation, tokens: int, nano_usd: int, entries: Sequence[Entry]
    ) -> None:
        """Put what was used in the place of what was reserved, and append ``entries`` to the ledger. The last
        one is the request's own.

        It may be called again after it has failed or was cancelled: it is done once, and what the lease's end
        gave back counts all the same. ``reservation.settled`` says that it is certainly done.
        """

    async def renew(self, requests: Sequence[str], lease_s: float) -> None:
        """Hold reservations for ``lease_s`` from now; those that have ended stay so."""

    async def use(self, scope: str) -> Use:
        """What is used and reserved of a scope now."""

    # keys
    async def add_key(self, key: Key, secret_hash: bytes) -> None:
        """Keep a new key."""

    async def rotate_key(self, key_id: str, secret_hash: bytes, at: float) -> bool:
        """Give a key another secret; False if no such key works."""

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """End a key; False if no such key works."""

    async def find_key(self, secret_hash: bytes) -> Key | None:
        """The key with this secret, unless it is revoked."""

    async def all_keys(self) -> list[Key]:
        """Every key that was ever made, oldest first."""

    # ledger
    def ledger(self, since: float) -> AbstractAsyncContextManager[sqlite3.Connection]:
        """The rows from ``since`` on, at least, as the table ``ledger`` of a database that is for reading."""

    async def score(self, tenant: str, request: str, score: float) -> Answered | None:
        """Keep a score for the tenant's last request of that id; None if there is none.

        Raises InvalidRequestError if it has one.
        """

    # releases
    async def release(self, name: str) -> bytes | None:
        """A release's state; None if nothing ever happened to it."""

    async def change_release(self, name: str, change: Change) -> tuple[bytes, Event | None]:
        """Let ``change`` make the next state; what it made."""

    async def history(self, name: str, most: int) -> list[PastEvent]:
        """What happened to a release, the last first."""

    # templates
    async def put_template(self, name: str, content: str, same: Callable[[str], bool]) -> int:
        """The version that ``content`` is from now on: a new one, unless the last one's is the ``same``."""

    async def template(self, name: str, version: int | None) -> TemplateRow | None:
        """That version, or the last one; None if there is none."""

    async def all_templates(self) -> list[TemplateRow]:
        """The last version of each, by name."""

    async def remove_template(self, name: str) -> int:
        """Forget all versions; how many there were."""

    async def back_up(self, to: Path) -> int:
        """Write all of it to a SQLite file that a gateway can be started on; how many bytes that are.

        The file has its name only once it is whole, checked and on the disk. Raises ConfigError if ``to``
        exists or cannot be written.
        """

    async def restore(self, source: Path) -> int:
        """Fill an empty store with such a file, of this version of headrace or an earlier one; how many rows
        its ledger has. Raises ConfigError if the store is not empty, or the file is not whole.
        """


def store_of(config: GatewayConfig) -> Store:
    """The store that a configuration names, not open yet. Raises ConfigError for a secret that is missing."""
    if config.store is None:
        from headrace.gateway.stores.sqlite import SqliteStore

        return SqliteStore(config.state)
    from headrace.gateway.stores.redis import RedisStore

    return RedisStore(config.store, config.store_password)
