"""Stage 1: whose request it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import AuthenticationError, NotAllowedError
from headrace.gateway.config import Tenant

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway

OPEN_TENANT = "default"
"""Whose all requests are where no keys are asked for."""
OWN_TENANT = "(gateway)"
"""Whose the gateway's own requests are: no key can be of it, and no limit holds for it."""


async def authenticate(gateway: Gateway, context: RequestContext) -> None:
    """Fill in tenant, key and limits. Raises AuthenticationError or NotAllowedError."""
    config = gateway.config
    if config.authentication == "none":
        tenant = config.tenants.get(OPEN_TENANT, Tenant())
        context.tenant, context.limits = OPEN_TENANT, tenant.limits
        return
    scheme, _, secret = context.headers.get("authorization", "").partition(" ")
    key = gateway.keys.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise AuthenticationError(
            "the API key is missing, wrong or revoked; send it as `Authorization: Bearer hr-…`"
        )
    found = config.tenants.get(key.tenant)
    if found is None:
        raise NotAllowedError(f"the key's tenant {key.tenant} is not in the gateway's configuration any more")
    context.tenant, context.key = key.tenant, key.id
    context.limits, context.key_limits = found.limits, found.key_limits
