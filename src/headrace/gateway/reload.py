"""Reading the configuration again while requests go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, StateError
from headrace.gateway.config import read_config

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway


async def reload(gateway: Gateway) -> None:
    """Read the gateway's file and go by it. Raises ConfigError or StateError, and nothing changes, if that
    cannot be.
    """
    if gateway.path is None:
        raise ConfigError("this gateway was not started from a file, so there is nothing to read again")
    try:
        served = () if gateway.local is None else gateway.local.names
        async with gateway.reloading:
            await gateway.reload(await asyncio.to_thread(read_config, gateway.path, served))
    except (ConfigError, StateError) as error:
        gateway.log.error("configuration refused; the one before stays", error=error.message)
        raise
    gateway.log.info("configuration reloaded", upstreams=sorted(gateway.upstreams))
