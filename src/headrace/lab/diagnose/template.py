"""A prompt's template: lines that are always the same, and lines with fields."""

from __future__ import annotations

import re
import string
from pathlib import Path

from headrace.errors import ConfigError
from headrace.lab.diagnose.prompts import BLOCK, Counting, Part, PromptAdvice, shortened

_MARK = "\x00"  # stands for a field while lines are cut


def advise_template(path: Path, count: Counting) -> PromptAdvice:
    """How to order the template in ``path``; every field is taken to vary. Raises ConfigError."""
    try:
        source = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    if not source.strip():
        raise ConfigError(f"{path} is empty: it needs a prompt with its fields")
    jinja = re.search(r"\{\{|\{%", source) is not None
    marked, fields = _jinja(source, path) if jinja else _format(source, path)
    lines = marked.splitlines(keepends=True)
    stable = "".join(line for line in lines if _MARK not in line)
    first = marked.partition(_MARK)[0]
    parts = []
    if stable.strip():
        parts.append(_part(stable, fields=[], stable=True, count=count))
    names = iter(fields)
    for line in (line for line in lines if _MARK in line):
        own = [next(names) for _ in range(line.count(_MARK))]
        parts.append(_part(line, fields=own, stable=False, count=count))
    notes = ["fields count as nothing: how long their values are, the template does not say"]
    if not fields:
        notes.append("the template has no fields: everything is shared already")
    return PromptAdvice(
        source=path.name,
        requests=0,
        counted=count.name,
        tokens=len(count.tokens(marked.replace(_MARK, ""))),
        cached_now=_blocks(first, count),
        cached_after=max(_blocks(stable, count), _blocks(first, count)),
        parts=parts,
        notes=notes,
    )


def _blocks(text: str, count: Counting) -> float:
    return float(len(count.tokens(text)) // BLOCK * BLOCK) if text else 0.0


def _part(line: str, *, fields: list[str], stable: bool, count: Counting) -> Part:
    tokens = len(count.tokens(line.replace(_MARK, "")))
    shown = line
    for name in fields:
        shown = shown.replace(_MARK, "{" + name + "}", 1)
    return Part(stable=stable, role="template", text=shortened(shown), tokens=tokens, share=1.0)


def _format(source: str, path: Path) -> tuple[str, list[str]]:
    """``str.format``'s fields. Raises ConfigError with what is wrong."""
    marked: list[str] = []
    fields: list[str] = []
    try:
        for text, name, _, _ in string.Formatter().parse(source):
            marked.append(text)
            if name is not None:
                marked.append(_MARK)
                fields.append(name or str(len(fields)))
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON Lines nor a template with {{fields}}: {error}") from None
    return "".join(marked), fields


def _jinja(source: str, path: Path) -> tuple[str, list[str]]:
    """Jinja's expressions and blocks, each as one field. Raises ConfigError with the line."""
    import jinja2
    from jinja2 import nodes

    try:
        tree = jinja2.Environment(keep_trailing_newline=True).parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not a Jinja template: {error.message}") from None
    marked: list[str] = []
    fields: list[str] = []

    def add(node: nodes.Node) -> None:
        named = node if isinstance(node, nodes.Name) else next(node.find_all(nodes.Name), None)
        marked.append(_MARK)
        fields.append(named.name if isinstance(named, nodes.Name) else "expression")

    for part in tree.body:
        if not isinstance(part, nodes.Output):
            add(part)
            continue
        for node in part.nodes:
            if isinstance(node, nodes.TemplateData):
                marked.append(node.data)
            else:
                add(node)
    return "".join(marked), fields
