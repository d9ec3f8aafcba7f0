"""torch's switch for guards on hooks: borrowed while there are hooks, put back after the last.

Compiled code checks, before it runs, that what it was compiled for is still so; that a module has no hooks is left out
of these guards by default (``skip_nnmodule_hook_guards``), so a hook that comes later would never fire. While a module
carries a hook of ours, the switch is off, and code compiled meanwhile notices hooks that come and go. Code that was
compiled before, and is of a model that is being attached to, is compiled again (`refresh`), and no other.

When the last hook goes, the switch goes back. A compiled model that had hooks will be compiled once more then, without
them; that code needs the guards too, or the next hook would have to throw it away. So, if there is compiled code, the
switch is turned for the time of each compilation until the last model that had hooks is gone.

Loading the compiler takes a second, so that is left to whoever wants to compile: where it is not loaded yet, a finder
on ``sys.meta_path`` tells us when it is.
"""

from __future__ import annotations

import importlib.machinery
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import CodeType, ModuleType
from typing import Any, Final

from torch import nn

from hookline.sites import _torch

__all__ = ["hold", "is_loaded", "let_go", "refresh"]

_COMPILER: Final = "torch._dynamo"


def is_loaded() -> bool:
    """Whether the compiler is there."""
    return _COMPILER in sys.modules and not _SWITCH.awaits_compiler


def hold(on_load: Callable[[], None]) -> None:
    """There are hooks from now on; ``on_load`` is called if the compiler is loaded only later."""
    _SWITCH.hold(on_load)


def let_go() -> None:
    """There are no hooks any more."""
    _SWITCH.let_go()


def refresh(model: nn.Module) -> None:
    """Hooks have come onto modules of ``model``: code of its classes that has no guards on hooks is compiled again."""
    _SWITCH.refresh(model)


class _Switch:
    """Who holds torch's switch, and which code was compiled while nobody did."""

    def __init__(self) -> None:
        self._held = False
        self._before: bool | None = None
        self._finder: _Finder | None = None
        self._stale: dict[CodeType, None] = {}
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self._between: _BetweenHooks | None = None

    @property
    def awaits_compiler(self) -> bool:
        return self._finder is not None

    def hold(self, on_load: Callable[[], None]) -> None:
        if self._held:
            return
        self._held = True
        if _COMPILER in sys.modules:
            self._turn()
        else:
            self._finder = _Finder(lambda: self._loaded(on_load))
            sys.meta_path.insert(0, self._finder)

    def _loaded(self, on_load: Callable[[], None]) -> None:
        self._drop_finder()
        self._turn()
        on_load()

    def _turn(self) -> None:
        if self._between is None:
            self._stale = dict.fromkeys(_torch.compiled_code())
        else:
            self._between.stop()
            self._between = None
        self._before = _torch.set_hook_guards(True)

    def let_go(self) -> None:
        if not self._held:
            return
        self._held = False
        self._drop_finder()
        if self._before is not None:
            _torch.set_hook_guards(self._before)
            self._before = None
        if self._models and _torch.compiled_code():
            self._between = _BetweenHooks()

    def _drop_finder(self) -> None:
        if self._finder is not None:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            self._finder = None

    def refresh(self, model: nn.Module) -> None:
        if id(model) not in self._models:
            key = id(model)
            self._models[key] = weakref.ref(model, lambda _: self._gone(key))
        if not self._stale:
            return
        classes = [str(id(cls)) for cls in _telling_classes(model)]
        for code in list(self._stale):
            if any(name in text for text in _torch.guards_of(code) for name in classes):
                _torch.forget_compiled(code)
                del self._stale[code]

    def _gone(self, key: int) -> None:
        self._models.pop(key, None)
        if not self._models and self._between is not None:
            self._between.stop()
            self._between = None


def _telling_classes(model: nn.Module) -> set[type]:
    """The classes by which code that runs this model, or a part of it, can be told from other code."""
    modules = list(model.modules())
    own = {type(module) for module in modules if not type(module).__module__.startswith("torch.nn.")}
    compiled = {type(module) for module in modules if _torch.is_compiled(module)}
    return own | compiled or {type(model)}


class _BetweenHooks:
    """Turns the switch for the time of each compilation."""

    def __init__(self) -> None:
        self._before: list[bool] = []
        self._stop = _torch.on_compilation(self._begin, self._end)

    def _begin(self, *args: Any) -> None:
        self._before.append(_torch.set_hook_guards(True))

    def _end(self, *args: Any) -> None:
        if self._before:
            _torch.set_hook_guards(self._before.pop())

    def stop(self) -> None:
        self._stop()
        while self._before:
            self._end()


class _Finder(MetaPathFinder):
    """Tells when the compiler has been loaded; finds nothing itself."""

    def __init__(self, on_load: Callable[[], None]) -> None:
        self._on_load = on_load

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        for finder in self._others():
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Telling(spec.loader, self._on_load)
                return spec
        return None

    def _others(self) -> Iterable[Any]:
        return [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]


class _Telling(Loader):
    """A loader that tells when it is through; everything else it leaves to the one it stands for."""

    def __init__(self, loader: Any, on_load: Callable[[], None]) -> None:
        self._loader = loader
        self._on_load = on_load

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._on_load()


_SWITCH: Final = _Switch()
