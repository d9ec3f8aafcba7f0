"""Give the tensors of modules and parameters to the statistics engine.

`Watch` makes one `WatchSites`, which puts a `ModuleStatsHook` on modules, one for all modules of a kind, and has a
`ParameterReader`, which is called at steps. In compiled code a hook leaves a summary of the tensor in the graph instead
of being called.
"""

from __future__ import annotations

import functools
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import HooklineWarning, NoMatchError, OptionError
from hookline.messages import caller_stacklevel, suggest, type_name
from hookline.observe.watch.graph import GraphHandover, find_in
from hookline.observe.watch.local_gradients import LOCAL_GRADIENT, LocalGradients
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
    from hookline.sites.parameters import NamedParameter

__all__ = ["MODULE_KINDS", "ModuleStatsHook", "ParameterReader", "WatchSites", "checked_kinds"]

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
        sites: The modules by name.
        kind: ``"forward"`` or ``"backward"``.
        passes: Which passes count.
        scale: Returns what the gradients of this moment are multiplied by, if anything.
    """

    def __init__(
        self,
        engine: StatsEngine,
        model: nn.Module,
        sites: list[tuple[str, nn.Module]],
        kind: str,
        passes: Passes,
        scale: Callable[[], Tensor | None],
    ) -> None:
        self._engine = engine
        self._model = model
        self._passes = passes
        self._scale = scale
        self._is_forward = kind == "forward"
        self._places = {id(module): engine.place(name, kind) for name, module in sites}
        """By the identity of modules that carry the hook, which live as long as it is on them."""
        self._use(engine.layout)

    def _use(self, layout: Layout) -> None:
        self.make = _maker(layout, not self._is_forward)
        self.number = zlib.crc32(f"{layout!r} {self._is_forward}".encode())

    def look_closer(self) -> None:
        """Count NaN and Inf in compiled code on a GPU as well, once it is compiled anew."""
        self._use(self._engine.layout.with_details)

    def forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the output of a module."""
        task = _torch.graph_task_id()
        if task != -1 and _torch.in_recomputation():  # it was counted the first time
            return
        if self._passes.current().takes:
            self._take(module, output, task)
            if module is self._model:
                self._engine.flush()

    def backward(self, module: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of a module's output."""
        if self._passes.counts_backward():
            self._take(module, grads[0] if len(grads) == 1 else grads, _torch.graph_task_id())

    def _take(self, module: nn.Module, value: Any, task: int) -> None:
        place = self._places.get(id(module))
        if place is None:  # a copy of a module takes its hooks along, and goes unwatched
            return
        try:
            scale = None if self._is_forward else self._scale()
            if place.deferred is not None and place.deferred.note(place, value, scale, task):
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
        if not self._counts_graph():
            return
        places, scale = self._places, self._scale()
        known = [(places[id(module)], found, each, scale) for _, module, found, each in items if id(module) in places]
        try:
            self._engine.take_found(known)
        except Exception as error:
            for place, found, _, _ in known:
                place.give_up(found[0], error)

    def prepare(self, sites: Sequence[tuple[str, nn.Module, Share]]) -> Callable[[list[Tensor]], None]:
        """Return what takes the summaries of one operator in a graph: rows and launches are worked out once."""
        places = self._places
        shares = [(places[id(module)], share) for _, module, share in sites if id(module) in places]
        handover = GraphHandover(self._engine, shares)

        def take(found: list[Tensor]) -> None:
            if self._counts_graph():
                try:
                    handover.take(found, self._scale())
                except Exception as error:
                    for place, share in shares:
                        place.give_up(share.of(found)[0], error)

        return take

    def _counts_graph(self) -> bool:
        """Return whether what compiled code hands over counts."""
        if not self._is_forward:
            return self._passes.counts_backward()
        return not _torch.in_recomputation() and self._passes.current().takes


def _no_scale() -> None:
    return None


@functools.cache
def _maker(layout: Layout, is_gradient: bool) -> Callable[[list[Tensor]], Found | None]:
    """Return what summarizes the main one of several tensors; one per layout, so that compiled code can be reused."""

    def make(tensors: list[Tensor]) -> Found | None:
        main = main_of(tensors)
        return None if main is None else find_in(main, layout, is_gradient=is_gradient)

    return make


class _ParameterSlot:
    """A parameter by its module and name: FSDP2 or ``load_state_dict(assign=True)`` may put another one there."""

    __slots__ = ("_key", "_module", "place")

    def __init__(self, item: NamedParameter, place: WatchedPlace) -> None:
        self._module = weakref.ref(item.module)
        self._key = item.name.rpartition(".")[2]
        self.place = place

    def current(self) -> Tensor | None:
        module = self._module()
        if module is None or self._key not in module._parameters:
            return None
        found = module._parameters[self._key]  # those of a ScriptModule have no get()
        return None if found is None or is_lazy(found) else found


class ParameterReader:
    """Reads the parameters of one watch, and their gradients, when asked."""

    def __init__(self, engine: StatsEngine, values: list[NamedParameter], gradients: list[NamedParameter]) -> None:
        self._engine = engine
        self._values = [_ParameterSlot(item, engine.place(item.name, "param")) for item in values]
        self._gradients = [_ParameterSlot(item, engine.place(item.name, "param_grad")) for item in gradients]

    @property
    def wants_gradients(self) -> bool:
        """Whether gradients are to be read."""
        return bool(self._gradients)

    def read_values(self) -> None:
        """Take the parameters as they are now, in the place of those taken before."""
        self._take([(slot.place, slot.current(), None) for slot in self._values], instead=True)

    def read_gradients(self, scale: Any, of: Optimizer | None = None, *, instead: bool = False) -> None:
        """Add the gradients as they are now, or take them `instead` of those before; those `of` an optimizer alone."""
        own = None if of is None else {id(each) for group in of.param_groups for each in group["params"]}
        found: list[tuple[WatchedPlace, Tensor | None, Any]] = []
        for slot in self._gradients:
            value = slot.current()
            if own is None or id(value) in own:
                found.append((slot.place, None if value is None else value.grad, scale))
        self._take(found, instead=instead)

    def forget_gradients(self) -> None:
        """Drop all gradients that were read."""
        for slot in self._gradients:
            slot.place.empty()

    def _take(self, items: list[tuple[WatchedPlace, Tensor | None, Any]], *, instead: bool) -> None:
        with self._engine.lock:
            for place, _, _ in items if instead else ():
                place.empty()
            self._engine.take_all([(place, value, scale) for place, value, scale in items if value is not None])


class WatchSites:
    """The hooks of one watch.

    Args:
        model: The model.
        engine: Where the hooks add up.
        passes: Which passes count.
        scaler: The ``GradScaler`` in use, or None.
        name: The name of the hooks.
    """

    def __init__(self, model: nn.Module, engine: StatsEngine, passes: Passes, scaler: Any, name: str) -> None:
        self._model = model
        self._engine = engine
        self._passes = passes
        self._scaler = scaler
        self._name = name
        self._chosen: list[Named] = []
        self.hooks: dict[str, ModuleStatsHook] = {}
        self.handles = HandleSet()
        self.parameters = ParameterReader(engine, [], [])
        self._local: LocalGradients | None = None
        self._is_on = False
        self._looks_closer = False

    def choose(self, target: Target, exclude: Target, kinds: list[str], *, lenient: bool) -> None:
        """Select modules and parameters; with ``lenient`` it is enough that either answers to ``target``."""
        modules = [kind for kind in kinds if kind in MODULE_KINDS]
        if modules:
            self._chosen = self._choose_modules(target, exclude, lenient=lenient)
            modules = modules if self._chosen else []
        for kind in modules:
            scale = self.scale if kind == "backward" else _no_scale
            self.hooks[kind] = ModuleStatsHook(self._engine, self._model, self._chosen, kind, self._passes, scale)
        if set(kinds) - set(MODULE_KINDS):
            self._choose_parameters(target, exclude, kinds, required=not modules)

    def _choose_modules(self, target: Target, exclude: Target, *, lenient: bool) -> list[Named]:
        try:
            return without_scripted(select(self._model, target, exclude=exclude), target)
        except NoMatchError:
            if not lenient:
                raise
            return []  # parameters may answer to it

    def _choose_parameters(self, target: Target, exclude: Target, kinds: list[str], *, required: bool) -> None:
        try:
            chosen = select_parameters(self._model, target, exclude=exclude, trained=False)
        except KeyError:
            if required:
                raise
            return  # modules without parameters are watched all the same
        values = chosen if "param" in kinds else []
        gradients = chosen if "param_grad" in kinds else []
        self.parameters = ParameterReader(self._engine, values, gradients)
        if LOCAL_GRADIENT in kinds:
            self._local = LocalGradients(self._model, self._engine, chosen, self._take_local)

    def switch(self, on: bool) -> None:
        """Put the hooks on, or take them off."""
        if on is self._is_on:
            return
        self._is_on = on
        if self._local is not None:
            self._local.switch(on)
        if not on:
            self._passes.switch(False)
            self.handles.remove(quiet=True)
            self.handles = HandleSet()
            return
        layout = self._engine.layout
        for kind, hook in self.hooks.items():
            call = hook.forward if kind == "forward" else hook.backward
            options = AttachOptions(observe=True, name=self._name)
            attachment = new_attachment(call, MODULE_KINDS[kind], options)
            # What is kept per unit needs the tensor. A graph does not know the scale of the moment, so it could not
            # tell what is over a threshold.
            is_scaled = kind == "backward" and self._scaler is not None
            if not layout.by_unit and not (is_scaled and layout.thresholds):
                attachment.summary = hook
            self.handles.add(attach_to_modules(attachment, self._model, self._chosen))
        if self.hooks or self._local is not None:
            self._passes.switch(True)

    def look_closer(self, rows: NDArray[np.float64]) -> None:
        """Count NaN and Inf in compiled code from now on, if it has found something that is not finite by row."""
        layout = self._engine.layout
        if layout.details or self._looks_closer:
            return
        bad, nan, inf = (rows[:, layout.names.index(name)] for name in ("bad", "nan", "inf"))
        if ((bad > 0) & (nan + inf == 0)).any():
            self._looks_closer = True
            for hook in self.hooks.values():
                hook.look_closer()
            if self._is_on:
                self.switch(False)
                self.switch(True)

    def scale(self) -> Tensor | None:
        """Return the scale of the gradients at this moment."""
        return None if self._scaler is None else _torch.scale_of(self._scaler)

    def remove(self, *, quiet: bool) -> None:
        """Take everything off; warn, unless ``quiet``, if nothing fired."""
        self._passes.switch(False)
        if self._local is not None:
            self._local.switch(False)
        self.handles.remove(quiet=quiet)

    def _take_local(self, place: WatchedPlace, gradient: Tensor) -> None:
        """Take a gradient of a parameter, as the backward pass under way made it."""
        if self._passes.counts_backward():
            try:
                self._engine.take(place, gradient, self.scale())
            except Exception as error:  # a watch must not end the run
                place.give_up(gradient, error)
