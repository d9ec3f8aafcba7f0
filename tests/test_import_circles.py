"""No two modules of the package import each other, directly or by way of others, not even for types alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hookline

PACKAGE = Path(hookline.__file__).parent
STILL_WITH_CIRCLES = (
    "hookline.factories.",
    "hookline.observe.watch.",
)
"""Folders that have a circle inside; take a line out when its circle is taken apart."""


def imports() -> dict[str, set[str]]:
    """Return the modules of the package, each with those it imports: anywhere in its text, type-only ones too."""
    files = {_name(path): path for path in PACKAGE.rglob("*.py")}
    return {name: _imported(path, set(files)) - {name} for name, path in files.items()}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (modules & known) or {node.module}
    return found & known


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the strongly connected components of ``graph`` that have more than one node."""
    reached = {node: _reach(node, graph) for node in graph}
    return {
        frozenset(other for other in reached[node] if node in reached[other]) | {node}
        for node in graph
        if node in reached[node]
    }


def _reach(node: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [node]
    while todo:
        fresh = graph[todo.pop()] - seen
        seen |= fresh
        todo += fresh
    return seen


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, {frozenset("ab")}),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, {frozenset("abc"), frozenset("de")}),
    ],
    ids=["chain", "pair", "two circles"],
)
def test_circles_are_found(graph: dict[str, set[str]], found: set[frozenset[str]]) -> None:
    """A chain is no circle; a pair is one; two circles are told apart."""
    assert circles(graph) == found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone count too: whoever reads a file can read the ones below it first."""
    found = [circle for circle in circles(imports()) if not _is_known(circle)]
    assert not found, "\n".join(" ".join(sorted(circle)) for circle in found)


def _is_known(circle: frozenset[str]) -> bool:
    return any(all(name.startswith(folder) for name in circle) for folder in STILL_WITH_CIRCLES)
