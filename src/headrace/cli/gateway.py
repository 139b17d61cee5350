"""headrace gateway: run, keys and usage; its other commands have files of their own."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from headrace.cli import (
    gateway_backup,
    gateway_cache,
    gateway_live,
    gateway_releases,
    gateway_route,
    gateway_templates,
)
from headrace.cli.gateway_shared import AsJson, Config, date, read, table, with_store
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.keys import Keys

app = typer.Typer(no_args_is_help=True, help="One address in front of many upstreams: keys, quotas, costs.")
keys_app = typer.Typer(no_args_is_help=True, help="Create, list, rotate and revoke API keys.")
app.add_typer(keys_app, name="keys")
app.add_typer(gateway_releases.app, name="releases")
app.add_typer(gateway_route.app, name="route")
app.command()(gateway_live.reload)
app.command()(gateway_live.upstreams)
app.add_typer(gateway_cache.app, name="cache")
app.add_typer(gateway_templates.app, name="templates")
app.command()(gateway_backup.backup)
app.command()(gateway_backup.restore)

T = TypeVar("T")
KeyId = Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as keys list shows it.")]


@app.command()
def run(
    config: Config,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of the file's.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port, instead of the file's; 0 picks a free one.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time for running requests on SIGTERM.")
    ] = 30.0,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least level that is logged.")
    ] = "info",
) -> None:
    """Serve requests by the upstreams of CONFIG. Logs are JSON lines on standard error."""
    settings = read(config)
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.run import run as run_gateway
    from headrace.observe.logs import logger
    from headrace.web.listen import address_of, listen

    gateway = Gateway(settings, logger(level=log_level), config)
    at = settings.host if host is None else host
    sock = listen(at, settings.port if port is None else port, settings.write_timeout_s)
    address = address_of(at, sock.getsockname()[1])

    admin = None
    if settings.admin is not None:
        admin = listen(settings.admin.host, settings.admin.port, settings.write_timeout_s)

    def announce() -> None:
        print(f"Gateway to {', '.join(sorted(settings.models))} on {address}", flush=True)
        if admin is not None and settings.admin is not None:
            print(f"Admin API on {address_of(settings.admin.host, admin.getsockname()[1])}", flush=True)

    run_gateway(gateway, sock, admin=admin, on_ready=announce, drain_timeout_s=drain_timeout)


@keys_app.command()
def create(
    config: Config,
    tenant: Annotated[str, typer.Option(help="Whose key it is: a tenant of CONFIG.")],
    app: Annotated[str, typer.Option(help="The tenant's app that it is for.")] = "",
    name: Annotated[str, typer.Option(help="To tell it from others.")] = "",
) -> None:
    """Make a key and print its secret, which nobody can read again."""
    settings = read(config)
    from headrace.gateway.default import is_default
    from headrace.gateway.keys import check_owner

    if is_default(str(config)):
        raise ConfigError(
            "the gateway without a file has no keys: it asks for the server's --api-key, if that is given; "
            "tenants and their keys need a file: headrace serve MODEL --gateway FILE"
        )

    check_owner(settings, tenant, app)
    key, secret = _with_keys(settings, lambda keys: keys.create(tenant, name, app))
    print(f"made {key.id} for {tenant}; its secret, shown only now:", file=sys.stderr)
    print(secret)


@keys_app.command(name="list")
def list_keys(
    config: Config,
    as_json: AsJson = False,
) -> None:
    """Show all keys, without their secrets."""
    found = _with_keys(read(config), lambda keys: keys.all())
    if as_json:
        json.dump([asdict(key) for key in found], sys.stdout, indent=2)
        print()
        return
    rows = [
        (
            key.id,
            key.tenant,
            key.app or "-",
            key.name,
            date(key.created_at),
            date(key.rotated_at),
            date(key.revoked_at),
        )
        for key in found
    ]
    table(("id", "tenant", "app", "name", "created", "rotated", "revoked"), rows)


@keys_app.command()
def rotate(config: Config, key: KeyId) -> None:
    """Give a key a new secret and print it; the old one ends at once."""
    print(_with_keys(read(config), lambda keys: keys.rotate(key)))


@keys_app.command()
def revoke(config: Config, key: KeyId) -> None:
    """End a key for good."""
    _with_keys(read(config), lambda keys: keys.revoke(key))
    print(f"revoked {key}")


@app.command()
def usage(
    config: Config,
    by: Annotated[
        Literal["tenant", "app", "key", "model", "upstream", "version", "route", "intent", "day"],
        typer.Option(help="What to sum over."),
    ] = "tenant",
    days: Annotated[
        float | None, typer.Option(min=0.0, help="Only requests that ended in the last so many days.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    as_json: AsJson = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the requests themselves: .csv, .jsonl or .parquet."),
    ] = None,
) -> None:
    """Sum up the ledger: requests, tokens, what they cost, and what cache and routes have saved."""
    settings = read(config)
    from headrace.gateway.export import export as write
    from headrace.gateway.ledger import usage as sums

    since = 0.0 if days is None else time.time() - days * 86_400
    if export is not None:
        count = with_store(settings, lambda store: write(store, export, since=since, tenant=tenant))
        print(f"wrote {count} requests to {export}")
        return
    found = with_store(settings, lambda store: sums(store, by, since=since, tenant=tenant))
    if as_json:
        json.dump([asdict(row) for row in found], sys.stdout, indent=2)
        print()
        return
    rows = [
        (
            row.group or "-",
            str(row.requests),
            str(row.failed),
            str(row.cache_hits),
            str(row.prompt_tokens),
            str(row.cached_tokens),
            str(row.completion_tokens),
            f"{row.cost_usd:.6f}",
            f"{row.baseline_usd:.6f}",
            f"{row.saved_by_cache_usd:.6f}",
            f"{row.saved_by_routing_usd:.6f}",
        )
        for row in found
    ]
    table(
        (
            by,
            "requests",
            "failed",
            "hits",
            "prompt",
            "cached",
            "completion",
            "USD",
            "baseline",
            "saved by cache",
            "by routing",
        ),
        rows,
    )


def _with_keys(settings: GatewayConfig, work: Callable[[Keys], Awaitable[T]]) -> T:
    from headrace.gateway.keys import Keys

    return with_store(settings, lambda store: work(Keys(store)))
