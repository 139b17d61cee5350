"""headrace gateway templates: prompts that requests refer to by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.cli.gateway_shared import AsJson, Config, date, read, table, with_store
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.shaping.settings import Template
    from headrace.gateway.shaping.templates import Templates
    from headrace.gateway.store import Store

T = TypeVar("T")
app = typer.Typer(no_args_is_help=True, help="Store prompts by name, list, show, try and remove them.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The template's name.")]
Version = Annotated[int | None, typer.Option(min=1, help="Which version; the last one by default.")]


@app.command()
def put(
    config: Config,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The template: YAML or JSON.")],
) -> None:
    """Store FILE under NAME: as a new version, unless the last one says the same."""
    from headrace.gateway.shaping.settings import Template
    from headrace.yaml_file import read_yaml

    template = read_yaml(file, Template)
    _check_name(name)
    version = _with_templates(read(config), lambda templates: templates.put(name, template))
    print(f"{name}@{version}")


@app.command(name="list")
def list_templates(config: Config, as_json: AsJson = False) -> None:
    """Show the last version of every template, and how much of its text comes before the first variable."""
    found = _with_templates(read(config), lambda templates: templates.all())
    if as_json:
        rows = [
            {"name": stored.name, "version": stored.version, "created_at": stored.created_at}
            | {"stable_share": stored.template.stable_share, "template": _plain(stored.template)}
            for stored in found
        ]
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    table(
        ("name", "version", "created", "for", "stable", "variables"),
        [
            (
                stored.name,
                str(stored.version),
                date(stored.created_at),
                "chats" if stored.template.text is None else "completions",
                f"{stored.template.stable_share:.0%}",
                ", ".join(stored.template.variables) or "-",
            )
            for stored in found
        ],
    )


@app.command()
def show(config: Config, name: Name, version: Version = None) -> None:
    """Print a template as it may be put again."""
    stored = _with_templates(read(config), lambda templates: templates.get(name, version))
    print(json.dumps(_plain(stored.template), indent=2, ensure_ascii=False))


@app.command()
def render(
    config: Config,
    name: Name,
    variables: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=TEXT", help="A variable's value; repeatable.")
    ] = None,
    version: Version = None,
) -> None:
    """Print what a request with these variables would be made of, as JSON."""
    from headrace.gateway.shaping.templates import fill

    values = {}
    for given in variables or ():
        variable, sign, text = given.partition("=")
        if not sign:
            raise ConfigError(f"--set {given}: write it like --set {given}=TEXT")
        values[variable] = text
    settings = read(config)

    async def filled(templates: Templates) -> dict[str, object]:
        stored = await templates.get(name, version)
        tenant = min(stored.template.tenants or {""})
        body: dict[str, object] = {"prompt": {"id": name, "version": stored.version, "variables": values}}
        most = settings.max_body_mib * 2**20
        await fill(templates, body, chat=stored.template.text is None, tenant=tenant, most_bytes=most)
        return body

    print(json.dumps(_with_templates(settings, filled), indent=2, ensure_ascii=False))


@app.command()
def remove(config: Config, name: Name) -> None:
    """Forget all versions of a template. One that CONFIG declares comes back."""
    gone = _with_templates(read(config), lambda templates: templates.remove(name))
    print(f"forgot {gone} {'version' if gone == 1 else 'versions'} of {name}")


def _plain(template: Template) -> dict[str, object]:
    return template.model_dump(mode="json", exclude_defaults=True)


def _check_name(name: str) -> None:
    from pydantic import TypeAdapter, ValidationError

    from headrace.gateway import fields

    try:
        TypeAdapter(fields.Name).validate_python(name)
    except ValidationError:
        raise ConfigError(
            f"{name}: a name begins with a letter or digit and has only A-Z a-z 0-9 . _ : / -"
        ) from None


def _with_templates(settings: GatewayConfig, work: Callable[[Templates], Awaitable[T]]) -> T:
    """What ``work`` makes of a gateway's templates, those that its file declares included."""
    from headrace.gateway.shaping.templates import Templates

    async def declared(store: Store) -> T:
        templates = Templates(store)
        await templates.declare(settings)
        return await work(templates)

    return with_store(settings, declared)
