"""Import the public names of a package when they are first used.

The ``__init__.py`` of each public package calls `lazy_names`; ``hookline`` itself and the folders below it that have a
stub do. The stub (``__init__.pyi``) beside it is the list of names: type checkers, editors and the reference of the
site (docs/site/site_pages.py) read it too. A new public name is one line there, ``from HOME import NAME as NAME``
(lines of any other form are passed over), and a word in the table of its make (FUNCTIONS, CLASSES, …) in
tests/test_public_names.py. The top lists 50 names at most. Sinks and factories need more: CONTRIBUTING.md says what. A
new package is a line ``from hookline import NAME as NAME`` in the stub of the top, its layer in .importlinter, and a
word in ``LAZY`` of that test, which then checks its names.

``import hookline`` must not import torch, nor anything else that takes time.
"""

from __future__ import annotations

import sys

# Nothing else at the top: `re`, `pathlib` and `typing` would double the time of ``import hookline``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for ``package``, from the stub beside its ``file``.

    A line whose HOME is ``package`` itself (``from hookline import sinks as sinks``) makes a subpackage reachable; such
    a name is not in ``__all__``.
    """
    exports = dict(_exports(file))
    names = [name for name, home in exports.items() if home != package]

    def __getattr__(name: str) -> Any:
        import importlib

        home = exports.get(name)
        if home is None:
            # With name and obj, a traceback ends with "Did you mean: 'attach'?".
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return __getattr__, __dir__, names


def _exports(file: str) -> Iterator[tuple[str, str]]:
    """Yield name and home of each line ``from HOME import NAME as NAME`` of the stub beside ``file``."""
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        for line in stub:
            words = line.split()
            if len(words) == 6 and (words[0], words[2], words[4]) == ("from", "import", "as") and words[3] == words[5]:
                yield words[3], words[1]
