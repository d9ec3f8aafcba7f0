"""What a name on the command line stands for: an experiment, a model, a hook, a sink.

Takes ``name``, ``path/file.py:Name`` or ``package.module:Name``, hands back the object. A mistake is told in a sentence
with the names there are; an error inside a user's file is theirs, and comes through as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from hookline.errors import OptionError

__all__ = ["load_file", "load_object", "nearest_text", "public_names", "see_current_folder"]


def load_object(path: str, *, wanted: str, pick: Callable[[ModuleType], Sequence[str]] | None = None) -> Any:
    """The object at ``file.py:Name`` or ``package.module:Name``.

    Args:
        path: Where it is.
        wanted: What it is to be, for messages: ``"an experiment"``.
        pick: Given a module without a name, which of its names would do; one alone is taken.
    """
    where, colon, name = path.rpartition(":") if _has_name(path) else (path, "", "")
    module = load_file(Path(where)) if where.endswith(".py") else _import(where, wanted)
    if not colon:
        choice = list(pick(module)) if pick is not None else []
        if len(choice) != 1:
            names = choice or public_names(module)
            raise OptionError(
                f"{path} does not say which object is {wanted}: write {where}:NAME. There are: "
                f"{', '.join(names) or 'none'}."
            )
        name = choice[0]
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{where} has no {name!r}.{nearest_text(name, public_names(module))}")
        found = getattr(found, part)
    return found


def _has_name(path: str) -> bool:
    """Whether there is a name behind the last colon; ``C:\\file.py`` has none."""
    return ":" in path and not path.endswith(".py")


def load_file(path: Path) -> ModuleType:
    """Run a file as a module, once; it can import what stands beside it."""
    if not path.is_file():
        near = [str(one) for one in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise OptionError(f"There is no file {path}.{nearest_text(str(path), near, 'Python files there')}")
    path = path.resolve()
    name = path.stem if path.stem.isidentifier() else "hookline_file"
    if _taken(name, path):
        name = f"hookline_file_{name}"  # a file called `random.py` must not stand in front of Python's
    loaded = sys.modules.get(name)
    return loaded if loaded is not None and getattr(loaded, "__file__", None) == str(path) else _run(name, path)


def _taken(name: str, path: Path) -> bool:
    """Whether another file is imported by that name."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__file__", None) != str(path)
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin != str(path)


def _run(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # pragma: no cover  (a suffix that Python does not know)
        raise OptionError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import(name: str, wanted: str) -> ModuleType:
    see_current_folder()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise OptionError(
                f"There is no module {name!r} to take {wanted} from: Python cannot import {error.name!r}, neither from "
                "here nor from the installed packages. Next: check the name (PACKAGE.MODULE:NAME), or name a file with "
                f"its ending: {name.replace('.', '/')}.py:NAME."
            ) from None
        raise
    except (ValueError, TypeError):
        raise OptionError(f"{name!r} is no name of a module; write file.py:NAME or package.module:NAME.") from None


def see_current_folder() -> None:
    """Have modules of the current folder found, as under ``python -m``."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def public_names(module: ModuleType) -> list[str]:
    """The classes, functions and models that a module defines itself."""
    own = [name for name, value in vars(module).items() if not name.startswith("_") and _is_own(value, module)]
    return own or [name for name in vars(module) if not name.startswith("_")]


def _is_own(value: Any, module: ModuleType) -> bool:
    if isinstance(value, ModuleType):
        return False
    home = getattr(value, "__module__", None) if isinstance(value, type) or callable(value) else module.__name__
    return home == module.__name__


def nearest_text(asked: str, names: Sequence[str], what: str = "There are") -> str:
    """The end of an error about an unknown name: what may have been meant, and what there is."""
    near = get_close_matches(asked, list(names), n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"{meant} {what}: {', '.join(names) or 'none'}."
