"""Import the public names of a package when they are first used.

The ``__init__.py`` of each public package calls `lazy_names`. The stub beside it (``__init__.pyi``) is the one list of
names; type checkers and editors read it too. So ``import hookline`` costs next to nothing and does not import torch.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_EXPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for ``package``, from the stub beside its ``file``.

    A line ``from hookline import sinks as sinks`` in the stub makes a subpackage reachable; it is not in ``__all__``.
    """
    exports = {name: home for home, name in _EXPORT.findall(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))}
    names = [name for name, home in exports.items() if home != package]

    def __getattr__(name: str) -> Any:
        home = exports.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return __getattr__, __dir__, names
