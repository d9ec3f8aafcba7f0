"""Keep one hook at one site: what was asked for, what it has done, and what it is told of the moment it fires at.

An `Attachment` is what one call of a verb, or of a product such as ``capture``, asked for; ``attach.new_attachment``
makes it. A `HookAtSite`, one of its *entries*, is the hook at one site (a module, function, tensor, …).
``module_hooks``, ``parameters``, ``tensors``, ``optimizers``, ``everywhere`` and ``attach_function`` make entries, and
call them when torch calls; ``gradients`` and ``compiled.op_runtime`` call them too. Handles, ``receipt``, ``find``,
``engines`` and others read attachments and entries.

A `ForwardCounter` counts the forwards of the model that was attached to: ``module_hooks`` makes and ends it,
``parameters`` and ``attach_function`` ask that for it, ``watch`` reads it. ``attach`` and ``capture`` open a context
(``scope="context"``); `HookAtSite.is_due`, ``gradients``, ``compiled.op_runtime`` and ``capture`` ask which are open;
handles and ``capture`` close it. `next_order` is the clock by which ``module_hooks``, ``gradients``,
``attach_function``, ``compiled`` and ``guard.snapshot`` know what came first. ``factories`` and ``engines`` derive
hooks from `PerSiteHook`.

Users get a `Site`, an `OptimizerSite` or a `FunctionSite`: hooks that declare ``*, site`` at each firing, hooks on
functions as their first argument. The fields of all three are public. A `Site` is made here (`HookAtSite.site`,
`FunctionSite.site`), in ``gradients``, ``parameters``, ``tensors``, ``find``, ``factories.steering`` and, while the
compiler traces, in ``compiled.trace_hooks``. Most of these give its fields by position: a new field comes last, with a
default. `Site` has to stay a plain dataclass that is cheap to make and that the compiler can trace.

The hot paths of ``module_hooks``, ``gradients`` and ``attach_function`` call ``entry.hook`` straight where an entry is
``simple``. So a new option that changes how a hook is called has to make ``simple`` False. It is honoured in
``run_one_pre`` and ``run_one_post`` of ``module_hooks``, in ``fire`` and `OutputCall.take_output` of ``gradients``
(which takes an entry that is not simple for one that wants a site), and in ``compiled.trace_hooks``, which calls
editing hooks itself. The head of ``attach`` has the rest of that recipe. Tests: tests/sites.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hookline.errors import HooklineWarning
from hookline.sites import _torch
from hookline.sites.kinds import MODULE, Kind
from hookline.sites.wrappers import clean_modules, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn
    from torch.optim import Optimizer

    from hookline.hook_types import Hook
    from hookline.sites.compiled.op_schemas import Summary
    from hookline.sites.kinds import SiteType
    from hookline.sites.module_hooks import ModuleHooks

next_order = itertools.count().__next__
"""One clock for attachments and calls: a gradient hook takes part in the calls that begin after it was attached."""

# -- contexts: a hook with scope="context" fires for the thread, or asyncio task, that attached it alone ---------

_NUMBERS: Final = itertools.count()
_LIVE: Final[set[int]] = set()
_OPEN: Final[ContextVar[frozenset[int]]] = ContextVar("hookline_open_contexts", default=frozenset())

open_contexts: Final = _OPEN.get
"""Return the numbers of the open contexts. On CUDA the backward has a thread of its own, so ask in the forward.

What the owner starts in a copy of its context (a task, ``asyncio.to_thread``) is the owner's too.
"""


def open_context() -> int:
    """Open a context here; return its number."""
    number = next(_NUMBERS)
    known = _OPEN.get()
    _OPEN.set((known if _torch.in_run() else known & _LIVE) | {number})
    _LIVE.add(number)
    return number


def close_context(number: int) -> None:
    """Forget a context whose hook is off; a firing that is under way still runs it."""
    _LIVE.discard(number)


# -- the forwards of a model -------------------------------------------------------------------------------------


class _ThreadForward(threading.local):
    """The forward that this thread is in; two threads on one model count apart."""

    # Defaults of the class, since setting one for an object takes as long as a call does.
    step = -1
    training: bool | None = None
    """The mode that the model was in when its forward began; None before one has."""
    gradients = True
    """Whether gradients were on then."""
    by_part = False
    """Whether a call of a part began this step, because the model's own forward is not called."""
    order = -1
    """When it began, by `next_order`."""
    _repeated: tuple[int, dict[Any, int]] = (-1, {})
    """The backward pass that repeats parts of the forward (checkpointing), and its own counts."""

    def __init__(self) -> None:
        self.calls: dict[Any, int] = {}

    def calls_in(self, task: int) -> dict[Any, int]:
        """Return the counts of a backward pass ``task`` that repeats parts of this forward."""
        if self._repeated[0] != task:
            self._repeated = (task, {})
        return self._repeated[1]


