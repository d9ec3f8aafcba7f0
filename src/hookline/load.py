"""Load the object that a name means: an experiment, a model, a hook, a sink.

cli/commands.py, runs/find.py, runs/build.py and the helper process of the sinks (records/helper.py) call `load_object`
with ``path/file.py:Name`` or ``package.module:Name``. runs/read.py calls `from_folder` for the paths in a file of
settings. cli/commands.py and runs/build.py also use the functions for ``sys.argv`` and ``sys.path``. ``load_object`` of
training/state.py is another one: it loads states.

An unknown name is an error that lists the names there are. An error inside a user's file is passed on unchanged. A file
is run once and kept in `sys.modules` under its own name, so that pickle and dataclasses find its classes; if that name
is another module's, under ``hookline_file_`` and the name. Tests: tests/cli/test_commands.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hookline.errors import OptionError
from hookline.messages import unknown_name_text


def load_object(path: str, *, wanted: str, pick: Callable[[ModuleType], Sequence[str]] | None = None) -> Any:
    """Return the object at ``file.py:Name`` or ``package.module:Name``.

    Args:
        path: The file or module and the name: ``file.py:Name``.
        wanted: What the object has to be, for messages: ``"an experiment"``.
        pick: List the candidates when ``path`` has no ``:Name``; used if there is exactly one.
    """
    where, colon, name = path.rpartition(":") if _has_name(path) else (path, "", "")
    module = _load_file(Path(where)) if where.endswith(".py") else _import(where, wanted)
    if not colon:
        candidates = list(pick(module)) if pick is not None else []
        if len(candidates) != 1:
            names = candidates or _public_names(module)
            raise OptionError(
                f"{path} does not say which object is {wanted}: write {where}:NAME. There are: "
                f"{', '.join(names) or 'none'}."
            )
        name = candidates[0]
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{where} has no {name!r}.{unknown_name_text(name, _public_names(module))}")
        found = getattr(found, part)
    return found


@contextmanager
def without_arguments(program: str | Path) -> Iterator[None]:
    """Let code of a user's file find no arguments in ``sys.argv``: those of the command are none of its own."""
    before, sys.argv = sys.argv, [str(program)]
    try:
        yield
    finally:
        sys.argv = before


def from_folder(path: str, folder: Path) -> str:
    """Return ``path``; put ``folder`` before it if it names a file (``file.py:Name`` or ``file.py``)."""
    where = path.rpartition(":")[0] if _has_name(path) else path
    return str(folder / path) if where.endswith(".py") else path


def _has_name(path: str) -> bool:
    """Return whether there is a name behind the last colon; ``C:\\file.py`` has none."""
    return ":" in path and not path.endswith(".py")


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module, once; it can import what lies beside it."""
    if not path.is_file():
        near = [str(one) for one in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise OptionError(f"There is no file {path}.{unknown_name_text(str(path), near, 'Python files there')}")
    path = path.resolve()
    name = path.stem if path.stem.isidentifier() else "hookline_file"
    if _is_taken(name, path):
        name = f"hookline_file_{name}"  # a file called `random.py` must not hide Python's
    loaded = sys.modules.get(name)
    return loaded if loaded is not None and getattr(loaded, "__file__", None) == str(path) else _run(name, path)


def _is_taken(name: str, path: Path) -> bool:
    """Return whether another file is imported by that name."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__file__", None) != str(path)
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin != str(path)


def _run(name: str, path: Path) -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location(name, path)  # there is one: the name of the file ends with .py
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with without_arguments(path):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import(name: str, wanted: str) -> ModuleType:
    add_current_folder_to_path()
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


def add_current_folder_to_path() -> None:
    """Add the current folder to ``sys.path``, as ``python -m`` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _public_names(module: ModuleType) -> list[str]:
    """Return the classes, functions and models that a module defines itself."""
    own = [name for name, value in vars(module).items() if not name.startswith("_") and _is_own(value, module)]
    return own or [name for name in vars(module) if not name.startswith("_")]


def _is_own(value: Any, module: ModuleType) -> bool:
    if isinstance(value, ModuleType):
        return False
    home = getattr(value, "__module__", None) if isinstance(value, type) or callable(value) else module.__name__
    return home == module.__name__
