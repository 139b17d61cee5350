"""The gateway inside headrace serve: its settings, which are checked first, and how it gets in front."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp
    from structlog.typing import FilteringBoundLogger

    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.embedded import Embedded

_KEY = "--api-key"
INSTEAD = {
    _KEY: "its clients have keys of `headrace gateway keys create`",
    "--gateway-credential": "it trusts the gateway in its own process and no other",
    "--checkpoint-path": "a gateway's requests end with it; keep them behind `headrace gateway run`",
}
"""Options that do not go with a gateway, and what there is in their place."""


@dataclass(frozen=True, slots=True)
class GatewayInFront:
    """A gateway to be. ``path``: of its file, if it has one; ``credential``: what it and the server share;
    ``api_key``: what the server asks clients for, where the gateway has no keys; ``admin``: its admin API's
    socket.
    """

    path: Path | None
    config: GatewayConfig
    names: tuple[str, ...]
    credential: str
    api_key: str | None
    admin: socket.socket | None

    def maker(self, log: FilteringBoundLogger) -> Callable[[ASGIApp], Embedded]:
        """What makes the gateway before an application. That raises ConfigError for state of no use."""

        def make(server: ASGIApp) -> Embedded:
            from headrace.gateway.embedded import Embedded
            from headrace.gateway.gateway import Gateway
            from headrace.gateway.local import LocalServer

            local = LocalServer(server, self.names, self.credential, self.api_key)
            return Embedded(Gateway(self.config, log, self.path, local), server, self.admin)

        return make

    @property
    def with_keys(self) -> bool:
        """Whether clients need keys."""
        return self.config.authentication == "keys" or self.api_key is not None

    def announce(self) -> None:
        """Say where the admin API is, if there is one."""
        if self.admin is not None and self.config.admin is not None:
            from headrace.web.listen import address_of

            print(
                f"Admin API on {address_of(self.config.admin.host, self.admin.getsockname()[1])}", flush=True
            )


def gateway_in_front(
    given: str, names: tuple[str, ...], options: Mapping[str, str | None], max_body_bytes: int
) -> GatewayInFront:
    """Read the gateway's settings: ``given`` is a file, or the word for those that need none.

    ``names``: of the model. ``options``: those in :data:`INSTEAD`. ``max_body_bytes``: of a request, where no
    file says it. Raises ConfigError where one of the options is used that must not be, and for what is wrong
    with the file or with a name.
    """
    from headrace.gateway.default import WORD, default_config

    for option, instead in INSTEAD.items():
        if options[option] is not None and (given, option) != (WORD, _KEY):
            raise ConfigError(f"{option} does not go with --gateway: {instead}")
    credential = secrets.token_hex(16)
    if given == WORD:
        config = default_config(names, max_body_bytes=max_body_bytes)
        return GatewayInFront(None, config, names, credential, options[_KEY], None)
    from headrace.gateway.config import read_config
    from headrace.web.listen import listen

    config = read_config(Path(given), names)
    admin = None
    if config.admin is not None:
        admin = listen(config.admin.host, config.admin.port, config.write_timeout_s)
    return GatewayInFront(Path(given), config, names, credential, None, admin)
