"""headrace gateway reload and upstreams: what a running gateway does by its admin API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from headrace.cli.gateway_shared import AsJson, Config, read, table
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S = 30.0


def reload(config: Config) -> None:
    """Let the running gateway read CONFIG again; what is wrong in it is told, and then nothing changes."""
    told = _ask(config, "POST", "/reload")
    print(
        f"reloaded: upstreams {', '.join(told['upstreams'])}; tenants {', '.join(told['tenants']) or 'none'}"
    )


def upstreams(
    config: Config,
    drain: Annotated[str | None, typer.Option(metavar="NAME", help="Give this upstream nothing new.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="NAME", help="Let it work again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the running gateway's upstreams, their health and their work; drain one, or resume it."""
    for name, what in ((drain, "drain"), (resume, "resume")):
        if name is not None:
            _ask(config, "POST", f"/upstreams/{quote(name)}/{what}")
    found = _ask(config, "GET", "/upstreams")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        (
            upstream["name"],
            _state(upstream),
            f"{upstream['share']:.0%}",
            str(upstream["in_flight"]),
            str(upstream["outstanding_tokens"]),
            ", ".join(upstream["models"]),
        )
        for upstream in found
    ]
    table(("name", "state", "share", "requests", "tokens", "models"), rows)


def _state(upstream: dict[str, Any]) -> str:
    if upstream["drained"]:
        return "draining" if upstream["in_flight"] else "drained"
    if upstream["state"] in ("loading", "draining"):
        return str(upstream["state"])
    return "ejected" if not upstream["share"] else "resting" if upstream["resting"] else "ok"


def _ask(path: Path, method: str, route: str) -> Any:
    """What the admin API answers. Raises ConfigError if it says no, or is not there."""
    settings = read(path)
    from headrace.gateway.config import secret
    from headrace.web.listen import address_of

    admin = settings.admin
    if admin is None:
        raise ConfigError(f"{path} has no admin section, so its gateway has no admin API to ask")
    address = address_of(admin.host, admin.port)
    headers = {"authorization": f"Bearer {secret(admin.key_env, 'the key of the admin API')}"}
    request = urllib.request.Request(address + route, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError(_message(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no gateway's admin API answers on {address}: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the admin API answered with status {error.code}"