class ForwardCounter:
    """Counts the forwards of one model, and the calls in each; lives while a hook is attached through the model."""

    __slots__ = ("_counter", "_registered", "follow", "here", "hooked", "in_runs", "model", "stand_in", "step", "users")

    on_uncalled: ClassVar[Callable[[ForwardCounter], None]]
    """Looks for a part that stands in for the model; set by ``module_hooks``, which is above this file."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else lambda: None
        """The model, unless it is gone."""
        self.step = -1
        """The newest forward of any thread."""
        self.users: dict[Attachment, None] = {}
        """The attachments through this model."""
        self.in_runs = False
        """Whether one of them has been for hooks that fire in a run. For others, on saving and loading, compiled code
        need not be made again to count forwards."""
        self.hooked: set[ModuleHooks] = set()
        """Those of the modules that were attached to through this model."""
        self.follow: Callable[[ForwardCounter], None] | None = None
        """``parameters._follow``, once there are hooks on parameters: moves them to what has replaced theirs."""
        self.stand_in: Callable[[], ModuleHooks | None] = lambda: None
        """The hooks of the part whose calls begin the steps, where the model's own forward is not called."""
        self._counter = itertools.count()
        self._registered = -1, -1
        """How many hooks had been registered with torch, of any kind, when the last two forwards began: torch counts a
        hook before it is in its place."""
        self.here = _ThreadForward()
        """The forward of this thread; ``watch`` reads it here, since `moment` would count a call."""

    def serve(self, attachment: Attachment) -> None:
        """Count for an attachment, until `release_counters`."""
        self.users[attachment] = attachment.counters[self] = None

    def begin(self, gradients: bool | None = None, *, by_part: bool = False) -> None:
        """Begin a forward in this thread, with ``gradients`` on; as they are now, if left out.

        With ``by_part``, a call of a part stands in for it.
        """
        if _torch.graph_task_id() != -1:
            return  # activation checkpointing repeats one
        current = self.here
        current.step = self.step = next(self._counter)
        current.calls = {}
        current.by_part = by_part
        current.order = next_order()
        current.training = self.training_now()
        current.gradients = torch.is_grad_enabled() if gradients is None else gradients
        registered = RemovableHandle.next_id
        if self._registered != (registered, registered):  # hooks of others may have come; to look takes 1 µs a module
            for hooks in tuple(self.hooked):
                hooks.keep_places()
            self._registered = self._registered[1], registered
        if self.follow is not None:
            self.follow(self)
        if _torch.capturing():
            _warn_captured(type(self.model()).__name__)

    def begin_by_part(self) -> None:
        """Begin a forward with the call of a part that stands in for the model."""
        # Gradients may be off around a frozen part, which says nothing of the model: there its mode decides.
        self.begin(self.training_now() or torch.is_grad_enabled(), by_part=True)

    def mode(self) -> tuple[bool, bool]:
        """Return whether the forward that is under way began in training mode, and whether gradients were on then.

        Where parts of the model are called without it, its mode decides: gradients may be off for one part alone (a
        frozen one, or one that is checkpointed).
        """
        current, training = self.here, self.training_now()
        if current.training is training:
            return training, current.gradients
        return training, training or torch.is_grad_enabled()

    def training_now(self) -> bool:
        """Return whether the model is in training mode at this moment."""
        model = self.model()
        return model is None or model.training

    def find_stand_in(self) -> None:
        """Let the calls of a part of the model begin steps, where the part is called and the model is not."""
        if self.stand_in() is None and _torch.graph_task_id() == -1:
            self.on_uncalled()

    def moment(self, key: Hashable) -> tuple[int, int]:
        """Count one more call of ``key``; return the step of this thread and how many calls were before it."""
        current = self.here
        if current.step == -1:
            self.find_stand_in()
        task = _torch.graph_task_id()
        calls = current.calls if task == -1 else current.calls_in(task)
        call = calls.get(key, 0)
        calls[key] = call + 1
        return current.step, call


NO_MODEL: Final = ForwardCounter()
"""The counter of hooks that belong to no model; no forward of it ever begins."""


@functools.cache
def _warn_captured(name: str) -> None:
    """Warn, once for a class of models, that a CUDA graph which is being recorded will call no hooks."""
    warnings.warn(
        f"A forward of this {name} is being recorded as a CUDA graph: its replays call no hooks. Run it "
        "without the graph where hooks are to fire, or use torch.compile(mode='reduce-overhead'), which makes graphs "
        "around them.",
        HooklineWarning,
        stacklevel=2,
    )


# -- what a hook is told ------------------------------------------------------------------------------------------


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


