"""The journey's steps: a table. Each changes one thing of the server before it; a new one is a new line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LOSSY = ("--quantization", "--kv-cache-dtype")
"""Options of ``headrace serve`` that change numbers. All others give the same answers, bit by bit."""


@dataclass(frozen=True)
class Step:
    """``name`` is for tables, ``why`` one line of what changes.

    ``weights``: from here on, the ``float`` folder or the model's ``own`` file. ``options``: what is set from
    here on; None takes an option away again, True is a flag.
    """

    name: str
    why: str
    weights: Literal["float", "own"] | None = None
    options: Mapping[str, str | bool | None] = field(default_factory=dict)


BASELINE = Step("transformers", "model.generate behind a plain HTTP server, one request at a time")

STEPS = (
    Step("engine", "headrace's engine, the same bfloat16 weights, still one request at a time", "float",
         {"--max-num-seqs": "1", "--no-prefix-caching": True}),
    Step("continuous batching", "up to 32 requests share each step", None, {"--max-num-seqs": None}),
    Step("4-bit weights", "the checkpoint's own 4 bits, or int4 made while loading", "own",
         {"--quantization": "int4"}),
    Step("prefix caching", "the shared system prompt is computed once", None, {"--no-prefix-caching": None}),
    Step("speculation", "drafts by prompt lookup, verified", None,
         {"--speculative-config": '{"method": "ngram"}'}),
    Step("8-bit KV cache", "keys and values in one byte", None, {"--kv-cache-dtype": "int8"}),
)  # fmt: skip


@dataclass(frozen=True)
class Server:
    """What ``headrace serve`` is started with at a step."""

    model: Path
    options: Mapping[str, str | bool]

    def arguments(self) -> list[str]:
        """The options as a command line has them."""
        found = []
        for name, value in self.options.items():
            found += [name] if value is True else [name, str(value)]
        return found

    @property
    def numbers(self) -> tuple[Path, tuple[tuple[str, str], ...]]:
        """What its numbers depend on: equal for servers that answer the same."""
        return self.model, tuple((name, str(self.options[name])) for name in LOSSY if name in self.options)


def servers(
    steps: tuple[Step, ...], float_model: Path, own_model: Path, known: frozenset[str]
) -> list[tuple[Step, Server | str]]:
    """Each step with its server, or with the reason why it is left out.

    ``known``: the options that ``headrace serve`` has. A file that is quantised already keeps its format.
    """
    model = float_model
    settings: dict[str, str | bool] = {}
    found: list[tuple[Step, Server | str]] = []
    for step in steps:
        wanted = dict(step.options)
        if step.weights == "own" and own_model != float_model:
            wanted.pop("--quantization", None)
        unknown = [name for name in wanted if name not in known]
        if unknown:
            found.append((step, f"headrace serve has no {', '.join(unknown)}"))
            continue
        if step.weights is not None:
            model = float_model if step.weights == "float" else own_model
        for name, value in wanted.items():
            settings.pop(name, None)
            if value is not None:
                settings[name] = value
        found.append((step, Server(model, dict(settings))))
    return found


def serve_options() -> frozenset[str]:
    """The options of ``headrace serve``, as it has them in this version."""
    from typer.main import get_group

    from headrace.cli.main import app

    group = get_group(app)
    command = group.get_command(group.make_context("headrace", ["serve"], resilient_parsing=True), "serve")
    assert command is not None
    return frozenset(name for option in command.params for name in [*option.opts, *option.secondary_opts])
