"""Prompt templates: stored by name, never changed, only followed by another version.

A value is data: it is put in where its variable stands, in one pass over the template's own text, and braces
in it mean nothing. What later stages see are the messages that came of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, InvalidRequestError, NotFoundError, StateError
from headrace.gateway.shaping.settings import PLACE, Template

if TYPE_CHECKING:
    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.store import Store, TemplateRow

_FIELDS = frozenset({"id", "version", "variables"})
_MOST_VERSION = 2**31


@dataclass(frozen=True, slots=True)
class Stored:
    """A version of a template. ``created_at``: seconds since 1970."""

    name: str
    version: int
    created_at: float
    template: Template


class Templates:
    """The templates of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, name: str, template: Template) -> int:
        """The version that ``template`` is from now on: a new one, unless the last one says the same."""
        content = template.model_dump_json(exclude_defaults=True)
        return await self._store.put_template(name, content, lambda last: _read(last) == template)

    async def declare(self, config: GatewayConfig) -> None:
        """Put those of the file; each is a new version where it says something else than the last one.

        Raises ConfigError if the store cannot be written.
        """
        try:
            for name, template in config.templates.items():
                await self.put(name, template)
        except StateError as error:
            raise ConfigError(f"the templates cannot be stored: {error.message}") from None

    async def find(self, name: str, version: int | None = None) -> Stored | None:
        """That version, or the last one; None if there is none."""
        row = await self._store.template(name, version)
        return None if row is None else _stored(row)

    async def get(self, name: str, version: int | None = None) -> Stored:
        """:meth:`find`, for those who manage them. Raises NotFoundError."""
        found = await self.find(name, version)
        if found is None:
            which = "" if version is None else f" with a version {version}"
            known = ", ".join(stored.name for stored in await self.all()) or "none"
            raise NotFoundError(f"there is no template {name}{which}; there is: {known}")
        return found

    async def all(self) -> list[Stored]:
        """The last version of each, by name."""
        return [_stored(row) for row in await self._store.all_templates()]

    async def remove(self, name: str) -> int:
        """Forget all versions of a template; how many there were. Raises NotFoundError if there is none."""
        gone = await self._store.remove_template(name)
        if not gone:
            raise NotFoundError(f"there is no template {name}")
        return gone


def _stored(row: TemplateRow) -> Stored:
    name, version, created_at, content = row
    return Stored(name, version, created_at, _read(content))


@functools.lru_cache(maxsize=512)
def _read(content: str) -> Template:
    return Template.model_validate_json(content)


async def fill(
    templates: Templates, body: dict[str, Any], *, chat: bool, tenant: str, most_bytes: int
) -> str:
    """Put the template that the request's ``prompt`` refers to in its place; ``name@version`` of it.

    ``prompt`` is an object with ``id``, ``version`` (the last one, if it is not given) and ``variables``.
    In a chat the template's messages come before the request's own. Raises NotFoundError, or
    InvalidRequestError that names what is wrong.
    """
    asked: dict[str, Any] = body["prompt"]
    if unknown := asked.keys() - _FIELDS:
        raise _wrong(f"`{min(unknown)[:100]}` is not known here; send `id`, `version` and `variables`")
    name, version = asked.get("id"), _version(asked.get("version"))
    if not isinstance(name, str):
        raise _wrong("`id`: the template's name, as a string")
    stored = await templates.find(name, version)
    if stored is None or not (stored.template.tenants is None or tenant in stored.template.tenants):
        which = "" if version is None else f" with a version {version}"
        message = f"there is no template `{name[:200]}`{which} here, or not for this key"
        raise NotFoundError(message, param="prompt")
    template = stored.template
    values = _values(template, asked.get("variables"))
    if chat != (template.text is None):
        where = "chats" if template.text is None else "completions"
        raise _wrong(f"the template `{name}` is for {where}")
    if rendered_bytes(template.texts, values) > most_bytes:
        raise _wrong(f"with these variables the template `{name}` has over {most_bytes} bytes")
    if template.messages is None:
        assert template.text is not None
        body["prompt"] = render(template.text, values)
    else:
        del body["prompt"]
        own = body.get("messages", [])
        if not isinstance(own, list):
            raise InvalidRequestError("`messages`: a list of messages", param="messages")
        begin = [{"role": m.role, "content": render(m.content, values)} for m in template.messages]
        body["messages"] = begin + own
    return f"{stored.name}@{stored.version}"


def render(text: str, values: Mapping[str, str]) -> str:
    """``text`` with each variable's value in its place."""
    return PLACE.sub(lambda found: values[found[1]], text)


def rendered_bytes(texts: tuple[str, ...], values: Mapping[str, str]) -> int:
    """How long they are going to be, in UTF-8, before any of it is made."""
    sizes = {name: len(value.encode("utf-8", "surrogatepass")) for name, value in values.items()}
    return sum(len(text.encode()) + sum(sizes[found[1]] for found in PLACE.finditer(text)) for text in texts)


def _version(asked: object) -> int | None:
    """Of a request, as a number or, as OpenAI has it, as a string."""
    if asked is None:
        return None
    if isinstance(asked, str) and asked.isascii() and asked.isdecimal() and len(asked) <= 10:
        asked = int(asked)
    if type(asked) is not int or not 1 <= asked <= _MOST_VERSION:
        raise _wrong("`version`: a whole number from 1 on, or leave it out for the last one")
    return asked


def _values(template: Template, given: object) -> dict[str, str]:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise _wrong("`variables`: an object of names and texts")
    if unknown := given.keys() - template.variables.keys():
        known = ", ".join(template.variables) or "none"
        raise _wrong(f"the template has no variable `{min(unknown)[:100]}`; it has: {known}")
    values = {}
    for name, variable in template.variables.items():
        value = given.get(name, variable.default)
        if value is None:
            raise _wrong(f"the variable `{name}` is missing")
        if not isinstance(value, str):
            raise _wrong(f"the variable `{name}` must be a string")
        if wrong := variable.problem(value):
            raise _wrong(f"the variable `{name}` {wrong}")
        values[name] = value
    return values


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`prompt`: {message}", param="prompt")
