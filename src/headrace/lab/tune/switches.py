"""What can be switched: every switch declares its candidates and the serve options that they become."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError

Config = dict[str, str]
"""Switch to the label of its choice: one point of the space."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the candidates may depend on.

    ``options``: the serve options that the server knows and that are not fixed, with their defaults.
    ``cores`` that it may use. ``float_weights``: the checkpoint has weights to narrow. ``users``: requests
    that run at once at most, None in an open loop.
    """

    options: Mapping[str, Any]
    cores: int
    float_weights: bool
    users: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate. ``options``: serve options by long name; none where the server's default is meant.

    ``evaluated_as``: fields of ``lab.evaluate.evaluation.Settings`` that make the same change there. A choice
    that has any can change answers, and the accuracy gate looks at it before it is tried.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluated_as: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Switch:
    """``needs``: the serve options without which it is not offered. ``choices``: the default first; a switch
    with only one is not offered either.
    """

    name: str
    needs: tuple[str, ...]
    choices: Callable[[Subject], Sequence[Choice]]


@dataclass(frozen=True, slots=True)
class Dimension:
    """A switch as one search sees it; ``choices[0]`` is the default."""

    name: str
    choices: tuple[Choice, ...]

    def choice(self, label: str) -> Choice:
        """By its label."""
        return next(choice for choice in self.choices if choice.label == label)


def _numbers(option: str, wanted: Callable[[Subject], Sequence[int]]) -> Callable[[Subject], list[Choice]]:
    """Values of a numeric option; its default goes first, however it is written."""

    def choices(subject: Subject) -> list[Choice]:
        default = subject.options[option]
        others = [value for value in dict.fromkeys(wanted(subject)) if value != default]
        return [Choice(str(default)), *(Choice(str(value), {option: value}) for value in others)]

    return choices


def _threads(subject: Subject) -> list[Choice]:
    """Up to the cores: powers of two, and one core left to HTTP. The default takes them all."""
    cores = subject.cores
    fewer = {2**power for power in range(cores.bit_length()) if 2**power < cores}
    if cores > 2:
        fewer.add(cores - 1)
    return [
        Choice(f"{cores} (all)"),
        *(Choice(str(count), {"threads": count}) for count in sorted(fewer, reverse=True)),
    ]


def _sequences(subject: Subject) -> list[int]:
    """Around what the load asks for at once: more than that many never run."""
    if subject.users is None:
        return [8, 16, 64, 128]
    default = subject.options["max-num-seqs"]
    sizes = [2**power for power in range(12)]
    lower = [size for size in sizes if size < min(subject.users, default)][-3:]
    higher = [size for size in sizes if default < size < 2 * subject.users]
    return [*reversed(lower), *higher]


def _quantization(subject: Subject) -> list[Choice]:
    narrower = ("int8", "int4") if subject.float_weights else ()
    return [
        Choice("as shipped"),
        *(Choice(name, {"quantization": name}, {"quantization": name}) for name in narrower),
    ]


def _speculation(subject: Subject) -> list[Choice]:
    found = [Choice("off")]
    for tokens in (8, 4, 2):
        written = json.dumps({"method": "ngram", "num_speculative_tokens": tokens})
        found.append(Choice(f"ngram {tokens}", {"speculative-config": written}))
    return found


def _prefix_caching(subject: Subject) -> list[Choice]:
    return [Choice("on"), Choice("off", {"prefix-caching": False})]


def _engine(subject: Subject) -> list[Choice]:
    return [Choice("thread"), Choice("process", {"engine-process": True})]


SWITCHES: list[Switch] = [
    Switch("quantization", ("quantization",), _quantization),
    Switch("threads", ("threads",), _threads),
    Switch("max-num-seqs", ("max-num-seqs",), _numbers("max-num-seqs", _sequences)),
    Switch(
        "max-num-batched-tokens",
        ("max-num-batched-tokens",),
        _numbers("max-num-batched-tokens", lambda subject: (128, 2048, 256, 1024)),
    ),
    Switch("speculative-config", ("speculative-config",), _speculation),
    Switch("prefix-caching", ("prefix-caching",), _prefix_caching),
    Switch("engine-process", ("engine-process",), _engine),
]
"""The registry: a switch that is added here is searched. Those that move most go first."""


def space(
    subject: Subject, only: Sequence[str] | None = None, registry: Sequence[Switch] | None = None
) -> list[Dimension]:
    """What there is to search for ``subject``, of the switches named in ``only`` (default: all).

    Raises ConfigError for a name that is no switch, and when nothing is left to search.
    """
    registry = SWITCHES if registry is None else registry
    names = [switch.name for switch in registry]
    for name in only or ():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"--switches: {name!r} is no switch; {hint}")
    found, left_out = [], []
    for switch in registry:
        if only is not None and switch.name not in only:
            continue
        if any(option not in subject.options for option in switch.needs):
            left_out.append(f"{switch.name} is fixed or unknown to this server")
            continue
        choices = tuple(switch.choices(subject))
        if len(choices) > 1:
            found.append(Dimension(switch.name, choices))
        else:
            left_out.append(f"{switch.name} has no other value here than {choices[0].label}")
    if not found:
        raise ConfigError(f"there is nothing to search: {'; '.join(left_out) or 'no switch was named'}")
    return found


def default_config(dimensions: Sequence[Dimension]) -> Config:
    """Everything as the server does it unasked."""
    return {dimension.name: dimension.choices[0].label for dimension in dimensions}


def serve_options(dimensions: Sequence[Dimension], config: Config) -> dict[str, Any]:
    """The serve options of a configuration, by long name; those at their default are left out."""
    found: dict[str, Any] = {}
    for dimension in dimensions:
        found |= dimension.choice(config[dimension.name]).options
    return found


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Serve options as arguments of ``headrace serve``."""
    found = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", str(value)]
    return found


def changes(dimensions: Sequence[Dimension], config: Config) -> str:
    """A configuration in words: what of it is not as the server does it unasked."""
    words = [
        f"{dimension.name}={config[dimension.name]}"
        for dimension in dimensions
        if config[dimension.name] != dimension.choices[0].label
    ]
    return ", ".join(words) or "defaults"
