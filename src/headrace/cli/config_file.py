"""A file of options for headrace serve: YAML, checked against the command's own signature."""

from __future__ import annotations

import difflib
import inspect
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headrace.cli import options
from headrace.errors import ConfigError

_OTHER_NAMES = {"engine-thread": ("engine-process", False)}
"""Long names that turn a flag off and are not ``no-`` and its name."""
_NOT_IN_FILES = {"config"}
_SIZES = {"kv-cache-memory", "max-body-size"}


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command. ``parameter`` is its name in Python, ``kind`` the type of its value, and
    ``info`` what typer was told of it.
    """

    parameter: str
    kind: Any
    info: Any
    default: Any


def options_of(command: Callable[..., None]) -> dict[str, Option]:
    """The options of a typer command by their long names; its argument as well."""
    found = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = hints[name], None
        if get_origin(kind) is Annotated:
            kind, info, *_ = get_args(kind)
        found[name.replace("_", "-")] = Option(name, kind, info, parameter.default)
    return {name: option for name, option in found.items() if name not in _NOT_IN_FILES}


def read_options(path: Path, command: Callable[..., None], title: str) -> dict[str, Any]:
    """The file's values by the parameters of ``command``, which ``title`` names in messages.

    Names are long options, with dashes or underscores. Raises ConfigError that names the line of a mistake.
    """
    from headrace.lab.evaluate.yaml_file import parse_yaml

    root, content = parse_yaml(path)
    if content is None:
        raise ConfigError(f"{path} is empty: it needs options of {title}, such as `max-num-seqs: 16`")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no list of options: write one a line, such as `max-num-seqs: 16`")
    known = options_of(command)
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, _ in root.value:
        line = key.start_mark.line + 1
        where, name = f"{path}, line {line}", str(key.value).replace("_", "-")
        flag, value = _resolved(name, content.get(key.value), known, where)
        if flag not in known:
            raise ConfigError(f"{where}: {key.value} is not an option of {title}{_nearest(name, known)}")
        if flag in values:
            raise ConfigError(f"{where}: {flag} is given already in line {lines[flag]}")
        lines[flag] = line
        values[flag] = _plain(flag, value, where)
    _check(values, known, path, lines)
    return {known[name].parameter: value for name, value in values.items() if value is not None}


def given_options(command: Callable[..., None], text: str, title: str) -> dict[str, Any]:
    """The options that the line ``text`` gives to ``command``, itself or by a --config file, by long name.

    Raises ConfigError, which ``title`` begins, for what the command would not take.
    """
    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    parser: Any = typer.main.get_command(alone)
    try:
        context = parser.make_context(title, shlex.split(text))
    except options.MISUSE as error:
        raise ConfigError(f"{title}: {' '.join(error.format_message().split())}") from None
    except ValueError as error:  # a quote that is never closed
        raise ConfigError(f"{title}: {text!r}: {error}") from None
    except typer.Exit:
        raise ConfigError(f"{title}: {text!r} asks for help, not for options") from None
    return {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in context.params.items()
        if name not in _NOT_IN_FILES
        and context.get_parameter_source(name).name in ("COMMANDLINE", "DEFAULT_MAP")
    }


def _resolved(name: str, value: Any, known: dict[str, Option], where: str) -> tuple[str, Any]:
    """A name that switches something off as the name of what it switches, and its value."""
    flag, turned = _OTHER_NAMES.get(name, (name, True))
    if name.startswith("no-") and known.get(name[3:]) and known[name[3:]].kind is bool:
        flag, turned = name[3:], False
    if flag == name:
        return name, value
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is true or false, not {value!r}")
    return flag, value == turned


def _nearest(name: str, known: dict[str, Option]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; `headrace serve --help` lists them"


def _plain(name: str, value: Any, where: str) -> Any:
    """The value as the command line has it, where people may write it more simply."""
    if name == "served-model-name" and isinstance(value, str):
        return [value]
    if name in _SIZES and value is not None:
        options.size_bytes(str(value), f"{where}: {name}")
        return str(value)
    if name == "speculative-config" and value is not None:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        try:
            options.speculative_config(text)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
        return text
    return value


def _check(values: dict[str, Any], known: dict[str, Option], path: Path, lines: dict[str, int]) -> None:
    from pydantic import ConfigDict, Field, ValidationError, create_model

    fields: dict[str, Any] = {}
    for option in known.values():
        bounds = {"ge": getattr(option.info, "min", None), "le": getattr(option.info, "max", None)}
        limited = Field(None, **{name: bound for name, bound in bounds.items() if bound is not None})
        fields[option.parameter] = (option.kind | None, limited)
    model = create_model("Options", __config__=ConfigDict(strict=True, protected_namespaces=()), **fields)
    try:
        model.model_validate({known[name].parameter: value for name, value in values.items()})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        wrong = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(
            f"{path}, line {lines[name]}: {name}: {wrong}, but it is {first['input']!r}"
        ) from None
