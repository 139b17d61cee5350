"""Stage 1: whose request it is."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from headrace.errors import AuthenticationError, NotAllowedError
from headrace.gateway.config import Tenant
from headrace.gateway.keys import Key
from headrace.gateway.quotas import Scope

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway

OPEN_TENANT = "default"
"""Whose all requests are where no keys are asked for."""
OWN_TENANT = "(gateway)"
"""Whose the gateway's own requests are: no key can be of it, and no limit holds for it."""
_UNLIMITED = Tenant()


async def authenticate(gateway: Gateway, context: RequestContext) -> None:
    """Fill in tenant, app, key and limits. Raises AuthenticationError, NotAllowedError or StateError."""
    config = gateway.config
    if config.authentication == "none":
        _check_server_key(gateway, context)
        tenant = config.tenants.get(OPEN_TENANT, _UNLIMITED)
        context.weight = tenant.weight
        context.tenant, context.scopes = OPEN_TENANT, (Scope(f"tenant:{OPEN_TENANT}", tenant.limits),)
        return
    secret = _bearer(context)
    key = await gateway.keys.find(secret) if secret else None
    if key is None:
        raise AuthenticationError(
            "the API key is missing, wrong or revoked; send it as `Authorization: Bearer hr-…`"
        )
    found = config.tenants.get(key.tenant)
    if found is None:
        raise NotAllowedError(f"the key's tenant {key.tenant} is not in the gateway's configuration any more")
    context.tenant, context.app, context.key = key.tenant, key.app, key.id
    context.weight, context.scopes = found.weight, scopes_of(key, found)


def _bearer(context: RequestContext) -> str:
    """What the client sends as its key; empty if nothing."""
    scheme, _, secret = context.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def _check_server_key(gateway: Gateway, context: RequestContext) -> None:
    """The key of the server in this process is asked for here, since that server only ever sees ours."""
    key = None if gateway.local is None else gateway.local.api_key
    # compared in constant time, so that a wrong key teaches nothing about the right one
    if key is not None and not hmac.compare_digest(_bearer(context).encode(), key.encode()):
        raise AuthenticationError("the API key is missing or wrong; send it as `Authorization: Bearer <key>`")


def scopes_of(key: Key, tenant: Tenant) -> tuple[Scope, ...]:
    """Whose limits hold for a key's requests. Raises NotAllowedError if its app is not there any more."""
    of_tenant = Scope(f"tenant:{key.tenant}", tenant.limits)
    if not key.app:
        return of_tenant, Scope(f"key:{key.id}", tenant.key_limits)
    app = tenant.apps.get(key.app)
    if app is None:
        raise NotAllowedError(
            f"the key's app {key.app} is not in the gateway's configuration of {key.tenant} any more"
        )
    key_limits = tenant.key_limits if app.key_limits is None else app.key_limits
    return of_tenant, Scope(app_scope(key.tenant, key.app), app.limits), Scope(f"key:{key.id}", key_limits)


def app_scope(tenant: str, app: str) -> str:
    """The name under which an app's use is counted."""
    return f"app:{tenant}|{app}"
