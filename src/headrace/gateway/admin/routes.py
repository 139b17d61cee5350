"""The admin API's routes. They run on the gateway's event loop and wait for nothing long."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request

from headrace.errors import ConfigError, NotFoundError
from headrace.gateway import fields, ledger
from headrace.gateway.admin import schemas
from headrace.gateway.answers import AnswerCache, Kind
from headrace.gateway.authenticate import app_scope
from headrace.gateway.config import Limits
from headrace.gateway.gateway import Gateway
from headrace.gateway.keys import Key, check_owner
from headrace.gateway.parse import share_scope
from headrace.gateway.releases.report import Report, report, summary
from headrace.gateway.releases.settings import Release
from headrace.gateway.releases.state import Event
from headrace.gateway.reload import reload
from headrace.gateway.shaping.settings import Template
from headrace.gateway.shaping.templates import Stored
from headrace.gateway.upstream import Upstream

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": schemas.Error, "description": "What was sent is wrong; `param` names the field."},
    401: {"model": schemas.Error, "description": "The admin API's key is missing or wrong."},
    404: {"model": schemas.Error, "description": "There is none of that name."},
    409: {"model": schemas.Error, "description": "The configuration, or what is under way, is against it."},
    413: {"model": schemas.Error, "description": "The body is too large."},
    415: {"model": schemas.Error, "description": "The body is compressed."},
}
router = APIRouter(responses=_REFUSALS)


def _gateway(request: Request) -> Gateway:
    found: Gateway = request.app.state.gateway
    return found


TheGateway = Annotated[Gateway, Depends(_gateway)]
Name = Annotated[str, Path(max_length=200)]


@router.get("/health")
async def health(gateway: TheGateway) -> schemas.Health:
    """Whether the gateway serves, and how much is under way."""
    admissions = gateway.admissions
    return schemas.Health(
        status=gateway.phase, requests_running=admissions.running, requests_waiting=admissions.waiting
    )


@router.get("/keys")
async def list_keys(
    gateway: TheGateway, tenant: Annotated[str | None, Query(max_length=128)] = None
) -> list[schemas.KeyInfo]:
    """All keys that were ever made, of one tenant or of all."""
    return [_info(key) for key in await gateway.keys.all() if tenant in (None, key.tenant)]


@router.post("/keys", status_code=201)
async def create_key(gateway: TheGateway, asked: schemas.NewKey) -> schemas.KeySecret:
    """Make a key. Its secret is told only now."""
    check_owner(gateway.config, asked.tenant, asked.app)
    key, secret = await gateway.keys.create(asked.tenant, asked.name, asked.app)
    return schemas.KeySecret(id=key.id, secret=secret)


@router.post("/keys/{key}/rotate")
async def rotate_key(gateway: TheGateway, key: Name) -> schemas.KeySecret:
    """Give a key a new secret; the old one ends at once."""
    return schemas.KeySecret(id=key, secret=await gateway.keys.rotate(key))


@router.delete("/keys/{key}")
async def revoke_key(gateway: TheGateway, key: Name) -> schemas.KeyInfo:
    """End a key for good."""
    await gateway.keys.revoke(key)
    return _info(next(known for known in await gateway.keys.all() if known.id == key))


@router.get("/tenants")
async def list_tenants(gateway: TheGateway) -> list[schemas.TenantUse]:
    """Every tenant's limits and what it uses of them now."""
    return [
        schemas.TenantUse(
            tenant=name,
            weight=tenant.weight,
            waiting=gateway.admissions.waiting_of(name),
            use=await _use(gateway, f"tenant:{name}", tenant.limits),
            apps=[await _use(gateway, app_scope(name, app), of.limits) for app, of in tenant.apps.items()],
            models=[
                await _use(gateway, share_scope(name, model), limits)
                for model, limits in tenant.model_limits.items()
            ],
        )
        for name, tenant in gateway.config.tenants.items()
    ]


@router.get("/usage")
async def usage(
    gateway: TheGateway,
    by: ledger.By = "tenant",
    days: Annotated[float | None, Query(ge=0, le=100_000)] = None,
    tenant: Annotated[str | None, Query(max_length=128)] = None,
) -> list[schemas.UsageSum]:
    """Sums over the ledger, the dearest group first."""
    since = 0.0 if days is None else time.time() - days * 86_400
    found = await ledger.usage(gateway.store, by, since=since, tenant=tenant)
    return [schemas.UsageSum(**asdict(row)) for row in found]


@router.get("/releases")
async def list_releases(gateway: TheGateway) -> list[schemas.ReleaseInfo]:
    """All releases: what serves, and what is on trial."""
    releases = gateway.releases
    await releases.tick()
    return [schemas.ReleaseInfo(**asdict(summary(name, *releases[name]))) for name in gateway.config.releases]


@router.get("/releases/{name:path}")
async def show_release(gateway: TheGateway, name: Name) -> Report:
    """The trial under way, or the last one, with its tests and the release's history."""
    release = _release(gateway, name)
    await gateway.releases.tick()
    history = await gateway.releases.book.history(name)
    return report(name, release, gateway.releases[name][1], history)


@router.post("/releases/{name:path}/start")
async def start(gateway: TheGateway, name: Name, asked: schemas.Start) -> schemas.ReleaseEvent:
    """Begin a canary, or an A/B test."""
    release = _release(gateway, name)
    return await _done(
        gateway, name, await gateway.releases.book.start(name, release, asked.version, asked.ab)
    )


@router.post("/releases/{name:path}/promote")
async def promote(gateway: TheGateway, name: Name, asked: schemas.Promote) -> schemas.ReleaseEvent:
    """Give the candidate, or the version named, all requests at once."""
    release = _release(gateway, name)
    return await _done(gateway, name, await gateway.releases.book.promote(name, release, asked.version))


