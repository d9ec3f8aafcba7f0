"""Give the tensors of modules and parameters to the statistics engine, in the passes and steps that count.

`Watch` (watch.py) makes one `WatchSites`. It puts a `ModuleStatsHook` on modules, one for all modules of a kind, and
has a `ParameterReader`, which `Watch` calls at steps and when numbers are asked for. In compiled code a hook leaves a
summary of the tensor in the graph instead of being called (`Summary` of sites/compiled/op_schemas.py; op_runtime.py
there calls ``prepare``), unless it needs the tensor itself (``switch`` of `WatchSites` says when). A hook here
observes: an error of its own must not end the run.

Hooks ask `Passes`, which decides about each forward once. A step is a step of the optimizer. `OptimizerSteps` tells
`Watch`, and a trace (debug/compare/trace.py), of each; `Steps` counts them.

A new kind of ``watch(on=...)`` changes all places that know the names of kinds:
- here `_KINDS`; for modules `_MODULE_KINDS`, `ModuleStatsHook` (``_is_forward``, a method for the kind) and ``switch``
  of `WatchSites`; for parameters the ``slots`` of `_choose_parameters` and `ParameterReader`;
- engine.py (`_AT_ONCE`), ranks.py (`_MODULES`, `_PARAMETERS`), watch.py (docstring of `watch`; ``_forget``, ``step``
  and ``load_state_dict`` of `Watch`), monitor.py (`listen`);
- report/metric_series.py (`KINDS`), report/anomalies.py (`_GRADIENT`, and ``"/param"`` in `_dead_units`);
- analyses/layers.py (docstring, defaults, `describe_metrics`; it, watch.py and monitor.py call `checked_kinds`);
- debug/first_bad: step_alarm.py (``on=``), flight_recorder.py and find_bad_operations.py (`listen`, `_are_all`);
- docs/analyses/layers.md, and tests/observe/watch/test_watch.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookline.error_policy import warn_user
from hookline.errors import NoMatchError, OptionError
from hookline.messages import suggest, type_name
from hookline.observe.watch.graph import GraphHandover, find_in
from hookline.observe.watch.row import BAD, INF, NAN
from hookline.phases import During, phase
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.compiled.op_schemas import Summary
from hookline.sites.everywhere import attach_everywhere
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import NO_MODEL, AttachOptions, ForwardCounter
from hookline.sites.kinds import Kind
from hookline.sites.optimizers import attach_optimizer, checked_optimizer
from hookline.sites.parameters import select_parameters
from hookline.sites.targets import Named, select
from hookline.tree import main_of, main_tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookline.hook_types import Target
    from hookline.observe.watch.engine import StatsEngine, WatchedPlace
    from hookline.observe.watch.row import Layout
    from hookline.sites.compiled.op_schemas import Found, Share

_STATE: Final = ("what", "count", "is_due", "last_look", "_has_begun")
"""The attributes of `Steps` that a checkpoint keeps, by name."""


class OptimizerSteps:
    """Calls `on_step` with an optimizer once for each of its steps, when gradients are final.

    That is just before the step, or just after it if the step is given a closure, which makes the gradients in it.

    Args:
        given: The optimizers; None for every one that holds parameters of `model`.
        on_step: What is called.
        model: The model; not used where optimizers are given.
    """

    def __init__(
        self,
        given: Optimizer | Sequence[Optimizer] | None,
        on_step: Callable[[Optimizer], None],
        model: nn.Module | None = None,
    ) -> None:
        self._on_step = on_step
        self._model = model if given is None else None
        self._holds: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """For each optimizer that has stepped, whether its steps count."""
        self._handles = HandleSet()
        listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if not listed:
            raise OptionError("optimizer= is an empty list; leave it out, or give the optimizers whose steps count.")
        optimizers = [] if given is None else [checked_optimizer(each) for each in listed]  # before any has a hook
        for kind, is_before in (("step_pre", True), ("step_post", False)):
            # By a weak reference: a hook on every optimizer must not keep this, a watch and its model alive.
            hook = functools.partial(_tell, weakref.ref(self), is_before)
            if given is None:
                self._handles.add(attach_everywhere(hook, on=kind, observe=is_before, name="watch"))
            for each in optimizers:
                self._handles.add(attach_optimizer(each, hook, on=kind, observe=is_before, name="watch"))
        weakref.finalize(self, self._handles.remove, quiet=True)

    def note(self, optimizer: Optimizer) -> None:
        """Tell of a step."""
        if optimizer not in self._holds:
            own = set() if self._model is None else set(map(id, self._model.parameters()))
            held = (id(each) for group in optimizer.param_groups for each in group["params"])
            self._holds[optimizer] = self._model is None or not own.isdisjoint(held)
        if self._holds[optimizer]:
            self._on_step(optimizer)

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)


def _tell(steps: weakref.ref[OptimizerSteps], is_before: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Tell ``steps``, if they are alive, of a step: by the hook before it, or, with a closure, by the one after it."""
    found = steps()
    has_closure = any(callable(each) for each in (*args, *kwargs.values()))
    if found is not None and is_before is not has_closure:
        found.note(optimizer)


