"""One call of a function, as its hooks see it.

Made by `FunctionHooks` at each call that a hook is due for, handed to the hook as its first argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules, submodule, unwrap

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import ForwardCounter


class FunctionSite:
    """The function that is being called, and where and when.

    It is the first argument of every function hook:

        def hook(fn, inputs, outputs):
            print(fn.name, fn.module, fn.call)
    """

    __slots__ = (
        "_counter_of_model",
        "_others",
        "_outermost",
        "args",
        "call",
        "func",
        "in_backward",
        "kwargs",
        "name",
        "owner",
        "recompute",
        "step",
    )

    def __init__(self, name: str, func: Callable[..., Any], owner: nn.Module | None, counter: ForwardCounter) -> None:
        self.name = name
        """Its full name: "torch.nn.functional.softmax", "aten.mm.default", "package.MyFunction"."""
        self.func = func
        """The function, operator or ``autograd.Function`` class itself."""
        self.owner = owner
        """The module whose forward makes the call; None outside of any."""
        self.step, self.call = counter.moment(name)
        """Which forward of the model (-1 without ``within=``), and which call of this function since that began
        (without ``within=``, since the first hook in this thread)."""
        self.in_backward = False
        """Whether a backward pass makes the call."""
        self.recompute = False
        """Whether the call only repeats an earlier one for activation checkpointing."""
        self.args: tuple[Any, ...] = ()
        """The positional arguments as given; for forward hooks, and gone after them."""
        self.kwargs: dict[str, Any] = {}
        """The keyword arguments, likewise."""
        self._counter_of_model = counter
        self._outermost = counter.model()
        self._others: dict[ForwardCounter, FunctionSite] | None = None

    def seen_from(self, counter: ForwardCounter) -> FunctionSite:
        """Return the same call, named and counted in another model than this one; `also_seen_from` has to have been
        told.
        """
        return self if self._others is None or counter is self._counter_of_model else self._others[counter]

    def also_seen_from(self, counters: Iterable[ForwardCounter]) -> None:
        """Prepare the same call for hooks that are bound to other models, of which it is part too."""
        self._others = {counter: FunctionSite(self.name, self.func, self.owner, counter) for counter in counters}
        for other in self._others.values():
            other.args, other.kwargs = self.args, self.kwargs
            other.in_backward, other.recompute = self.in_backward, self.recompute

    def let_go(self) -> None:
        """Drop the arguments, since the forward hooks have run."""
        for each in (self, *(self._others or {}).values()):
            each.args, each.kwargs = (), {}

    @property
    def module(self) -> str | None:
        """Dotted name of `owner`, in the model that is running; empty for the model itself, None outside of any."""
        if self.owner is None:
            return None
        outermost: nn.Module | None = self._outermost
        if outermost is None:
            outermost = _outermost_running()
        return _name_in(outermost, self.owner) or ""

    def locate(self) -> None:
        """Note the model that is running now: a gradient hook asks when it no longer is."""
        if self.owner is not None:
            for each in (self, *(self._others or {}).values()):
                if each._outermost is None:
                    each._outermost = _outermost_running()

    def __repr__(self) -> str:
        where = f" in {self.module!r}" if self.owner is not None else ""
        return f"<{self.name}{where}, call {self.call}>"


def _outermost_running() -> nn.Module | None:
    return next(reversed(_torch.all_running()), None)


_NAMES: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def _name_in(model: nn.Module | None, module: nn.Module) -> str:
    """Return the module's first name in the model; its class's where it is not in there (or the model is over)."""
    if model is None:
        return type(module).__name__
    module = unwrap(module)
    names = _NAMES.get(model)
    if names is None or id(module) not in names or not _is_at(model, names[id(module)], module):
        names = _NAMES[model] = {id(child): name for name, child in clean_modules(model)}
    return names.get(id(module), type(module).__name__)


def _is_at(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether the module is still where it was; another may have its id by now."""
    try:
        return submodule(model, name) is module
    except AttributeError:
        return False
