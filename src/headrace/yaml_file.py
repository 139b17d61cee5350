"""YAML files of the user's, checked by pydantic; what is wrong is named with its line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class FieldError(ValueError):
    """What a validator of several fields finds wrong with one of them; ``at`` is the way to it."""

    def __init__(self, message: str, *at: str) -> None:
        super().__init__(message)
        self.at = at


def read_yaml(path: Path, model: type[Model], unsaid: Mapping[str, Any] | None = None) -> Model:
    """The file as a ``model``; ``unsaid`` has values for what it does not say.

    Raises ConfigError with path, line, field and what is wrong with it.
    """
    root, content = parse_yaml(path)
    if unsaid and (content is None or isinstance(content, dict)):
        content = {**unsaid, **(content or {})}
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = _telling(error.errors())
        cause = first.get("ctx", {}).get("error")
        where = (*first["loc"], *(cause.at if isinstance(cause, FieldError) else ()))
        field = ".".join(str(part) for part in where) or "the file"
        said = first["msg"] + _meant(first, model)
        raise ConfigError(f"{path}:{_line(root, where)}: {field}: {said}") from None


def parse_yaml(path: Path) -> tuple[Any, Any]:
    """The file's nodes, which know their lines, and what it says. Raises ConfigError if it is no YAML."""
    import yaml

    try:
        text = path.read_text("utf-8")
        return yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {said}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` with the known name that is most like this one, or nothing if none is."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def _telling(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error; but a name that is no setting says more than that another one is missing."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    return unknown[0] if unknown and errors[0]["type"] == "missing" else errors[0]


def _meant(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    """The nearest name that would have been right, for a setting or a choice that there is not."""
    if error["type"] == "extra_forbidden":
        return nearest(str(error["loc"][-1]), _settings_at(model.model_json_schema(), error["loc"][:-1]))
    context = error.get("ctx", {})
    expected = re.findall(r"'([^']+)'", str(context.get("expected_tags") or context.get("expected", "")))
    given = context.get("tag", error.get("input"))
    return nearest(given, expected) if isinstance(given, str) else ""


def _settings_at(schema: dict[str, Any], location: tuple[int | str, ...]) -> list[str]:
    """The names of the settings that the object at ``location`` may have."""
    node = schema
    for part in location:
        node = _resolved(schema, node)
        branches = node.get("discriminator", {}).get("mapping", {})
        if part in branches:
            node = {"$ref": branches[part]}
        elif isinstance(part, int):
            node = node.get("items", {})
        else:
            rest = node.get("additionalProperties")
            node = node.get("properties", {}).get(part) or (rest if isinstance(rest, dict) else {})
    return list(_resolved(schema, node).get("properties", {}))


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """What a reference, or an optional one, refers to."""
    for branch in node.get("anyOf", []):
        if "$ref" in branch:
            node = branch
    name = node.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = schema.get("$defs", {}).get(name, node)
    return found


def _line(node: Any, location: tuple[int | str, ...]) -> int:
    """The line of the deepest node on the way to ``location`` that the file has."""
    import yaml

    line = 1 if node is None else node.start_mark.line + 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                continue  # pydantic names unions' branches as well
            key, node = found[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return int(line)
