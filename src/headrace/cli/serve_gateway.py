"""The gateway inside headrace serve: its file, checked before a model is loaded, and how it gets in front."""

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

INSTEAD = {
    "--api-key": "its clients have keys of `headrace gateway keys create`",
    "--gateway-credential": "it trusts the gateway in its own process and no other",
    "--checkpoint-path": "a gateway's requests end with it; keep them behind `headrace gateway run`",
}
"""Options that do not go with a gateway, and what there is in their place."""


@dataclass(frozen=True, slots=True)
class GatewayInFront:
    """A gateway to be. ``credential``: what it and the server share; ``admin``: its admin API's socket."""

    path: Path
    config: GatewayConfig
    names: tuple[str, ...]
    credential: str
    admin: socket.socket | None

    def maker(self, log: FilteringBoundLogger) -> Callable[[ASGIApp], Embedded]:
        """What makes the gateway before an application. That raises ConfigError for state of no use."""

        def make(server: ASGIApp) -> Embedded:
            from headrace.gateway.embedded import Embedded
            from headrace.gateway.gateway import Gateway
            from headrace.gateway.local import LocalServer

            local = LocalServer(server, self.names, self.credential)
            return Embedded(Gateway(self.config, log, self.path, local), server, self.admin)

        return make

    @property
    def with_keys(self) -> bool:
        """Whether clients need keys."""
        return self.config.authentication == "keys"

    def announce(self) -> None:
        """Say where the admin API is, if there is one."""
        if self.admin is not None and self.config.admin is not None:
            from headrace.web.listen import address_of

            print(
                f"Admin API on {address_of(self.config.admin.host, self.admin.getsockname()[1])}", flush=True
            )


def gateway_in_front(path: Path, names: tuple[str, ...], given: Mapping[str, str | None]) -> GatewayInFront:
    """Read the gateway's file. ``names``: of the model. ``given``: the options in :data:`INSTEAD`.

    Raises ConfigError where one is used, and for what is wrong with the file or with a name.
    """
    for option, instead in INSTEAD.items():
        if given[option] is not None:
            raise ConfigError(f"{option} does not go with --gateway: {instead}")
    from headrace.cli.gateway_shared import read
    from headrace.web.listen import listen

    config = read(path, names)
    admin = None
    if config.admin is not None:
        admin = listen(config.admin.host, config.admin.port, config.write_timeout_s)
    return GatewayInFront(path, config, names, secrets.token_hex(16), admin)