class Steps:
    """Counts the steps of one watch by a schedule.

    A step is one of the optimizer; of several, of the one that is ahead of the others. Until one has stepped, each
    forward that counts is a step. Once the user calls ``watch.step()``, that alone ends a step.
    """

    BY_FORWARD: Final = "one forward of the model, until an optimizer steps"
    BY_OPTIMIZER: Final = "the optimizer's step"
    BY_HAND: Final = "watch.step()"
    """What a step is, in the words of reports. Checkpoints have these texts: another text would change resumed runs."""

    def __init__(self, begin: Callable[[int], bool]) -> None:
        self._begin = begin
        """Called with each step when it begins; returns whether it is due."""
        self.restart(self.BY_FORWARD)

    def restart(self, what: str) -> None:
        """Count from 0: no step has been made, and `what` is one, in words."""
        self.what = what
        """What a step is: `BY_FORWARD`, `BY_OPTIMIZER` or `BY_HAND`."""
        self.count = 0
        """How many steps are over."""
        self.is_due = self._begin(0)
        """Whether the step that is under way is due."""
        self.last_look: int | None = None
        """The number of the latest step that is over and was due; None if there is none."""
        self._was_due = False
        self._has_begun = False
        """Whether a forward has begun, where that is a step."""
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The step that each optimizer makes next."""

    @property
    def needs_hooks(self) -> bool:
        """Whether hooks have to be on now.

        Where a forward is a step, they are always on: when it begins, it is too late to put them on. They then do
        nothing at steps that are not due.
        """
        return self.is_due or self.what == self.BY_FORWARD

    def advance(self) -> None:
        """Count one more step."""
        self._was_due = self.is_due
        self.last_look = self.count if self.is_due else self.last_look
        self.count += 1
        self.is_due = self._begin(self.count)

    def begin_forward(self) -> None:
        """Count a forward that begins, where a forward is a step: the step before ends now."""
        if self.what == self.BY_FORWARD:
            if self._has_begun:
                self.advance()
            self._has_begun = True

    def is_due_for(self, optimizer: Optimizer) -> bool:
        """Return whether the step that an optimizer makes now is due; one that is behind makes the step before."""
        return self.is_due if self._step_of(optimizer) == self.count else self._was_due

    def count_step_of(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer, unless another one has ended that step."""
        step = self._step_of(optimizer)
        if step == self.count:
            self.advance()
        self._made[optimizer] = step + 1

    def _step_of(self, optimizer: Optimizer) -> int:
        """Return the number of the step that an optimizer makes now.

        One that was never seen takes part in the step that another optimizer has just ended, if there was one.
        """
        return min(self._made.get(optimizer, self.count - bool(self._made)), self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._made.clear()
        for name in _STATE:
            setattr(self, name, state[name])


class _Decision(threading.local):
    """What was decided about the forward of this thread."""

    which: tuple[int, bool] | None = None
    """Which forward: its order number, and the mode of the model."""
    counts = False
    """Whether it counts, by its phase."""


class Passes:
    """Decides by schedule, pauses and ``during=`` whether a pass through `model` counts."""

    def __init__(self, model: nn.Module, during: During, steps: Steps) -> None:
        self.during = during
        self.steps = steps
        self.paused = 0
        """How many ``paused()`` blocks are open."""
        self.counter: ForwardCounter = NO_MODEL
        """Counts the forwards of the model while hooks are on it; `WatchSites` puts it here when it attaches them."""
        self.on_forward: Callable[[], None] = lambda: None
        """Called when a forward that counts begins; the step monitor (monitor.py) sets it."""
        self.in_parts = False
        """Whether parts of the model were called without it."""
        self._model = model
        self._forward = _Decision()
        self._backward = -1, False
        """The last backward pass, and whether it counts."""

    def enter_forward(self) -> bool:
        """Return whether an output of the current forward counts; that is decided at the first output of a forward.

        It is decided again if the mode of the model has changed since: a part may be called alone then.
        """
        if _torch.graph_task_id() != -1 and _torch.in_recomputation():  # it was counted the first time
            return False
        counter, decision = self.counter, self._forward
        if counter.here.step == -1:
            counter.find_stand_in()
        which = counter.here.order, self._model.training
        if decision.which != which:
            decision.which = which
            self.in_parts = self.in_parts or counter.here.by_part
            decision.counts = self.during.count_forward(*counter.mode(), which)
            if decision.counts:
                self.on_forward()
                self.steps.begin_forward()
        return decision.counts and self.steps.is_due and not self.paused

    def enter_backward(self) -> bool:
        """Return whether the gradients of the current backward pass count; that is decided once for each pass."""
        task = _torch.graph_task_id()
        if task == -1 or self._backward[0] != task:
            is_due = self.steps.is_due and not self.paused
            self._backward = task, is_due and self.during.counts_backward(self._model.training)
        return self._backward[1]

    def counts_now(self) -> bool:
        """Return whether a value of the user's, or a step of an optimizer, counts now, whatever the model's mode."""
        return not self.paused and phase() in self.during.phases


# -- hooks -----------------------------------------------------------------------------------------------------------

_KINDS: Final = ("forward", "backward", "param", "param_grad")
_MODULE_KINDS: Final = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD_PRE}
"""The kinds that hooks on modules see."""


