"""A jinja sandbox with a budget: a template can't reach the interpreter, nor occupy it for long.

Jinja's own sandbox keeps templates from attributes and from changing what they are given. It bounds
``range`` but not nested loops, macros that call each other, or strings that double. Here every loop and call
takes from a budget, and operations that build strings are limited in size.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import Environment, Template, TemplateRuntimeError, TemplateSyntaxError, nodes, pass_environment
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 200_000
"""Loop iterations in one rendering; a call counts for several."""

MAX_TEXT = 16 * 2**20
"""Characters of any text that a template builds."""

MAX_NUMBER = 100_000
"""Widths, counts and indents that a template may ask for."""

# What pads, repeats or wraps text, or draws random numbers: no chat template needs them.
_UNUSED_FILTERS = (
    "batch",
    "center",
    "filesizeformat",
    "format",
    "pprint",
    "random",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_UNUSED_GLOBALS = ("cycler", "joiner", "lipsum")
_LOOP, _JOINED = "headrace_loop", "headrace_joined"  # filters that only the parser writes
_CALL_STEPS = 4  # a call takes about so many times as long as a bare iteration
_WIDE = re.compile(r"\d{6}")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment; render through :meth:`render_within_budget`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlocks]
        )
        for name in _UNUSED_FILTERS:
            del self.filters[name]
        for name in _UNUSED_GLOBALS:
            del self.globals[name]
        for name in ("indent", "truncate"):
            self.filters[name] = _sized(self.filters[name])
        self.filters["replace"] = _replace
        self.filters["join"] = _join
        self.filters[_LOOP] = self._over
        self.filters[_JOINED] = _checked_text
        self._thread = threading.local()

    def render_within_budget(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render. Raises what the template raises, TemplateRuntimeError if it goes over its budget."""
        self._thread.steps = MAX_STEPS
        size = 0
        pieces = []
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateRuntimeError(f"it writes more than {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._take(_CALL_STEPS)
        _check_numbers(args, kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and not kwargs:
            name = function.__name__
            if name == "expandtabs":
                raise TemplateRuntimeError("expandtabs is not available")
            if name == "replace" and len(args) >= 2:
                return _replace(owner, *args)
            if name == "join" and len(args) == 1:
                return _join(self, args[0], owner)
        return _checked_text(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            for value, other in ((left, right), (right, left)):
                if isinstance(value, Sized) and isinstance(other, int) and len(value) * other > MAX_NUMBER:
                    raise TemplateRuntimeError(f"it repeats a text or list to more than {MAX_NUMBER} items")
            if operator == "**" and not (_is_small(left) and _is_small(right)):
                raise TemplateRuntimeError("it raises numbers above 1000 to a power")
            if operator == "*" and any(isinstance(v, int) and abs(v) > 2**63 for v in (left, right)):
                raise TemplateRuntimeError("it multiplies numbers above 64 bits")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_numbers(right if isinstance(right, tuple) else (right,), {})
        return _checked_text(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Route every loop's iterable and every ``~`` through a filter of ours."""
        tree = Parser(self, source, name, filename).parse()
        for loop in list(tree.find_all(nodes.For)):
            if loop.recursive:
                raise TemplateSyntaxError("recursive loops are not available", loop.lineno)
            loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
        _wrap_concatenations(tree)
        tree.set_environment(self)
        return tree

    def _over(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """Pay for a loop in advance; laziness ends here, so that nothing endless gets past."""
        if not isinstance(iterable, Sized):
            steps: int = self._thread.steps
            iterable = list(islice(iterable, steps + 1))
        self._take(len(iterable))
        return iterable

    def _take(self, steps: int) -> None:
        left: int = getattr(self._thread, "steps", MAX_STEPS)
        if steps > left:
            raise TemplateRuntimeError(f"it takes more than {MAX_STEPS} steps")
        self._thread.steps = left - steps


class _GenerationBlocks(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training: nothing here."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _wrap_concatenations(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, nodes.Node):
                _wrap_concatenations(item)
        wrapped = [
            nodes.Filter(item, _JOINED, [], [], None, None, lineno=item.lineno)
            if isinstance(item, nodes.Concat)
            else item
            for item in items
        ]
        setattr(node, field, wrapped if isinstance(value, list) else wrapped[0])


def _sized(filter_function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing absurd widths and results. Keeps jinja's marks (pass_environment and so on)."""

    @wraps(filter_function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return _checked_text(filter_function(*args, **kwargs))

    return checked


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    before, old, new = str(text), str(old), str(new)
    times = before.count(old) if count is None or count < 0 else min(count, before.count(old))
    _check_length(len(before) + times * (len(new) - len(old)))
    return before.replace(old, new, times)


@pass_environment
def _join(environment: Environment, values: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts = [str(value) for value in islice(values, MAX_STEPS)]
    _check_length(sum(map(len, texts)) + len(texts) * len(str(d)))
    return str(d).join(texts)


def _check_format(pattern: str) -> None:
    if _WIDE.search(pattern):
        raise TemplateRuntimeError("it formats to a width of six digits or more")


def _check_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateRuntimeError(
                f"it passes {value if abs(value) < 2**63 else 'a huge number'} to a function"
            )


def _checked_text(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise TemplateRuntimeError(f"it builds a text of more than {MAX_TEXT} characters")


def _is_small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 1000
