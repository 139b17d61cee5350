"""YAML files of the user's, checked by pydantic; what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class FieldError(ValueError):
    """What a validator of several fields finds wrong with one of them; ``at`` is the way to it."""

    def __init__(self, message: str, *at: str) -> None:
        super().__init__(message)
        self.at = at


def read_yaml(path: Path, model: type[Model]) -> Model:
    """The file as a ``model``. Raises ConfigError with path, line, field and what is wrong with it."""
    root, content = parse_yaml(path)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        where = (*first["loc"], *(cause.at if isinstance(cause, FieldError) else ()))
        field = ".".join(str(part) for part in where) or "the file"
        raise ConfigError(f"{path}:{_line(root, where)}: {field}: {first['msg']}") from None


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
