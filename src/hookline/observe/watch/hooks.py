"""Give the tensors of modules and parameters to the statistics engine.

`Watch` makes one `WatchSites`, which puts a `ModuleStatsHook` on modules, one for all modules of a kind, and has a
`ParameterReader`, which `Watch` calls at steps. In compiled code a hook leaves a summary of the tensor in the graph
instead of being called.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import HooklineWarning, NoMatchError, OptionError
from hookline.messages import caller_stacklevel, suggest, type_name
from hookline.observe.watch.graph import GraphHandover, find_in
from hookline.observe.watch.local_gradients import LOCAL_GRADIENT, LocalGradients
from hookline.observe.watch.row import BAD, INF, NAN
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.compiled.op_schemas import Summary
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import Kind
from hookline.sites.parameters import select_parameters
from hookline.sites.targets import Named, select, without_scripted
from hookline.tree import main_of, main_tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.optim import Optimizer

    from hookline.hook_types import Target
    from hookline.observe.watch.engine import StatsEngine
    from hookline.observe.watch.place import WatchedPlace
    from hookline.observe.watch.row import Layout
    from hookline.observe.watch.steps import Passes
    from hookline.sites.compiled.op_schemas import Found, Handed, Share

__all__ = ["MODULE_KINDS", "ModuleStatsHook", "ParameterReader", "ParameterSlot", "WatchSites", "checked_kinds"]

_DEFAULT_KINDS: Final = ("forward", "backward", "param", "param_grad")
_KINDS: Final = (*_DEFAULT_KINDS, LOCAL_GRADIENT)
MODULE_KINDS: Final = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD_PRE}
"""The kinds that hooks on modules see."""


def checked_kinds(on: str | Iterable[str] | None) -> list[str]:
    """Return the kinds that `on` names; for None, those that are watched by default."""
    kinds = list(dict.fromkeys(_DEFAULT_KINDS if on is None else [on] if isinstance(on, str) else on))
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown or not kinds:
        got = f"unknown kind {unknown[0]!r}{suggest(unknown[0], _KINDS) or '.'}" if unknown else "no kind."
        raise OptionError(f"watch(on=...): {got} There are {', '.join(map(repr, _KINDS))}.")
    return kinds


class ModuleStatsHook(Summary):
    """Adds up the statistics of what modules return, or of the gradients of that.

    Args:
        engine: Where they are added up.
        model: The model; when its own forward is over, tensors that wait are reduced.
        kind: ``"forward"`` or ``"backward"``.
        passes: Which passes count.
        scale: Returns what the gradients of this moment are multiplied by, if anything.
    """

    def __init__(
        self,
        engine: StatsEngine,
        model: nn.Module,
        kind: str,
        passes: Passes,
        scale: Callable[[], Tensor | None],
    ) -> None:
        self._engine = engine
        self._model = model
        self._kind = kind
        self._is_forward = kind == "forward"
        self._enter = passes.enter_forward if self._is_forward else passes.enter_backward
        self._scale = _no_scale if self._is_forward else scale
        self.sites: list[Named] = []
        """The modules by name."""
        self._places: dict[int, WatchedPlace] = {}
        """By the identity of these modules, which live as long as the hook is on them."""
        self._use(engine.layout)

    def add(self, sites: list[Named]) -> list[WatchedPlace]:
        """Look at these modules too; return their places."""
        for name, module in sites:
            if id(module) not in self._places:
                self._places[id(module)] = self._engine.place(name, self._kind)
                self.sites.append((name, module))
        return [self._places[id(module)] for _, module in sites]

    def _use(self, layout: Layout) -> None:
        self.make = _maker(layout, not self._is_forward)
        self.number = zlib.crc32(f"{layout!r} {self._is_forward}".encode())

    def look_closer(self) -> None:
        """Count NaN and Inf in compiled code on a GPU as well, once it is compiled anew."""
        self._use(self._engine.layout.with_details)

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
                warnings.warn(f"{text}(exclude=).", HooklineWarning, stacklevel=caller_stacklevel())
        except Exception as error:  # a watch must not end the run
            place.give_up(value, error)

    def receive(self, items: Sequence[Handed]) -> None:
        """Take what compiled code has found."""
        known = [(self._places[id(item.module)], item) for item in items if id(item.module) in self._places]

        def take(scale: Tensor | None) -> None:
            self._engine.take_found([(place, item.found, item.each, scale) for place, item in known])

        self._take_handed(take, [(place, item.found) for place, item in known])

    def prepare(self, sites: Sequence[tuple[str, nn.Module, Share]]) -> Callable[[list[Tensor]], None]:
        """Return what takes the summaries of one operator in a graph: rows and launches are worked out once."""
        places = self._places
        shares = [(places[id(module)], share) for _, module, share in sites if id(module) in places]
        handover = GraphHandover(self._engine, shares)

        def take(found: list[Tensor]) -> None:
            self._take_handed(functools.partial(handover.take, found), [(place, found) for place, _ in shares])

        return take

    def _take_handed(
        self, take: Callable[[Tensor | None], None], places: Sequence[tuple[WatchedPlace, list[Tensor]]]
    ) -> None:
        """Call `take` with the scale, if the pass counts; an error silences the places."""
        if self._enter():
            try:
                take(self._scale())
            except Exception as error:  # a watch must not end the run
                for place, found in places:
                    place.give_up(found[0], error)


def _no_scale() -> None:
    return None


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
        """The places whose gradients are read at steps; those of the others, when numbers are asked for."""

    def read(self, scale: Tensor | None) -> None:
        """Take parameters as they are now, and gradients that no step reads, in the place of those taken before."""
        found: list[tuple[WatchedPlace, Tensor | None, Any]] = []
        found += [(slot.place, slot.current(), None) for slot in self.values]
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
        """The hooks on modules."""
        self.parameters = ParameterReader(engine)
        self._local = LocalGradients(self._take_local)
        self._is_on = False
        self._looks_closer = False

    def choose(self, target: Target, exclude: Target, kinds: list[str], *, lenient: bool = False) -> list[WatchedPlace]:
        """Select modules and parameters, beside those of earlier calls; return their places.

        With ``lenient`` it is enough that either answers to ``target``.
        """
        modules = [kind for kind in kinds if kind in MODULE_KINDS]
        chosen: list[Named] = []
        if modules:
            try:
                chosen = without_scripted(select(self._model, target, exclude=exclude), target)
            except NoMatchError:
                if not lenient:
                    raise
                modules = []  # parameters may answer to it
        places: list[WatchedPlace] = []
        for kind in modules:
            made = ModuleStatsHook(self._engine, self._model, kind, self._passes, self.scale)
            places += self._hooks.setdefault(kind, made).add(chosen)
        if set(kinds) - set(MODULE_KINDS):
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
        slots = {"param": parameters.values, "param_grad": parameters.gradients, LOCAL_GRADIENT: self._local.slots}
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
        self._is_on = on
        if not on:
            self.remove(quiet=True)
            self.handles = HandleSet()
            return
        layout = self._engine.layout
        for kind, hook in self._hooks.items():
            call = hook.forward if kind == "forward" else hook.backward
            # What is kept per unit needs the tensor. A graph does not know the scale of the moment, so it could not
            # tell what is over a threshold.
            is_scaled = kind == "backward" and self._scaler is not None
            in_graph = not layout.by_unit and not (is_scaled and layout.thresholds)
            self._attach(call, MODULE_KINDS[kind], hook.sites, hook if in_graph else None)
        if self._local.slots:
            others = [named for named in self._local.put_on() if named[1] is not self._model]
            self._attach(self._begin_local, Kind.FORWARD_PRE, [("", self._model), *others])

    def _attach(self, call: Any, kind: Kind, chosen: list[Named], summary: Summary | None = None) -> None:
        attachment = new_attachment(call, kind, AttachOptions(observe=True, name="watch"))
        attachment.summary = summary
        self.handles.add(attach_to_modules(attachment, self._model, chosen))
        self._passes.counter = next(iter(attachment.counters))

    def look_closer(self, rows: NDArray[np.float64]) -> None:
        """Count NaN and Inf in compiled code from now on, if it has found something that is not finite by row."""
        layout = self._engine.layout
        if layout.details or self._looks_closer:
            return
        if ((rows[:, BAD] > 0) & (rows[:, NAN] + rows[:, INF] == 0)).any():
            self._looks_closer = True
            for hook in self._hooks.values():
                hook.look_closer()
            if self._is_on:
                self.switch(False)
                self.switch(True)

    def scale(self) -> Tensor | None:
        """Return the scale of the gradients at this moment."""
        return None if self._scaler is None else _torch.scale_of(self._scaler)

    def remove(self, *, quiet: bool) -> None:
        """Take everything off; warn, unless ``quiet``, if nothing fired."""
        self._local.remove()
        self.handles.remove(quiet=quiet)

    def _begin_local(self, module: nn.Module, args: Any) -> None:
        """Hook the parameters that are there for this forward."""
        if module is self._model:
            self._passes.enter_forward()
        self._local.hook_parameters(module)

    def _take_local(self, place: WatchedPlace, gradient: Tensor) -> None:
        """Take a gradient of a parameter, as the backward pass under way made it."""
        if self._passes.enter_backward():
            try:
                self._engine.take(place, gradient, self.scale())
            except Exception as error:  # a watch must not end the run
                place.give_up(gradient, error)