def checked_kinds(on: str | Iterable[str] | None) -> list[str]:
    """Return the kinds that `on` names; for None, all."""
    kinds = list(dict.fromkeys(_KINDS if on is None else [on] if isinstance(on, str) else on))
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown or not kinds:
        got = f"unknown kind {unknown[0]!r}{suggest(unknown[0], _KINDS) or '.'}" if unknown else "no kind."
        raise OptionError(f"watch(on=...): {got} There are {', '.join(map(repr, _KINDS))}.")
    return kinds


class ModuleStatsHook(Summary):
    """Adds up the statistics of what modules return, or of the gradients of that.

    Its places are each a `WatchedPlace` (engine.py). The ``deferred`` of one is the `PendingTensors` (pending.py) that
    may hold its tensors for later, or None.

    Args:
        engine: Where they are added up.
        model: The model; when its own forward is over, tensors that wait are reduced.
        kind: ``"forward"`` or ``"backward"``.
        passes: Which passes count.
        scale: Returns what the gradients of this moment are multiplied by, if anything.
    """

    def __init__(
        self, engine: StatsEngine, model: nn.Module, kind: str, passes: Passes, scale: Callable[[], Tensor | None]
    ) -> None:
        self._engine = engine
        self._model = model
        self._kind = kind
        self._is_forward = kind == "forward"
        self._enter = passes.enter_forward if self._is_forward else passes.enter_backward
        self._scale = (lambda: None) if self._is_forward else scale
        self.sites: list[Named] = []
        """The modules by name."""
        self._places: dict[int, WatchedPlace] = {}
        """By the identity of these modules, which live as long as the hook is on them."""
        self.summarize(engine.layout)

    def add(self, sites: list[Named]) -> list[WatchedPlace]:
        """Look at these modules too; return their places."""
        for name, module in sites:
            if id(module) not in self._places:
                self._places[id(module)] = self._engine.place(name, self._kind)
                self.sites.append((name, module))
        return [self._places[id(module)] for _, module in sites]

    def summarize(self, layout: Layout) -> None:
        """Have compiled code find what ``layout`` says, from when it is compiled again."""
        self.make = _maker(layout, not self._is_forward)
        # For `Summary`: the same for equal layouts in every process, as the compiler's code on disk has it.
        self.number = zlib.crc32(f"{layout!r} {self._is_forward}".encode())

    def forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the output of a module."""
        if self._enter():
            self._take(module, output)
            if module is self._model:
                self._engine.flush()

    def backward(self, module: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of a module's output."""
        if self._enter():
            self._take(module, grads[0] if len(grads) == 1 else grads)

    def _take(self, module: nn.Module, value: Any) -> None:
        place = self._places.get(id(module))
        if place is None:  # a copy of a module takes its hooks along, and goes unwatched
            return
        try:
            scale = self._scale()
            if place.deferred is not None and place.deferred.note(place, value, scale, _torch.graph_task_id()):
                return
            tensor = value if isinstance(value, Tensor) else main_tensor(value)
            if tensor is not None:
                self._engine.take(place, tensor, scale)
            elif self._is_forward and not place.silent:  # of gradients, none may have come
                place.silent = f"there is no tensor in its output, {type_name(value)}"
                text = f"{place.label!r} cannot be watched: {place.silent}. Watch a module inside it, or leave it out "
                warn_user(f"{text}(exclude=).")
        except Exception as error:  # a watch must not end the run
            place.give_up(value, error)

    def prepare(self, sites: Sequence[tuple[str, nn.Module, Share]]) -> Callable[[list[Tensor]], None]:
        """Return what takes the summaries of one operator in a graph: rows and launches are worked out once."""
        places = self._places
        shares = [(places[id(module)], share) for _, module, share in sites if id(module) in places]
        handover = GraphHandover(self._engine, shares)

        def take(found: list[Tensor]) -> None:
            if self._enter():
                try:
                    handover.take(found, self._scale())
                except Exception as error:  # a watch must not end the run
                    for place, share in shares:
                        place.give_up(share.of(found)[0], error)

        return take