@router.post("/releases/{name:path}/rollback")
async def roll_back(gateway: TheGateway, name: Name) -> schemas.ReleaseEvent:
    """End the trial for the stable version; without one, go back to the version before."""
    release = _release(gateway, name)
    return await _done(gateway, name, await gateway.releases.book.roll_back(name, release))


@router.get("/upstreams")
async def list_upstreams(gateway: TheGateway) -> list[schemas.UpstreamInfo]:
    """Every upstream's health and work."""
    return [_upstream_info(upstream) for upstream in gateway.upstreams.values()]


@router.post("/upstreams/{name:path}/drain")
async def drain(gateway: TheGateway, name: Name) -> schemas.UpstreamInfo:
    """Give an upstream nothing new; what it works on goes on. Until it is resumed, or the gateway ends."""
    return _set_drained(gateway, name, drained=True)


@router.post("/upstreams/{name:path}/resume")
async def resume(gateway: TheGateway, name: Name) -> schemas.UpstreamInfo:
    """Let a drained upstream work again."""
    return _set_drained(gateway, name, drained=False)


@router.post("/reload")
async def reload_configuration(gateway: TheGateway) -> schemas.Reloaded:
    """Read the configuration again. What is wrong with it is told, and then nothing changes."""
    await reload(gateway)
    config = gateway.config
    return schemas.Reloaded(
        upstreams=list(config.upstreams), tenants=list(config.tenants), releases=list(config.releases)
    )


@router.get("/templates")
async def list_templates(gateway: TheGateway) -> list[schemas.TemplateInfo]:
    """The last version of every template."""
    return [_template_info(stored) for stored in await gateway.templates.all()]


@router.get("/templates/{name:path}")
async def show_template(
    gateway: TheGateway, name: Name, version: Annotated[int | None, Query(ge=1, le=2**31)] = None
) -> schemas.TemplateWhole:
    """A template's text: of that version, or of the last one."""
    stored = await gateway.templates.get(name, version)
    return schemas.TemplateWhole(
        **_template_info(stored).model_dump(), template=stored.template.model_dump(exclude_defaults=True)
    )


@router.put("/templates/{name:path}")
async def put_template(
    gateway: TheGateway, name: Annotated[fields.Name, Path()], template: Template
) -> schemas.TemplateInfo:
    """Store a template: as a new version, unless the last one says the same."""
    version = await gateway.templates.put(name, template)
    return _template_info(await gateway.templates.get(name, version))


@router.delete("/templates/{name:path}")
async def remove_template(gateway: TheGateway, name: Name) -> schemas.Removed:
    """Forget all versions of a template. One that the file declares is back after the next reload."""
    return schemas.Removed(versions=await gateway.templates.remove(name))


@router.get("/cache")
async def cache(gateway: TheGateway) -> list[schemas.CacheHeld]:
    """What is kept of each tenant's and model's answers."""
    return [schemas.CacheHeld(**asdict(held)) for held in _cache(gateway).held()]


@router.post("/cache/clear")
async def clear_cache(
    gateway: TheGateway, tenant: str | None = None, model: str | None = None, kind: Kind | None = None
) -> schemas.Cleared:
    """Forget all answers, or those of a tenant, of a model, of a kind."""
    return schemas.Cleared(answers=_cache(gateway).clear(tenant=tenant, model=model, kind=kind))


def _cache(gateway: Gateway) -> AnswerCache:
    if gateway.cache is None:
        raise ConfigError("this gateway has no cache")
    return gateway.cache


def _template_info(stored: Stored) -> schemas.TemplateInfo:
    template = stored.template
    return schemas.TemplateInfo(
        name=stored.name,
        version=stored.version,
        created_at=stored.created_at,
        kind="chat" if template.text is None else "completion",
        variables=list(template.variables),
        tenants=None if template.tenants is None else sorted(template.tenants),
        stable_share=template.stable_share,
    )


def _info(key: Key) -> schemas.KeyInfo:
    return schemas.KeyInfo(**asdict(key))


async def _use(gateway: Gateway, scope: str, limits: Limits) -> schemas.ScopeUse:
    named = limits.model_dump(mode="json", exclude_defaults=True)
    return schemas.ScopeUse(scope=scope, limits=named, **asdict(await gateway.quotas.use(scope)))


def _release(gateway: Gateway, name: str) -> Release:
    release = gateway.config.releases.get(name)
    if release is None:
        known = ", ".join(gateway.config.releases) or "none"
        raise NotFoundError(f"there is no release {name}; there is: {known}")
    return release


async def _done(gateway: Gateway, name: str, event: Event) -> schemas.ReleaseEvent:
    await gateway.releases.tick()  # the next request is already served by it
    return schemas.ReleaseEvent(release=name, **asdict(event))


def _set_drained(gateway: Gateway, name: str, *, drained: bool) -> schemas.UpstreamInfo:
    upstream = gateway.upstreams.get(name)
    if upstream is None:
        raise NotFoundError(f"there is no upstream {name}; there is: {', '.join(gateway.upstreams)}")
    upstream.drained = drained
    gateway.log.warning("upstream drained" if drained else "upstream resumed", upstream=name)
    return _upstream_info(upstream)


def _upstream_info(upstream: Upstream) -> schemas.UpstreamInfo:
    config = upstream.config
    return schemas.UpstreamInfo(
        name=upstream.name,
        url=config.url,
        kind=config.kind,
        models=list(config.models),
        weight=config.weight,
        share=upstream.health.share(),
        state=upstream.state,
        others=upstream.others,
        resting=upstream.health.resting(),
        drained=upstream.drained,
        in_flight=upstream.in_flight,
        outstanding_tokens=upstream.outstanding_tokens,
    )
