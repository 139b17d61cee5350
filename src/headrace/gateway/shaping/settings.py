"""How requests are shaped, as the gateway's file and its admin API say it."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.gateway.fields import Count, Name, Positive, Strict, Variable

PLACE = re.compile(r"\{\{ {0,4}([A-Za-z_][A-Za-z0-9_]*) {0,4}\}\}")
"""Where a variable's value goes. Anything else between braces is text."""

_MOST_CHARACTERS = 48 * 2**10  # of a template: a request to the admin API has room for it

_Text = Annotated[str, Field(min_length=1, max_length=_MOST_CHARACTERS)]


class TemplateVariable(Strict):
    """A text that requests give. ``default``: where they do not. ``choices``: what else it may not be."""

    default: str | None = None
    max_chars: Count = 20_000
    choices: Annotated[tuple[str, ...], Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Self:
        if self.default is not None and (wrong := self.problem(self.default)):
            raise ValueError(f"the default {wrong}")
        return self

    def problem(self, value: str) -> str | None:
        """What is wrong with a value; None if nothing is."""
        if len(value) > self.max_chars:
            return f"has {len(value)} characters, and may have {self.max_chars}"
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        return None


class TemplateMessage(Strict):
    """One message, with ``{{name}}`` where a variable's value goes."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class Template(Strict):
    """The beginning of a chat (``messages``), or the prompt of a completion (``text``).

    ``variables`` names all that stand in it. ``tenants``: who may use it; everybody, where it is not given.
    """

    messages: Annotated[tuple[TemplateMessage, ...], Field(min_length=1, max_length=64)] | None = None
    text: _Text | None = None
    variables: Annotated[dict[Variable, TemplateVariable], Field(max_length=64)] = Field(default_factory=dict)
    tenants: frozenset[Name] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.messages is None) == (self.text is None):
            raise ValueError("a template has either messages or text")
        if sum(map(len, self.texts)) > _MOST_CHARACTERS:
            raise ValueError(f"a template may have {_MOST_CHARACTERS} characters")
        used = {name for text in self.texts for name in PLACE.findall(text)}
        if missing := sorted(used - self.variables.keys()):
            raise ValueError(f"{{{{{missing[0]}}}}} is in the text, but not among the variables")
        if unused := sorted(self.variables.keys() - used):
            raise ValueError(f"the variable {unused[0]} is nowhere in the text")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its text, in order."""
        if self.messages is None:
            return () if self.text is None else (self.text,)
        return tuple(message.content for message in self.messages)

    @property
    def stable_share(self) -> float:
        """The share of its text before the first variable: what prefix caches can have of every request."""
        whole = sum(map(len, self.texts))
        before = 0
        for text in self.texts:
            found = PLACE.search(text)
            before += len(text) if found is None else found.start()
            if found is not None:
                break
        return before / whole


_PART = """\
The text at the end is one part of a document that is too long to be read at once. Write down what in it \
matters for the task, and nothing else.

Task: {{task}}

Part {{number}} of {{count}}:
{{part}}"""
_MERGE = """\
{{task}}

The document was too long to be read at once. These are notes on its {{count}} parts, in their order:

{{notes}}"""


class DocumentPlan(Strict):
    """How a document that is too long for one request is read: in parts, whose answers are merged.

    ``models``: names under which requests are read so without asking for it. ``over_tokens``: prompt and
    answer together, above which it is done; the model's context, if it is not given. ``part_tokens``: of the
    document in a part; as many as fit, if it is not given. ``part_output_tokens``: of a part's answer, at
    most. ``parallel``: parts at a time. ``task``: what to do where a request marks no document.
    """

    models: frozenset[Name] = frozenset()
    over_tokens: Count | None = None
    part_tokens: Annotated[int, Field(ge=16)] | None = None
    part_output_tokens: Count = 256
    overlap_tokens: Annotated[int, Field(ge=0)] = 0
    max_parts: Annotated[int, Field(ge=2, le=1000)] = 32
    parallel: Annotated[int, Field(ge=1, le=64)] = 4
    task: _Text = "Summarise the document."
    part_prompt: _Text = _PART
    merge_prompt: _Text = _MERGE

    @model_validator(mode="after")
    def _prompts_have_their_places(self) -> Self:
        for field, known, needed in (
            ("part_prompt", {"task", "number", "count", "part"}, "part"),
            ("merge_prompt", {"task", "count", "notes"}, "notes"),
        ):
            used = set(PLACE.findall(getattr(self, field)))
            if unknown := sorted(used - known):
                raise ValueError(f"{field} has {{{{{unknown[0]}}}}}; it may have {', '.join(sorted(known))}")
            if needed not in used:
                raise ValueError(f"{field} needs {{{{{needed}}}}}")
        if self.part_tokens is not None and self.overlap_tokens * 2 > self.part_tokens:
            raise ValueError("overlap_tokens may be half of part_tokens at most")
        return self


class Batching(Strict):
    """Embedding requests of a tenant that come within ``window_ms`` go upstream together.

    ``max_inputs``: texts in one such request. ``short_tokens``: a request with a longer text, by the
    gateway's estimate, goes alone.
    """

    window_ms: Annotated[float, Field(gt=0, le=10_000)] = 5.0
    max_inputs: Annotated[int, Field(ge=2, le=2048)] = 64
    short_tokens: Count = 512


class Tokenization(Strict):
    """Prompts are counted by their upstream's tokenizer where the estimate is ``min_tokens`` or more.

    A request waits ``timeout_ms`` for that and then goes by the estimate. ``cache_prompts``: counts that are
    kept. ``send_ids``: completions are asked by the token ids that came, in place of their text.
    """

    min_tokens: Count = 512
    timeout_ms: Positive = 50.0
    cache_prompts: Count = 10_000
    send_ids: bool = False
