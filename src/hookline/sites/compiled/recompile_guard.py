"""Let compiled code notice that a module has hooks: such a module gets a ``forward`` of its own.

`ModuleHooks` calls this as its hooks come and go. Compiled code checks, before it runs, that what it was compiled for
is still so. That a module has no hooks is left out of these guards (to have them in, for every module and call, costs a
tiny compiled model 7 %), so a hook that comes later would never fire. What is always guarded is that a module has no
``forward`` of its own beside its class's. So, once there is compiled code, a module with hooks of ours has one, which
is its class's, bound to it: code that was compiled without hooks does not fit while it is there, and fits again when it
is gone. Nothing is thrown away, no switch of torch's is turned, and whatever comes and goes, there are two graphs: one
with hooks and one without.

Where somebody else has replaced a module's ``forward``, another function that does the same stands in for theirs.

A bound ``forward`` that went into a copy would compute with the parameters of the original. So a module that has one
also has, of its own, the two methods by which it is copied: they leave out what is bound to it.

Loading the compiler takes a second, so this file does not load it: where it is not loaded yet, a finder
on ``sys.meta_path`` tells us when it is, and then the compiler when it first compiles. Both go when the last hook does.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import nn

from hookline.sites import _torch

_COMPILER: Final = "torch._dynamo"
_FORWARD: Final = "forward"
_STATE: Final = "__getstate__"
_REPLICATE: Final = "_replicate_for_data_parallel"
_BOUND: Final = (_FORWARD, _STATE, _REPLICATE)
_STANDS_FOR: Final = "hookline_stands_for"


def is_compiler_used() -> bool:
    """Return whether anything has been compiled, so that modules with hooks need a ``forward`` of their own."""
    return _WATCH.compiled


def add_own_forward(module: nn.Module) -> None:
    """Give the module a ``forward`` of its own: code that was compiled while it had no hooks does not fit any more."""
    own = module.__dict__.get(_FORWARD)
    forward = type(module).forward
    if own is not None:
        if not _is_own_forward(module, own) and not _torch.is_compiled_function(own):
            module.__dict__[_FORWARD] = _stand_in(own)
    elif isinstance(forward, FunctionType) and forward.__name__ == _FORWARD:  # it is pickled by that name
        module.__dict__[_FORWARD] = MethodType(forward, module)
        module.__dict__[_STATE] = MethodType(_state_for_copy, module)
        module.__dict__[_REPLICATE] = MethodType(_replica, module)
    elif forward is not nn.Module.forward:  # which containers have, and which is never called
        _compile_again(type(module))


def drop_own_forward(module: nn.Module) -> None:
    """Take it away: that code fits again."""
    own = module.__dict__.get(_FORWARD)
    if _is_own_forward(module, own):
        for name in _BOUND:
            module.__dict__.pop(name, None)
    elif hasattr(own, _STANDS_FOR):
        module.__dict__[_FORWARD] = getattr(own, _STANDS_FOR)


def _state_for_copy(module: nn.Module) -> Any:
    """Return what ``copy.copy``, ``copy.deepcopy`` and ``pickle`` take over, which ask the instance for it."""
    state = getattr(type(module), _STATE)(module)
    if isinstance(state, tuple):  # of a class with slots
        return (_unbound(state[0]), *state[1:])
    return _unbound(state)


def _replica(module: nn.Module) -> nn.Module:
    """Return what ``nn.DataParallel`` calls instead of the module."""
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    replica.__dict__ = _unbound(replica.__dict__)
    return replica


def _unbound(state: Any) -> Any:
    return {key: state[key] for key in state if key not in _BOUND} if isinstance(state, dict) else state


def is_forward_replaced(module: nn.Module) -> bool:
    """Return whether the module has a ``forward`` that is not its class's."""
    own = module.__dict__.get(_FORWARD)
    return own is not None and not _is_own_forward(module, own)


def _stand_in(own: Any) -> Any:
    """Return another function that does the same, for a ``forward`` that somebody else has put there."""

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    setattr(forward, _STANDS_FOR, own)
    return forward


def _is_own_forward(module: nn.Module, own: Any) -> bool:
    return isinstance(own, MethodType) and own.__self__ is module and own.__func__ is type(module).forward


def ignores_hooks(module: nn.Module) -> bool:
    """Return whether the compiled code of the module's forward was made without guards, so that it never
    notices hooks.

    With its guards, it names the class of the module. Code with no guards whatever counts for every module: which
    modules are inside of it, it does not say.
    """
    if _torch.skips_guards() or _is_compiled_by_vllm(module):
        return True
    name = str(id(type(module)))
    own = getattr(type(module).forward, "__code__", None)
    for code in _torch.compiled_code():
        texts = _torch.guards_of(code)
        if all(_SOURCE not in text for text in texts) or (code is own and all(name not in text for text in texts)):
            return True
    return False


def _is_compiled_by_vllm(module: nn.Module) -> bool:
    """Return whether vLLM has compiled the module: such code may lie outside of the compiler's own caches."""
    bases = {base.__name__ for base in type(module).__mro__}
    return "TorchCompileWithNoGuardsWrapper" in bases and not getattr(module, "do_not_compile", False)


_SOURCE: Final = "source="
"""In the text of guards, before what each is about."""


def _compile_again(cls: type) -> None:
    """Forget compiled code that meets modules of this class, and no other."""
    name = str(id(cls))
    for code in _torch.compiled_code():
        if any(name in text for text in _torch.guards_of(code)):
            _torch.forget_compiled(code)


class _Watch:
    """Waits for the compiler, and for its first work, while there are hooks."""

    def __init__(self) -> None:
        self.compiled = False
        self._held = False
        self._finder: _Finder | None = None
        self._on_compile: Callable[[], None] | None = None
        self._told = _torch.Compilations(self._compiles)

    def begin(self, on_compile: Callable[[], None]) -> None:
        """Call ``on_compile`` when something is compiled for the first time; there are hooks from now on."""
        if self._held:
            return
        self._held = True
        if _COMPILER in sys.modules:
            self._on_compile = on_compile
            if not self.compiled:
                self._start()
        else:
            self._finder = _Finder(lambda: self._loaded(on_compile))
            sys.meta_path.insert(0, self._finder)

    def _loaded(self, on_compile: Callable[[], None]) -> None:
        self._drop_finder()
        self._on_compile = on_compile
        self.tend()

    def tend(self) -> None:
        """Check whether anything has been compiled meanwhile; ask for the call again, which ``torch.compiler.reset()``
        forgets.
        """
        if not self.compiled and self._on_compile is not None and not self._told.is_on():
            self._start()

    def _start(self) -> None:
        if _torch.compiled_code():
            self._compiles()
        else:
            self._told.start()

    def _compiles(self) -> None:
        if not self.compiled:
            self.compiled = True
            if self._on_compile is not None:
                self._on_compile()

    def end(self) -> None:
        """Stop watching the compiler: there are no hooks any more."""
        self._held = False
        self._on_compile = None
        if self._finder is not None:
            self._drop_finder()
        self._told.stop()

    def _drop_finder(self) -> None:
        if self._finder is not None:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            self._finder = None


class _Finder(MetaPathFinder):
    """Calls ``on_load`` when the compiler has been loaded; finds nothing itself."""

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
    """A loader that calls ``on_load`` at its end; the one it stands for does the loading."""

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


_WATCH: Final = _Watch()
watch_compiler: Final = _WATCH.begin
check_compiler: Final = _WATCH.tend
stop_watching: Final = _WATCH.end
