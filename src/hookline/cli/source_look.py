"""What an experiment's file says of its flags, strategies and groups, read without running it.

Asked by `complete`, which has to answer at once: torch is not imported, and nothing of the user's is run by a key.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Looked", "look", "names_in"]


@dataclass
class Looked:
    """What was found."""

    flags: list[str] = field(default_factory=list)
    """The fields of its configuration, as flags."""
    strategies: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


def names_in(path: Path) -> list[str]:
    """Return the classes and functions that a file defines."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in _body(path) if isinstance(node, kinds) and not node.name.startswith("_")]


def look(experiment: str) -> Looked:
    """Return what the experiment of that name, or at ``file.py:Class``, says; nothing where it cannot be read."""
    from hookline.experiments import EMBEDDED

    where, colon, name = EMBEDDED.get(experiment, experiment).rpartition(":")
    where = where if colon else experiment
    body = _body(_file(where))
    by_name = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    node = by_name.get(name) if name else next((one for one in by_name.values() if _value(one, "hook_sets")), None)
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return Looked([_flag(one.arg) for one in arguments if one.arg != "strategy"])
    if node is None:
        return Looked()
    config = _value(node, "config_class")
    cls = by_name.get(config.id) if isinstance(config, ast.Name) else None
    found = Looked([_flag(name) for name in _fields(cls)])
    found.strategies = list(_texts(getattr(_value(node, "strategies"), "elts", ())))
    found.groups = list(_texts(getattr(_value(node, "hook_sets"), "keys", ())))
    return found


def _file(where: str) -> Path:
    if where.endswith(".py"):
        return Path(where)
    if not where.startswith("hookline.") and not all(part.isidentifier() for part in where.split(".")):
        return Path()
    top, *rest = where.split(".")
    spec = importlib.util.find_spec(top)  # of the outermost package alone: those below would be imported
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0], *rest).with_suffix(".py") if folders and rest else Path(f"{top}.py")


def _body(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _value(node: ast.AST, name: str) -> ast.expr | None:
    """What a name is set to in the body of a class."""
    for line in getattr(node, "body", ()):
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            value: ast.expr | None = line.value
            return value
    return None


def _fields(cls: ast.AST | None) -> Iterator[str]:
    for line in getattr(cls, "body", ()):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[:1] != "_":
            yield line.target.id


def _texts(nodes: object) -> Iterator[str]:
    for node in nodes if isinstance(nodes, list | tuple) else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
