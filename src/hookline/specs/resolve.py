"""The object that a dotted path means: the one way by which configuration names code.

Takes paths from hook specs and run files, hands back what they name; ``allow`` says whose code they may name. Imports
neither torch nor anything of the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any, overload

from hookline.errors import NotAllowedError, OptionError

__all__ = ["resolve_callable"]


@overload
def resolve_callable(path: None, allow: Iterable[str] | None = None) -> None: ...
@overload
def resolve_callable(path: str, allow: Iterable[str] | None = None) -> Any: ...
def resolve_callable(path: str | None, allow: Iterable[str] | None = None) -> Any:
    """The object at ``"package.module:name"`` or ``"package.module.name"``; None for None.

    Recipe::

        factory = hookline.specs.resolve_callable("my_project.hooks:log_shapes", allow=["my_project"])

    Args:
        path: Where it is. Its module is imported, which runs that module's code.
        allow: What paths may begin with: ``"my_project"`` stands for the package and all in it, and
            ``"my_project.hooks:log_shapes"`` for that one. What an allowed module has imported from one that is not
            allowed is refused too. None allows everything; an empty list nothing.

    Raises:
        ValueError: The path has neither a colon nor a dot.
        ModuleNotFoundError, AttributeError: There is no such module, or nothing of that name in it.
        NotAllowedError: (a PermissionError) before anything is imported.
    """
    if path is None:
        return None
    if not isinstance(path, str):
        raise OptionError(f"A hook callable path is a string, got {path!r}.")
    allowed = None if allow is None else _prefixes(allow)
    module_name, name = _parts(path)
    if allowed is not None and not _is_under(f"{module_name}.{name}", allowed):
        raise NotAllowedError(_refusal(path, allowed))
    module = importlib.import_module(module_name)
    try:
        found = getattr(module, name)
    except AttributeError as error:
        raise AttributeError(f"Module '{module_name}' has no attribute '{name}' (from hook path '{path}')") from error
    if allowed is not None and f"{module_name}.{name}" not in allowed and not _is_under(_home(found), allowed):
        raise NotAllowedError(f"{_refusal(path, allowed)} It is there, but comes from '{_home(found)}'.")
    return found


def _parts(path: str) -> tuple[str, str]:
    """The module and the name in it."""
    if ":" in path:
        module, _, name = path.partition(":")
    else:
        module, _, name = path.rpartition(".")
    if (not module and ":" not in path) or module.startswith("."):
        raise OptionError(
            f"Invalid hook callable path '{path}'. Expected 'module.submodule:factory' or 'module.submodule.factory'."
        )
    return module, name


def _prefixes(allow: Iterable[str]) -> list[str]:
    """What paths may begin with, all with dots; ``"my_project."`` and ``"my_project.*"`` are what they look like."""
    given = [allow] if isinstance(allow, str) else list(allow)
    for prefix in given:
        if not isinstance(prefix, str) or not prefix.rstrip("*").rstrip(".:"):
            raise OptionError(f"allow= takes names such as 'my_project' or 'my_project.hooks:factory', got {prefix!r}.")
    return [prefix.rstrip("*").rstrip(".:").replace(":", ".") for prefix in given]


def _is_under(path: str, prefixes: list[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _home(found: Any) -> str:
    """The module that an object is defined in; of what does not say, such as a method of a string, that of its type."""
    if isinstance(found, ModuleType):
        return found.__name__
    home = getattr(found, "__module__", None)
    return home if isinstance(home, str) else type(found).__module__


def _refusal(path: str, prefixes: list[str]) -> str:
    shown = ", ".join(map(repr, prefixes)) or "none"
    return f"Hook callable path '{path}' is not allowed; allowed: {shown}."
