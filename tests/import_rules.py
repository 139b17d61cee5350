"""Which room may import which: the rules, and a reader that finds every import that breaks them.

Imports are read from the syntax tree, so those inside functions and under ``TYPE_CHECKING`` count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "headrace"
FREE = {"closing", "errors", "paths", "observe", "yaml_file"}
"""May be imported by every room."""

ALLOWED: dict[str, set[str]] = {
    "model": set(),
    "backend": {"model"},
    "engine": {"backend", "model"},
    "frontend": {"engine", "backend", "model"},
    "server": {"web", "frontend", "engine", "backend", "model"},
    "gateway": {"web"},
    "web": set(),
    "lab": {"frontend", "model", "backend"},
    "fleet": {"gateway", "engine", "backend.simulated"},
    "observe": set(),
    "closing": set(),
    "errors": set(),
    "paths": set(),
    "yaml_file": set(),
    "cli": {"server", "web", "frontend", "engine", "backend", "model", "gateway", "lab", "fleet"},
}
"""Room (or module of the package's top) to what it may import beside itself and FREE."""

HEAVY = {"torch", "triton", "transformers"}
"""Not in the base install: never imported when a module is, only inside the function that needs it."""
HEAVY_HOMES = ("backend/torch/", "lab/compress/algorithms/", "lab/compress/training/")
"""Whose modules are themselves imported only where they are used."""


@dataclass(frozen=True)
class Broken:
    """One import that the rules forbid."""

    path: Path
    line: int
    target: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: imports {self.target}: {self.why}"


def broken_imports(root: Path) -> list[Broken]:
    """Every forbidden import below ``root``, the folder of the package."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        room = relative.parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text("utf-8"), str(path))
        if relative == Path("__init__.py"):
            found += [
                Broken(relative, line, target, "import headrace must stay light: name it in the lazy table")
                for line, target in _imports(_outside_type_checking(tree), relative)
                if target.split(".")[0] == PACKAGE
            ]
            continue
        if room not in ALLOWED:
            found.append(Broken(relative, 1, room, "a room that the rules do not know"))
            continue
        for line, target in _imports(ast.walk(tree), relative):
            if why := _forbidden(room, target):
                found.append(Broken(relative, line, target, why))
        if not relative.as_posix().startswith(HEAVY_HOMES):
            found += [
                Broken(relative, line, target, "not in the base install: import it where it is used")
                for line, target in _imports(_at_import_time(tree), relative)
                if target.split(".")[0] in HEAVY
            ]
    return found


def _forbidden(room: str, target: str) -> str | None:
    parts = target.split(".")
    if parts[0] != PACKAGE:
        return None
    if len(parts) == 1 or not parts[1].islower():  # the package itself: __version__, LLM and the like
        return None if room == "cli" or target == PACKAGE else "import it from the room where it lives"
    if parts[1] == "__version__" or parts[1] == room or parts[1] in FREE:
        return None
    inner = ".".join(parts[1:])
    if any(inner == allowed or inner.startswith(f"{allowed}.") for allowed in ALLOWED[room]):
        return None
    may = ", ".join(sorted(ALLOWED[room])) or "no other room"
    return f"{room} may import {may}"


def _imports(nodes: Iterator[ast.AST], relative: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported; ``from a import b`` gives ``a.b``."""
    package = [PACKAGE, *relative.parts[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no function bodies, nothing under TYPE_CHECKING."""
    for node in _outside_type_checking(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node


def _outside_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