@functools.cache
def _maker(layout: Layout, is_gradient: bool) -> Callable[[list[Tensor]], Found | None]:
    """Return what summarizes the main one of several tensors; one per layout, so that compiled code can be reused."""

    def make(tensors: list[Tensor]) -> Found | None:
        main = main_of(tensors)
        return None if main is None else find_in(main, layout, is_gradient=is_gradient)

    return make


class ParameterSlot(NamedTuple):
    """A parameter by its module and name: FSDP2 or ``load_state_dict(assign=True)`` may put another one there."""

    module: nn.Module
    key: str
    place: WatchedPlace

    def current(self) -> Tensor | None:
        """Return the parameter that is there now."""
        parameters = self.module._parameters
        found = parameters[self.key] if self.key in parameters else None  # noqa: SIM401  (ScriptModule has no get)
        return None if found is None or is_lazy(found) else found


class ParameterReader:
    """Reads the parameters of one watch, and their gradients."""

    def __init__(self, engine: StatsEngine) -> None:
        self._engine = engine
        self.values: list[ParameterSlot] = []
        """The parameters that are read."""
        self.gradients: list[ParameterSlot] = []
        """The parameters whose gradients are read."""
        self.at_steps: set[WatchedPlace] = set()
        """The places whose gradients are read at steps; other gradients are read when numbers are asked for."""

    def read(self, scale: Any) -> None:
        """Take parameters as they are now, and gradients that no step reads; forget what was taken of them before."""
        found = [(slot.place, slot.current(), None) for slot in self.values]
        others = [slot for slot in self.gradients if slot.place not in self.at_steps]
        found += [(slot.place, _gradient(slot.current()), scale) for slot in others]
        for place, _, _ in found:
            place.empty()
        self._take(found)

    def read_step(self, scale: Any, of: Optimizer | None = None, *, counts: bool) -> None:
        """Add the gradients as they are at a step, if it `counts`; of an optimizer, those of its own parameters."""
        if not counts and len(self.at_steps) == len(self.gradients):
            return
        own = None if of is None else {id(each) for group in of.param_groups for each in group["params"]}
        slots = [slot for slot in self.gradients if own is None or id(slot.current()) in own]
        for slot in slots:
            if slot.place not in self.at_steps:
                self.at_steps.add(slot.place)
                slot.place.empty()
        if counts:
            self._take([(slot.place, _gradient(slot.current()), scale) for slot in slots])

    def _take(self, items: list[tuple[WatchedPlace, Tensor | None, Any]]) -> None:
        self._engine.take_all([(place, value, scale) for place, value, scale in items if value is not None])