# -- what was asked for, and what became of it -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """The options that the verbs share, as the user gave them; ``attach`` documents each."""

    prepend: bool = False
    with_kwargs: bool = False
    always_call: bool = False
    observe: bool = False
    name: str | None = None
    scope: str = "process"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Attachment:
    """The request of one call of a verb, and its hooks at sites."""

    hook: Hook
    kind: Kind
    name: str
    options: AttachOptions = AttachOptions()
    site_type: SiteType = MODULE
    counters: dict[ForwardCounter, None] = field(default_factory=dict)
    """The models it was attached through: one, or for process-wide hooks each model as it is met."""
    wants_site: bool = False
    everywhere: bool = False
    context: int | None = None
    """The context whose calls it fires for (``scope="context"``); None for all."""
    may_edit: bool = True
    """Whether the return value can replace a gradient; if not, gradients are watched without touching the graph."""
    in_place: bool = False
    """Whether the hook changes what it is shown in place."""
    order: int = field(default_factory=next_order)
    entries: dict[HookAtSite, None] = field(default_factory=dict)
    for_site: Callable[[str], Any] | None = None
    """For a hook that gives each site a function of its own (`PerSiteHook`): returns that of the site with a name."""
    summary: Summary | None = None
    """For an observer that leaves a summary of its values in compiled code, instead of being called there."""
    reads: str = "ako"
    """Which of arguments ("a"), keyword arguments ("k") and output ("o") the hook reads: a compiled call passes it no
    others. The head of ``signature`` says who writes and who reads the letters."""
    removed: bool = False
    on_remove: Callable[[Attachment], None] | None = None
    """Called when the hook comes off."""
    retired: int = 0
    """Firings on modules that are gone, and whose entries were dropped."""
    turns: dict[str, tuple[int, int]] | None = None
    """For a hook of ``specs`` with a schedule, which is called at each firing and runs at some: how often it ran at
    each site, and its last step. Receipts show these."""

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Sort key among the hooks of one site and kind: edits first, then process-wide hooks, then by age.

        Among hooks with ``prepend`` the newest is first, and before those without.
        """
        return self.options.observe, not self.everywhere, -self.order if self.options.prepend else self.order

    def members(self) -> list[HookAtSite]:
        """Return the entries as they are now; one goes when its module is collected, at any time."""
        return list(self.entries)

    def drop_entry(self, entry: HookAtSite) -> None:
        """Drop an entry whose module is gone: of a process-wide hook only the count is kept."""
        if self.everywhere and entry in self.entries:
            del self.entries[entry]
            self.retired += entry.fired
            if entry.counter.model() is None:
                self.counters.pop(entry.counter, None)


ON_NO_MODEL: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
"""What was attached to no model or optimizer in particular; to be changed and gone through under ``LOCK``."""


class PerSiteHook(ABC):
    """A forward observer with a function for each site; ``attach`` asks it once for each module.

    Making a `Site` at every firing, and finding the state of the module by its name, takes longer than keeping a small
    tensor does.
    """

    summary: Summary | None = None
    """What compiled code hands the outputs over to, instead of calling the hook for each module."""

    @property
    def is_per_site(self) -> bool:
        """Whether it is to be used so; otherwise it is called as any other hook is."""
        return True

    @abstractmethod
    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what is called with module, arguments and output at the site called ``name``."""


class HookContainer:
    """Holds hooks at sites; base of the objects that have torch call us, such as `ModuleHooks` and `LeafHook`."""

    __slots__ = ()

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off, unless it is off already, or torch's own handle does that."""


class HookAtSite:
    """One hook on one module, function, tensor, …; listed in its attachment from the start."""

    __slots__ = (
        *("attachment", "container", "counter", "fired", "hook", "last_step", "name", "rank"),
        *("simple", "step_at_attach"),
    )

    def __init__(self, attachment: Attachment, name: str, container: Any, counter: ForwardCounter) -> None:
        options = attachment.options
        self.attachment = attachment
        self.rank = attachment.rank
        """Sort key among the hooks of one site and kind."""
        self.hook = attachment.hook if attachment.for_site is None else attachment.for_site(name)
        self.simple = attachment.context is None and not (
            attachment.wants_site or options.with_kwargs or options.always_call
        )
        """Whether the hook can be called straight, without looking at options."""
        self.counter = counter
        self.step_at_attach = counter.step
        self.name = name
        self.container = container  # a `HookContainer`; each type of site has its own
        self.fired = 0
        self.last_step = -1
        attachment.entries[self] = None

    def is_due(self) -> bool:
        """Return whether the hook fires for the context that this call is made in."""
        context = self.attachment.context
        return context is None or context in open_contexts()

    def count(self) -> None:
        """Note that the hook is about to run."""
        self.fired += 1
        self.last_step = self.counter.step

    def site(self, module: Any) -> Site:
        """Return the `Site` of this firing, for a hook that declares one. It counts a call: ask once per firing."""
        step, call = self.counter.moment(self)
        training, gradients = self.counter.mode()
        kind, again = self.attachment.kind, _torch.in_recomputation()
        return Site(self.name, module, kind, call, step, again, training=training, gradients=gradients)

    def call(self, module: Any, args: tuple[Any, ...], site: Any = None) -> Any:
        """Run the hook, with its site if it wants one; ``args`` are those of its kind after the module."""
        if not self.attachment.wants_site:
            return self.hook(module, *args)
        return self.hook(module, *args, site=self.site(module) if site is None else site)
