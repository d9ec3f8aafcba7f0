"""Let compiled code notice that a module has hooks: such a module gets a ``forward`` of its own.

``module_hooks`` calls this file as the hooks of a module come and go: `set_own_forward` (`drop_inert` calls it too, for
a copy of a hooked module), `is_forward_replaced`, and `hide_from_copies` for its `CallGuard`. ``attention`` uses
`bind_forward`, `unbind_forward`, `stands_for` and `OWN_FORWARD` where a ``forward`` has to do more, and around that
`set_own_forward`. ``receipt`` asks `ignores_hooks` why hooks were silent.

Compiled code checks, before it runs, that what it was compiled for is still so. That a module has no hooks is left out
of these guards (to have them in, for every module and call, costs a tiny compiled model 7 %), so a hook that comes
later would never fire. What is always guarded is that a module has no ``forward`` of its own beside its class's. So a
module with hooks of ours has one, which is its class's, bound to it: code that was compiled without hooks does not fit
while it is there, and fits again when it is gone. Nothing is thrown away, and no switch of torch's is turned. As often
as the same hooks come and go on the same modules, there are two graphs: one with them and one without. Other hooks may
make more graphs: what a graph with hooks depends on is the ``recipe`` of each slot (``trace_hooks``), the edits
themselves, and which modules have hooks.

Where somebody else has replaced a module's ``forward``, a *stand-in* goes into its place: another function, which calls
theirs. If theirs came from ``torch.compile``, it stays.

A bound ``forward`` or a stand-in that went into a copy would compute with the parameters of the original. So a module
that has one also has, of its own, the two methods by which it is copied (`hide_from_copies`). They leave out every name
of `_BOUND`, but for a ``forward`` of somebody else, and put the one behind a stand-in back. Whoever puts something else
into the ``__dict__`` of a module here adds its name to `_BOUND`, calls `hide_from_copies`, and takes it off when the
hooks go. `_REPLICATE` is a private method of torch that ``nn.DataParallel`` calls, tested in
tests/sites/test_attention.py; the other copies are tested in tests/sites/compiled/test_compiled_marks.py and
tests/sites/test_conformance_lifetime.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final

from torch import nn

from hookline.sites import _torch

_FORWARD: Final = "forward"
_STATE: Final = "__getstate__"
_REPLICATE: Final = "_replicate_for_data_parallel"
_BOUND: Final = (_FORWARD, _STATE, _REPLICATE, _torch.CALL_IMPL)
"""What copies leave out, and `OWN_FORWARD`. ``module_hooks`` puts a `CallGuard` at ``CALL_IMPL`` and takes it off."""
OWN_FORWARD: Final = "_hookline_own_forward"
"""Set by ``attention`` where it has bound a ``forward``: the one that somebody else had given the module, or None.
While it is there, `set_own_forward` takes away no more than a stand-in of ours."""
_STANDS_FOR: Final = "hookline_stands_for"
"""The attribute of a stand-in with the ``forward`` of somebody else that it calls."""


def set_own_forward(module: nn.Module, *, wanted: bool) -> None:
    """Give the module a ``forward`` of its own, or, where that is not ``wanted``, take ours away.

    With one, code that was compiled without hooks does not fit any more; without, it fits again. A container without a
    ``forward`` gets none.
    """
    own = module.__dict__.get(_FORWARD)
    forward = type(module).forward
    if not wanted:
        theirs = None if _is_own_forward(module, own) else stands_for(own)
        if OWN_FORWARD not in module.__dict__:
            unbind_forward(module)
        if theirs is not None:
            module.__dict__[_FORWARD] = theirs
    elif own is not None:
        is_ours = _is_own_forward(module, own) or stands_for(own) is not own
        if not is_ours and not _torch.is_compiled_function(own):
            module.__dict__[_FORWARD] = _stand_in(own)
            hide_from_copies(module)
    elif isinstance(forward, FunctionType) and forward is not nn.Module.forward:  # that of containers is never called
        bind_forward(module, forward)


def bind_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Bind ``forward`` to the module, as its own; copies do not get it."""
    module.__dict__[_FORWARD] = MethodType(forward, module)
    hide_from_copies(module)


def hide_from_copies(module: nn.Module) -> None:
    """Have copies of a module leave out what is bound to the module itself."""
    module.__dict__[_STATE] = MethodType(_state_for_copy, module)
    module.__dict__[_REPLICATE] = MethodType(_replica, module)


def unbind_forward(module: nn.Module) -> None:
    """Take our ``forward`` away, and the two methods for copies."""
    for name in (_FORWARD, _STATE, _REPLICATE):
        module.__dict__.pop(name, None)


def _state_for_copy(module: nn.Module) -> Any:
    """Return what ``copy.copy``, ``copy.deepcopy`` and ``pickle`` take over, which ask the instance for it."""
    state = getattr(type(module), _STATE)(module)
    if isinstance(state, tuple):  # of a class with slots
        return (_unbound(state[0]), *state[1:])
    return _unbound(state)


def _replica(module: nn.Module) -> nn.Module:
    """Return what ``nn.DataParallel`` calls instead of the module, with a ``forward`` that is bound to it."""
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    ours = stands_for(module.__dict__.get(_FORWARD))
    has_other = isinstance(ours, MethodType) and ours.__self__ is module and ours.__func__ is not type(module).forward
    replica.__dict__ = _unbound(replica.__dict__)
    if has_other:  # of a module with hooks inside of its attention
        replica.__dict__[_FORWARD] = MethodType(ours.__func__, replica)
        replica.__dict__[OWN_FORWARD] = module.__dict__.get(OWN_FORWARD)
    return replica


def _unbound(state: Any) -> Any:
    """Return the attributes of a copy: without what is bound, and with the ``forward`` of somebody else."""
    if not isinstance(state, dict):
        return state
    kept = {key: state[key] for key in state if key not in (*_BOUND, OWN_FORWARD)}
    forward = state.get(_FORWARD)
    owner = getattr(forward, "__self__", None)
    is_ours = isinstance(owner, nn.Module) and _is_own_forward(owner, forward)
    theirs = state.get(OWN_FORWARD, None if is_ours else stands_for(forward))
    return kept if theirs is None else {**kept, _FORWARD: theirs}


def is_forward_replaced(module: nn.Module) -> bool:
    """Return whether the module has a ``forward`` of its own that is not its class's: a stand-in is one as well."""
    own = module.__dict__.get(_FORWARD)
    return own is not None and not _is_own_forward(module, own)


def stands_for(own: Any) -> Any:
    """Return the ``forward`` behind a stand-in of ours; what is no stand-in is returned as it is.

    What somebody else has made of a stand-in by ``functools.wraps`` is none, though it has the attribute.
    """
    theirs = getattr(own, _STANDS_FOR, own)
    return theirs if getattr(own, "__wrapped__", None) is theirs else own


def _stand_in(own: Any) -> Any:
    """Return another function that does the same, for a ``forward`` that somebody else has put there."""

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    setattr(forward, _STANDS_FOR, own)
    return forward


def _is_own_forward(module: Any, own: Any) -> bool:
    cls: Any = type(module)
    return isinstance(own, MethodType) and own.__self__ is module and own.__func__ is cls.forward


def ignores_hooks(module: nn.Module) -> bool:
    """Return whether vLLM has compiled the module: its code was made without guards, so it never notices hooks."""
    bases = {base.__name__ for base in type(module).__mro__}
    return "TorchCompileWithNoGuardsWrapper" in bases and not getattr(module, "do_not_compile", False)
