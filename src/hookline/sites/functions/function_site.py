"""One call of a function, as its hooks see it.

Made by `FunctionHooks` at each call that a hook is due for, handed to the hook as its first argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
        *("_model", "_others", "args", "call", "func", "in_backward", "kwargs", "name", "owner", "recompute", "step"),
    )

    def __init__(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        counters: tuple[ForwardCounter, ...],
    ) -> None:
        first, *others = counters
        model = first.model()
        self.name = name
        """Its full name: "torch.nn.functional.softmax", "aten.mm.default", "package.MyFunction"."""
        self.func = func
        """The function, operator or ``autograd.Function`` class itself."""
        self.owner = _torch.running_module()
        """The module whose forward makes the call; None outside of any."""
        self.step, self.call = first.moment(name)
        """Which forward of the model (-1 without ``within=``), and which call of this function since that began
        (without ``within=``, since the first hook in this thread)."""
        self.in_backward = _torch.graph_task_id() != -1
        """Whether a backward pass makes the call."""
        self.recompute = self.in_backward and _torch.in_recomputation()
        """Whether the call only repeats an earlier one for activation checkpointing."""
        self.args = args
        """The positional arguments as given; for forward hooks, and gone after them."""
        self.kwargs = kwargs
        """The keyword arguments, likewise."""
        self._model = _torch.all_running()[-1] if model is None and self.owner is not None else model
        self._others = {counter: FunctionSite(name, func, args, kwargs, (counter,)) for counter in others}

    def seen_from(self, counter: ForwardCounter) -> FunctionSite:
        """Return the same call as it is named and counted for the hooks of ``counter``."""
        return self._others.get(counter, self)

    def let_go(self) -> None:
        """Drop the arguments, since the forward hooks have run: the graph may hold this, which must not hold it."""
        for each in (self, *self._others.values()):
            each.args, each.kwargs = (), {}

    @property
    def module(self) -> str | None:
        """Dotted name of `owner`, in the outermost model that ran; empty for the model itself, None outside of any."""
        return None if self.owner is None else _name_in(self._model, self.owner)

    def __repr__(self) -> str:
        where = f" in {self.module!r}" if self.owner is not None else ""
        return f"<{self.name}{where}, call {self.call}>"


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