def _gradient(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.grad


class WatchSites:
    """The hooks of one watch.

    Args:
        model: The model.
        engine: Where the hooks add up.
        passes: Which passes count.
        scaler: The ``GradScaler`` in use, or None.
    """

    def __init__(self, model: nn.Module, engine: StatsEngine, passes: Passes, scaler: Any) -> None:
        self._model = model
        self._engine = engine
        self._passes = passes
        self._scaler = scaler
        self._hooks: dict[str, ModuleStatsHook] = {}
        self.handles = HandleSet()
        """The hooks on modules; none while they are off."""
        self._is_on = False
        self.parameters = ParameterReader(engine)
        self._looks_closer = False

    def choose(self, target: Target, exclude: Target, kinds: list[str], *, lenient: bool = False) -> list[WatchedPlace]:
        """Select modules and parameters, beside those of earlier calls; return their places.

        With ``lenient`` it is enough that either answers to ``target``.
        """
        modules = [kind for kind in kinds if kind in _MODULE_KINDS]
        chosen: list[Named] = []
        if modules:
            try:
                chosen = select(self._model, target, exclude=exclude)
            except NoMatchError:
                if not lenient:
                    raise
                modules = []  # parameters may answer to it
        places: list[WatchedPlace] = []
        for kind in modules:
            made = ModuleStatsHook(self._engine, self._model, kind, self._passes, self.scale)
            places += self._hooks.setdefault(kind, made).add(chosen)
        if set(kinds) - set(_MODULE_KINDS):
            places += self._choose_parameters(target, exclude, kinds, required=not modules)
        return places

    def _choose_parameters(
        self, target: Target, exclude: Target, kinds: list[str], *, required: bool
    ) -> list[WatchedPlace]:
        try:
            chosen = select_parameters(self._model, target, exclude=exclude, trained=False)
        except KeyError:
            if required:
                raise
            return []  # modules without parameters are watched all the same
        parameters = self.parameters
        slots = {"param": parameters.values, "param_grad": parameters.gradients}
        found = [
            (kind, item, self._engine.place(item.name, kind)) for kind in kinds if kind in slots for item in chosen
        ]
        for kind, item, place in found:
            slots[kind].append(ParameterSlot(item.module, item.name.rpartition(".")[2], place))
        return [place for _, _, place in found]

    def switch(self, on: bool) -> None:
        """Put the hooks on, or take them off."""
        if on is self._is_on:
            return
        self.remove(quiet=True)  # what an interrupt has left half on, too
        if not on:
            return
        layout = self._engine.layout
        for kind, hook in self._hooks.items():
            call: Any = hook.forward if kind == "forward" else hook.backward
            attachment = new_attachment(call, _MODULE_KINDS[kind], AttachOptions(observe=True, name="watch"))
            # In a graph unless statistics per unit, which need the tensor itself, are asked for; or thresholds with
            # scaled gradients, as the scale of the moment is not known in the graph.
            is_scaled = kind == "backward" and self._scaler is not None
            in_graph = not layout.by_unit and not (is_scaled and layout.thresholds)
            attachment.summary = hook if in_graph else None
            self.handles.add(attach_to_modules(attachment, self._model, hook.sites))
            self._passes.counter = next(iter(attachment.counters))
        self._is_on = True

    def remove(self, *, quiet: bool) -> None:
        """Take the hooks off; warn, unless ``quiet``, of those that never fired."""
        self._is_on = False
        self.handles.remove(quiet=quiet)
        self.handles = HandleSet()

    def look_closer(self, rows: NDArray[np.float64]) -> None:
        """Count NaN and Inf in compiled code from now on, if a graph has found something that is not finite.

        A graph that finds statistics by row sees that (`BAD`), but not whether it is NaN or Inf.
        """
        layout = self._engine.layout
        if layout.details or self._looks_closer:
            return
        if ((rows[:, BAD] > 0) & (rows[:, NAN] + rows[:, INF] == 0)).any():
            self._looks_closer = True
            for hook in self._hooks.values():
                hook.summarize(layout.with_details)
            if self._is_on:
                self.switch(False)
                self.switch(True)

    def scale(self) -> Tensor | None:
        """Return the scale of the gradients at this moment."""
        return None if self._scaler is None else _torch.scale_of(self._scaler)
