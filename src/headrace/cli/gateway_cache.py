"""headrace gateway cache: what is kept, and forgetting it."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli.gateway_shared import AsJson, Config, read, table
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.gateway.answers import AnswerCache

app = typer.Typer(no_args_is_help=True, help="Show what the caches keep, and clear them.")


@app.command()
def stats(
    config: Config,
    as_json: AsJson = False,
) -> None:
    """Show how much is kept of each tenant's and model's answers."""
    with _cache(config) as cache:
        held = cache.held()
    if as_json:
        json.dump([asdict(row) for row in held], sys.stdout, indent=2)
        print()
        return
    rows = [
        (
            row.kind,
            row.tenant,
            row.model,
            str(row.entries),
            str(row.questions),
            f"{row.size_bytes / 2**20:.2f}",
        )
        for row in held
    ]
    table(("kind", "tenant", "model", "entries", "questions", "MiB"), rows)


@app.command()
def clear(
    config: Config,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    kind: Annotated[
        Literal["answer", "embedding"] | None, typer.Option(help="Only answers, or only embeddings.")
    ] = None,
) -> None:
    """Forget answers and embeddings, all of them or some; a running gateway serves them no more."""
    with _cache(config) as cache:
        gone = cache.clear(tenant=tenant, model=model, kind=kind)
    print(f"forgot {gone} {'entry' if gone == 1 else 'entries'}")


@contextlib.contextmanager
def _cache(config: Path) -> Iterator[AnswerCache]:
    settings = read(config)
    from headrace.gateway.answers import AnswerCache

    if not settings.cache.enabled:
        raise ConfigError(f"{config} has no cache: `cache: {{enabled: false}}`")
    with contextlib.closing(AnswerCache(settings.state, settings.cache)) as cache:
        yield cache
