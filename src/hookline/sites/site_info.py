"""Define `Site`, `OptimizerSite` and `FunctionSite`: the place of a hook, and, while it fires, the moment.

Users get them: hooks that declare ``*, site`` one at each firing, function hooks a `FunctionSite` as their first
argument; ``find`` lists sites. They are made by `HookAtSite.site`, ``gradients.backward_call``, ``parameters``,
``tensors``, ``optimizers``, ``functions.attach_function`` and, while the compiler traces, ``compiled.trace_hooks``.

Most makers give the fields of `Site` by position: a new field comes last, with a default. `Site` has to stay a plain
dataclass that is cheap to make and that the compiler can trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules, unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hookline.sites.hook_at_site import ForwardCounter
    from hookline.sites.kinds import Kind


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that takes 1.9 µs to make instead of 0.4, at every firing
class Site:
    """A place where a hook sits, and the moment at which it fires.

    A hook that declares a keyword-only ``site`` is handed one at each firing:

        def hook(module, args, output, *, site):
            print(site.name, site.kind, site.call, site.step)
    """

    name: str
    """Dotted name in the model that was attached to; empty for that model itself."""
    module: nn.Module
    """The module."""
    kind: Kind | None = None
    """The kind of the hook that is firing; None in a listing."""
    call: int = 0
    """Which call of this module since its model's forward began: 0 for the first, 1 when it is reused, …"""
    step: int = -1
    """Which forward of the model, counted from 0 since the first hook came on; -1 before one began."""
    recompute: bool = False
    """Whether this forward only repeats an earlier one for activation checkpointing."""
    inputs: tuple[str, ...] = ()
    """For gradient hooks: which input each entry of ``grad_input`` belongs to ("0", "hidden_states", …)."""
    outputs: tuple[str, ...] = ()
    """For gradient hooks: which output each entry of ``grad_output`` belongs to ("", "0", "logits", …)."""
    training: bool = True
    """Whether the model was in training mode when its forward began; for gradient hooks, whether it is now."""
    gradients: bool = True
    """Whether gradients were on when the model's forward began, whatever they are around this module."""

    @property
    def type(self) -> str:
        """The module's class name."""
        return type(self.module).__name__

    @property
    def num_parameters(self) -> int:
        """The count of numbers in the module's parameters, its children's included; lazy ones hold none yet."""
        return sum(p.numel() for p in self.module.parameters() if not is_lazy(p))


@dataclass(frozen=True, slots=True)
class OptimizerSite:
    """The optimizer that a hook is on, and the step in which it fires.

    A hook that declares a keyword-only ``site`` is handed one at each firing:

        def hook(optimizer, args, kwargs, *, site):
            print(site.name, site.kind, site.step)
    """

    name: str
    """The optimizer's class name."""
    optimizer: Optimizer
    """The optimizer."""
    kind: Kind
    """The kind of the hook that is firing."""
    step: int = -1
    """The newest step of this optimizer, counted from 0 since its first hook came on; -1 before one began."""


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
        self.owner = next(_torch.running(), None)
        """The module whose forward makes the call; None outside of any."""
        self.step, self.call = first.moment(name)
        """Which forward of the model (-1 without ``within=``), and which call of this function since that began
        (without ``within=``, since the first hook in this thread)."""
        self.in_backward = _torch.graph_task_id() != -1
        """Whether a backward pass makes the call."""
        self.recompute = self.in_backward and _torch.in_recomputation()
        """Whether the call only repeats an earlier one for activation checkpointing."""
        self.args = args
        """The positional arguments as given, for forward hooks; empty after these."""
        self.kwargs = kwargs
        """The keyword arguments, likewise."""
        self._model = list(_torch.running())[-1] if model is None and self.owner is not None else model
        self._others = {counter: FunctionSite(name, func, args, kwargs, (counter,)) for counter in others}

    def seen_from(self, counter: ForwardCounter) -> FunctionSite:
        """Return this call as the hooks of ``counter`` see it: the same function, with their step and call."""
        return self._others.get(counter, self)

    def let_go(self) -> None:
        """Drop the arguments, since the forward hooks have run: the graph may hold this, and they hold the graph."""
        for each in (self, *self._others.values()):
            each.args, each.kwargs = (), {}

    @property
    def module(self) -> str | None:
        """Dotted name of `owner`, in the outermost model that ran; empty for the model itself, None outside of any."""
        if self.owner is None or self._model is None:
            return None
        owner = unwrap(self.owner)
        names = (name for name, module in clean_modules(self._model) if module is owner)
        return next(names, type(owner).__name__)

    def site(self, kind: Kind, *, recompute: bool = False) -> Site:
        """Return the site of a hook of that kind that fires for this call."""
        owner: Any = self.owner
        return Site(self.name, owner, kind, self.call, self.step, recompute)

    def __repr__(self) -> str:
        where = f" in {self.module!r}" if self.owner is not None else ""
        return f"<{self.name}{where}, call {self.call}>"
