"""headrace gateway templates: prompts that requests refer to by name."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.gateway_shared import AsJson, Config, date, opened, read, table
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.gateway.shaping.settings import Template
    from headrace.gateway.shaping.templates import Templates

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
    with _templates(config) as templates:
        _check_name(name)
        version = templates.put(name, template)
    print(f"{name}@{version}")


@app.command(name="list")
def list_templates(config: Config, as_json: AsJson = False) -> None:
    """Show the last version of every template, and how much of its text comes before the first variable."""
    with _templates(config) as templates:
        found = templates.all()
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
    with _templates(config) as templates:
        print(json.dumps(_plain(templates.get(name, version).template), indent=2, ensure_ascii=False))


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
    with _templates(config) as templates:
        stored = templates.get(name, version)
        tenant = min(stored.template.tenants or {""})
        body: dict[str, object] = {"prompt": {"id": name, "version": stored.version, "variables": values}}
        most = settings.max_body_mib * 2**20
        fill(templates, body, chat=stored.template.text is None, tenant=tenant, most_bytes=most)
    print(json.dumps(body, indent=2, ensure_ascii=False))


@app.command()
def remove(config: Config, name: Name) -> None:
    """Forget all versions of a template. One that CONFIG declares comes back."""
    with _templates(config) as templates:
        gone = templates.remove(name)
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


@contextlib.contextmanager
def _templates(config: Path) -> Iterator[Templates]:
    """The templates of a gateway, which may be running; those that its file declares are there."""
    settings = read(config)
    from headrace.gateway.shaping.templates import Templates

    with opened(settings) as store:
        templates = Templates(store)
        templates.declare(settings)
        yield templates
