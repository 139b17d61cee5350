"""Checks of an answer: exact, contains, regex, number, JSON by schema, and what a judge is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.errors import ConfigError

_NUMBER = re.compile(r"(?:(?<!\w)[-+])?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_MARKED = re.compile(r"####\s*\$?\s*([-+]?\d[\d,]*(?:\.\d+)?)")
_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class Rubric(BaseModel):
    """What a judge is asked: whether the answer keeps to ``rubric`` or, with ``at_least``, to give it a score
    from 1 to 10 by it, of which that is enough."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rubric: str = Field(min_length=1)
    at_least: int | None = Field(default=None, ge=1, le=10)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"rubric": value} if isinstance(value, str) else value


class Check(BaseModel):
    """What an answer must be: all that is given must hold.

    ``exact``: the whole answer, apart from white space around it. ``contains``: a part of it. ``regex``:
    found somewhere in it. ``number``: its last number, within ``tolerance``. ``json-schema``: the whole
    answer is JSON (a Markdown fence around it is allowed) and keeps to the schema. ``judge``: another model
    finds it good (:mod:`.judge`). ``ignore_case`` is for exact, contains and regex.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    exact: str | None = None
    contains: str | None = None
    regex: str | None = None
    number: float | None = Field(default=None, allow_inf_nan=False)
    tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="json-schema")
    judge: Rubric | None = None
    ignore_case: bool = False

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from None
        return value

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, value: dict[str, Any] | bool | None) -> dict[str, Any] | bool | None:
        if value is not None:
            try:
                _validator(value)
            except ConfigError as error:
                raise ValueError(error.message) from None
        return value

    @model_validator(mode="after")
    def _something(self) -> Check:
        given = (self.exact, self.contains, self.regex, self.number, self.json_schema, self.judge)
        if all(value is None for value in given):
            raise ValueError("a check needs one of exact, contains, regex, number, json-schema, judge")
        return self

    def passes(self, answer: str) -> bool:
        """Whether the answer is right, as far as that can be told without the judge."""
        text, fold = answer.strip(), self.ignore_case
        if self.exact is not None and _folded(text, fold) != _folded(self.exact.strip(), fold):
            return False
        if self.contains is not None and _folded(self.contains, fold) not in _folded(text, fold):
            return False
        if self.regex is not None and not re.search(self.regex, text, re.IGNORECASE if fold else 0):
            return False
        if self.number is not None:
            found = last_number(text)
            if found is None or abs(found - Fraction(self.number)) > Fraction(self.tolerance):
                return False
        return self.json_schema is None or self._is_valid_json(text)

    @cached_property
    def _schema(self) -> Any:
        assert self.json_schema is not None
        return _validator(self.json_schema)

    def _is_valid_json(self, text: str) -> bool:
        fenced = _FENCE.match(text)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        import referencing.exceptions

        try:
            return bool(self._schema.is_valid(value))
        except referencing.exceptions.Unresolvable as error:
            raise ConfigError(
                f"json-schema: {error.ref!r} is not within the schema; nothing is fetched."
            ) from None


def last_number(text: str) -> Fraction | None:
    """The last number in a text (``1,234.5`` and ``3/4`` too), exactly."""
    found = _NUMBER.findall(text)
    return _fraction(found[-1]) if found else None


def marked_number(text: str) -> Fraction | None:
    """The first number after ``####``, GSM8K's mark of a final answer."""
    found = _MARKED.search(text)
    return _fraction(found[1]) if found else None


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _folded(text: str, fold: bool) -> str:
    return text.casefold() if fold else text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _validator(schema: Mapping[str, Any] | bool) -> Any:
    """A validator that fetches nothing: references must lie within the schema."""
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise ConfigError("Checking JSON by schema needs jsonschema: pip install 'headrace[lab]'.") from None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"not a JSON schema: {error.message}") from None
    return kind(schema, registry=referencing.Registry())
