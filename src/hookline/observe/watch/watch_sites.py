"""Hold the hooks of one watch: on modules, on parameters, and at the end of backward passes.

`Watch` makes one, and switches it on and off as steps are due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline.errors import NoMatchError
from hookline.observe.watch.local_gradients import LOCAL_GRADIENT, LocalGradients
from hookline.observe.watch.watch_hooks import MODULE_KINDS, ModuleStatsHook, ParameterReader, give_up
from hookline.observe.watch.watch_steps import BackwardPasses, CountingRules, ForwardSteps
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules
from hookline.sites.handle import HandleSet
from hookline.sites.kinds import Kind
from hookline.sites.targets import Named, select, without_scripted
from hookline.sites.tensors.parameter_hooks import select_parameters

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.observe.watch.stats_engine import StatsEngine, WatchedPlace

__all__ = ["WatchSites"]


class WatchSites:
    """The hooks of one watch.

    Args:
        model: The model.
        engine: Where the hooks add up.
        rules: Which passes count.
        scaler: The ``GradScaler`` in use, or None.
        name: The name of the hooks.
    """

    def __init__(self, model: nn.Module, engine: StatsEngine, rules: CountingRules, scaler: Any, name: str) -> None:
        self._model = model
        self._engine = engine
        self._rules = rules
        self._scaler = scaler
        self._name = name
        self._chosen: list[Named] = []
        self.hooks: dict[str, ModuleStatsHook] = {}
        self.handles = HandleSet()
        self.parameters: ParameterReader | None = None
        self.passes: BackwardPasses | None = None
        self._local: LocalGradients | None = None
        self._is_on = False
        self._looks_closer = False

    def choose(
        self, target: Target, exclude: Target, kinds: list[str], end_pass: Callable[[], None], *, lenient: bool
    ) -> None:
        """Select modules and parameters; with ``lenient`` it is enough that either answers to ``target``."""
        modules = [kind for kind in kinds if kind in MODULE_KINDS]
        if modules:
            self._chosen = self._choose_modules(target, exclude, lenient=lenient)
            modules = modules if self._chosen else []
        rules = self._rules
        for kind in modules:
            scale, is_due = (self.scale, rules.counts_backward) if kind == "backward" else (None, rules.take_output)
            self.hooks[kind] = ModuleStatsHook(self._engine, self._chosen, kind, is_due, scale)
        if set(kinds) - set(MODULE_KINDS):
            self._choose_parameters(target, exclude, kinds, end_pass, required=not modules)

    def _choose_modules(self, target: Target, exclude: Target, *, lenient: bool) -> list[Named]:
        try:
            return without_scripted(select(self._model, target, exclude=exclude), target)
        except NoMatchError:
            if not lenient:
                raise
            return []  # parameters may answer to it

    def _choose_parameters(
        self, target: Target, exclude: Target, kinds: list[str], end_pass: Callable[[], None], *, required: bool
    ) -> None:
        try:
            chosen = select_parameters(self._model, target, exclude=exclude, trained=False)
        except KeyError:
            if required:
                raise
            return  # modules without parameters are watched all the same
        values = chosen if "param" in kinds else []
        gradients = chosen if "param_grad" in kinds else []
        self.parameters = ParameterReader(self._engine, values, gradients)
        if gradients:
            self.passes = BackwardPasses(self._model, gradients, end_pass)
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
            self.handles.remove(quiet=True)
            self.handles = HandleSet()
            return
        for kind, hook in self.hooks.items():
            self._hook_modules(kind, hook)
        self._rules.find_counter()
        if self.passes is not None and isinstance(self._rules.steps, ForwardSteps):
            request = self._rules.request(self.passes.begin, Kind.BACKWARD_PRE, self._name)
            self.handles.add(attach_to_modules(request, self._model, [("", self._model)]))

    def _hook_modules(self, kind: str, hook: ModuleStatsHook) -> None:
        layout = self._engine.layout
        as_kind, call, beside = MODULE_KINDS[kind]
        request = self._rules.request(getattr(hook, call), as_kind, self._name)
        # A graph does not know the scale of the moment, so it could not tell what is over a threshold.
        if kind == "forward" or self._scaler is None or not layout.thresholds:
            request.summary = hook
        self.handles.add(attach_to_modules(request, self._model, self._chosen))
        if layout.by_unit:
            more = self._rules.request(getattr(hook, beside), as_kind, f"{self._name} by unit")
            self.handles.add(attach_to_modules(more, self._model, self._chosen))

    def look_closer(self, metrics: dict[str, Any]) -> None:
        """Count NaN and Inf in compiled code from now on, if it has found something that is not finite."""
        if self._engine.layout.details or self._looks_closer:
            return
        nonfinite = [name for name, value in metrics.items() if name.endswith("/nonfinite") and value]
        if any(f"{name.rpartition('/')[0]}/nan" not in metrics for name in nonfinite):
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
        if self.passes is not None:
            self.passes.unhook_parameters()
        if self._local is not None:
            self._local.switch(False)
        self.handles.remove(quiet=quiet)

    def _take_local(self, place: WatchedPlace, gradient: Tensor) -> None:
        """Take a gradient of a parameter, as the backward pass under way made it."""
        if not self._rules.counts_backward():
            return
        try:
            self._engine.take(place, gradient, self.scale())
            self._engine.take_beside(place, gradient, self.scale())
        except Exception as error:  # a watch must not end the run
            give_up(place, gradient, error)
