"""Streaming statistics of a model: what goes through its modules, its gradients, its parameters.

Puts the hooks of `stats.hooks` on modules and has parameters read at steps; hands out metrics when asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from hookline.errors import OptionError
from hookline.lifecycle.run_phase import During, checked_phases
from hookline.lifecycle.schedule import StepSchedule
from hookline.observe.watch.backward_end import Passes
from hookline.observe.watch.columns import Layout
from hookline.observe.watch.counted_passes import Counts
from hookline.observe.watch.parameter_stats import Parameters
from hookline.observe.watch.saved_stats import counted, load_counted
from hookline.observe.watch.stats_engine import Engine
from hookline.observe.watch.watch_hooks import MODULE_KINDS, ModuleHook
from hookline.observe.watch.watch_options import check_scaler, checked_kinds, chosen_modules
from hookline.observe.watch.watch_steps import ByForward, ByHand, ByOptimizer
from hookline.observe.watch.watch_table import table_of
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules
from hookline.sites.handle import HandleSet
from hookline.sites.kinds import Kind
from hookline.sites.select import Named, check_model
from hookline.sites.tensors.parameter_hooks import select_parameters
from hookline.sites.wrappers import unwrap
from hookline.tables import OFF, ON, ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hookline.hook_types import Target

__all__ = ["Watch", "watch"]


def watch(
    model: nn.Module,
    target: Target = "*",
    *,
    on: str | Iterable[str] | None = None,
    stats: str | Sequence[str] | None = None,
    every: StepSchedule | int = 1,
    exclude: Target = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Any = None,
    during: str | Iterable[str] = "train",
) -> Watch:
    """Keep streaming statistics of a model.

    Recipe::

        watch = hookline.watch(model, "layers.#", optimizer=optimizer)
        for batch in data:
            train_step(batch)
        print(watch)
        metrics = watch.to_metrics()  # {"layers.0/forward/mean": ..., "layers.0.weight/param_grad/norm": ...}
        watch.reset()

    Numbers are added up where the tensors are; nothing waits for the device, and nothing comes to the host before you
    ask, and then in one transfer. The run stays the run it would have been, bit for bit.

    Args:
        model: The model.
        target: Which modules (as in ``attach``), and with them the parameters below; a glob may name parameters as
            well. All by default.
        on: What to watch: ``"forward"`` the outputs of modules, ``"backward"`` the gradients of these outputs,
            ``"param"`` the parameters as they are when you ask, ``"param_grad"`` their gradients at each step; all
            four by default. Of an output that is no tensor, its main tensor: the first with more than one real number;
            of several gradients, that of the main one among those that came.
        stats: Which statistics: ``mean``, ``std``, ``norm`` (of one tensor, root mean square over firings), ``rms``,
            ``min``, ``max``, ``absmax``, ``zero_fraction``, ``nonfinite`` (firings with NaN or Inf in them) are the
            default. Also ``nan`` and ``inf`` (how many), ``finite_min``, ``finite_max`` (all four are told anyway once
            there was one), ``"over:6"`` (share of magnitudes over 6), ``dead_fraction`` (units that were never
            anything but zero), ``histogram`` (counts by binary exponent).
        every: Every how many steps to look, or a `StepSchedule`. In other steps no hook is on, so they cost nothing
            (in compiled code that takes ``optimizer=`` or ``watch.step()``: graphs are chosen before a forward begins).
        exclude: Modules and parameters to leave out.
        optimizer: Its steps are the steps, and gradients of parameters are read just before each, when they are final:
            accumulated, averaged over processes, unscaled (just after, for one that is given a closure). Several may
            be given; a step is over when the last of them has made its own. One that a scaler skips is none.
        scaler: The ``GradScaler`` in use: gradients are reported as they would be without it.
        during: What the run has to be doing: ``"train"``, ``"eval"``, ``"intervention"``, or several. The loops of
            hookline tell. In any other loop, training is a forward that began with the model in training mode and
            gradients on; every other is an evaluation. Until there was training, forwards that are most like it count
            (a served model has no others), and they are forgotten when training begins. The report says what was left
            out; ``{"train", "eval"}`` counts it too; ``with watch.paused():`` leaves out more.

    Without an optimizer, a step is whatever lies between two calls of ``watch.step()``; if you never call it, one
    outermost forward of the model, and gradients of parameters are read at the end of each backward pass through it.
    Of a model that is not called itself (Lightning calls ``training_step``), a step is one call of its first part.
    """
    check_model(model, target)
    kinds = checked_kinds(on)
    check_scaler(scaler)
    layout = Layout.of(stats if stats is None or isinstance(stats, str) else tuple(stats))
    found = Watch(unwrap(model), layout, StepSchedule.of(every), checked_phases(during), scaler)
    try:
        found._begin(target, exclude, kinds, optimizer, lenient=on is None)
    except BaseException:
        found.remove(quiet=True)
        raise
    return found


class Watch(ShownAsTable):
    """The statistics of one ``watch``; prints as a table.

    Recipe: ``watch = hookline.watch(model)``; then ``print(watch)``, ``watch.to_metrics()``, ``watch.reset()``.
    Comes off by ``watch.remove()``, or at the end of a ``with`` block; what was counted stays.
    """

    name = "watch"

    def __init__(
        self, model: nn.Module, layout: Layout, schedule: StepSchedule, during: frozenset[str], scaler: Any
    ) -> None:
        self._model = model
        self._layout = layout
        self._schedule = schedule
        self._scaler = scaler
        self._engine = Engine(layout)
        self._chosen: list[Named] = []
        self._hooks: dict[str, ModuleHook] = {}
        self._handles = HandleSet()
        self._parameters: Parameters | None = None
        self._passes: Passes | None = None
        self._counts = Counts(model, During(during, self._forget), ByHand(schedule))
        self._is_on = False
        self._looks_closer = False
        self._removed = False

    # -- what was counted --------------------------------------------------------------------------------

    def to_metrics(self, *, reset: bool = False) -> dict[str, Any]:
        """Every statistic by ``"name/kind/statistic"``, of what was seen since the last reset; one transfer."""
        with self._engine.lock:
            if self._parameters is not None:
                self._parameters.read_values(self._engine)
            metrics = self._engine.to_metrics()
            if reset:
                self.reset()
        self._look_closer(metrics)
        return metrics

    def reset(self) -> None:
        """Forget what was counted so far, and go on."""
        self._engine.reset()

    def update(self, name: str, tensor: Tensor) -> None:
        """Count a tensor of your own under a name: ``watch.update("loss", loss)``."""
        if not isinstance(tensor, Tensor):
            raise OptionError(f"update({name!r}, ...) takes a tensor, got {type(tensor).__name__}.")
        if self._counts.told():
            place = self._engine.place(name, "")
            self._engine.take(place, tensor)
            self._engine.take_beside(place, tensor)

    @property
    def steps(self) -> int:
        """How many steps there have been."""
        return self._counts.steps.count

    @property
    def step_is(self) -> str:
        """What counts as a step, in words."""
        return self._counts.steps.what

    def report(self) -> dict[str, Any]:
        """Return how often each place was looked at, what a step is, what was left out, and why a place is silent."""
        read = self._engine.read()
        return {
            "step": self.step_is,
            "steps": self.steps,
            "left_out": self._counts.during.left_out,
            "fired": {place.label: int(cells["fires"]) for place, cells in read.items()},
            "silent": {
                place.label: place.silent or place.unread or self._counts.why_silent(place)
                for place, cells in read.items()
                if place.silent or not (cells["fires"] or place.kind == "param")
            },
        }

    def _table(self) -> Table:
        table = table_of(self.to_metrics())
        return replace(table, foot=(*table.foot, *self._counts.in_words()))

    def _state(self) -> str:
        return OFF if self._removed else ON

    # -- going on and coming off -------------------------------------------------------------------------

    def step(self) -> None:
        """A step is over; call it after the backward pass, before gradients are set to zero."""
        steps = self._counts.steps
        if isinstance(steps, ByOptimizer):
            raise OptionError("The optimizer makes the steps of this watch; call step(), or give optimizer=, not both.")
        if isinstance(steps, ByForward):
            self._count_by_hand()
        self._counts.during.note_step()
        if self._parameters is not None and self._counts.told():
            self._parameters.read_gradients(self._engine, None)
        self._advance()

    def _count_by_hand(self) -> None:
        """The first step is over, by the user's count: what was read at the end of backward passes is read anew."""
        if self._scaler is not None and self._parameters is not None and self._parameters.wants_gradients:
            raise OptionError(
                "watch.step() cannot tell whether the scaler has unscaled the gradients of parameters yet; give "
                "optimizer= to watch(), or leave 'param_grad' out of on=."
            )
        self._counts.steps.remove()
        self._counts.steps = ByHand(self._schedule)
        if self._parameters is not None:
            self._parameters.forget_gradients(self._engine)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: all that was counted, and which step it is in."""
        by_hand = isinstance(self._counts.steps, ByHand)
        told = {"steps": self._counts.steps.state_dict(), "during": self._counts.during.state_dict()}
        return {"counted": counted(self._engine), "by_hand": by_hand, **told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        if state["by_hand"] and isinstance(self._counts.steps, ByForward):
            self._count_by_hand()  # or the first step from now on would begin the count anew
        load_counted(self._engine, state["counted"])
        self._counts.steps.load_state_dict(state["steps"])
        if "during" in state:
            self._counts.during.load_state_dict(state["during"])
        self._turn(self._counts.needs_hooks())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For as long as the block lasts, nothing is counted: ``with watch.paused(): evaluate()``."""
        self._counts.paused += 1
        try:
            yield
        finally:
            self._counts.paused -= 1

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off; what was counted stays. Warns, unless ``quiet``, if the model ran unseen."""
        if self._removed:
            return
        self._removed = True
        self._counts.steps.remove()
        if self._passes is not None:
            self._passes.let_go()
        # That one module of many was never called is in the report; that none was is worth a warning.
        excused = self._counts.goes_by_parts() or not self._counts.steps.is_due
        seen = excused or any(report.fired for report in self._handles.report())
        self._handles.remove(quiet=quiet or seen)
        self._engine.flush()
        if not quiet:
            self._counts.warn_if_nothing_did()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # As with handles: a copied or unpickled model carries no hooks, so a watch that it keeps has nothing to say.
        return _nothing_watched, ()

    # -- hooks -------------------------------------------------------------------------------------------

    def _begin(self, target: Target, exclude: Target, kinds: list[str], optimizer: Any, *, lenient: bool) -> None:
        modules = [kind for kind in kinds if kind in MODULE_KINDS]
        if modules:
            self._chosen = chosen_modules(self._model, target, exclude, lenient=lenient)
            modules = modules if self._chosen else []
        for kind in modules:
            scale, due = (self._scale, self._counts.backward) if kind == "backward" else (None, self._counts.forward)
            self._hooks[kind] = ModuleHook(self._engine, self._chosen, kind, due, scale)
        if set(kinds) - set(MODULE_KINDS):
            self._choose_parameters(target, exclude, kinds, required=not modules)
        counts = self._counts
        if optimizer is not None:
            counts.steps = ByOptimizer(self._schedule, optimizer, self._before_step, self._advance)
        else:
            counts.steps = ByForward(self._schedule, self._model, counts.wanted, self._advance, self._started)
            counts.find_root()
            if self._passes is not None and not self._hooks:
                self._passes.hold_parameters()  # nothing else would show that the model's own forward is not called
        self._turn(self._counts.needs_hooks())

    def _choose_parameters(self, target: Target, exclude: Target, kinds: list[str], *, required: bool) -> None:
        try:
            chosen = select_parameters(self._model, target, exclude=exclude, trained=False)
        except KeyError:
            if required:
                raise
            return  # modules without parameters are watched all the same
        values = chosen if "param" in kinds else []
        gradients = chosen if "param_grad" in kinds else []
        self._parameters = Parameters(self._engine, values, gradients)
        if gradients:
            self._passes = Passes(self._model, gradients, self._pass_is_over)

    def _turn(self, on: bool) -> None:
        """Have the hooks on or off."""
        if on is self._is_on:
            return
        self._is_on = on
        if not on:
            self._handles.remove(quiet=True)
            self._handles = HandleSet()
            return
        for kind, hook in self._hooks.items():
            as_kind, call, beside = MODULE_KINDS[kind]
            request = self._counts.request(getattr(hook, call), as_kind, self.name)
            # A graph does not know the scale of the moment, so it could not tell what is over a threshold.
            if kind == "forward" or self._scaler is None or not self._layout.thresholds:
                request.summary = hook
            self._handles.add(attach_to_modules(request, self._model, self._chosen))
            if self._layout.by_unit:
                more = self._counts.request(getattr(hook, beside), as_kind, f"{self.name} by unit")
                self._handles.add(attach_to_modules(more, self._model, self._chosen))
        self._counts.find_root()
        if self._passes is not None and isinstance(self._counts.steps, ByForward):
            request = self._counts.request(self._passes.begins, Kind.BACKWARD_PRE, self.name)
            self._handles.add(attach_to_modules(request, self._model, [("", self._model)]))

    def _pass_is_over(self) -> None:
        """A backward pass is over: gradients of parameters are as final as they get without an optimizer."""
        steps = self._counts.steps
        if self._parameters is None or self._removed or not isinstance(steps, ByForward):
            return
        if self._counts.backward():
            self._parameters.read_gradients(self._engine, self._scale())
        if not self._hooks and not steps.has_begun:  # the model itself is not called, and there are no calls to go by
            steps.what = "one backward pass, since the model's own forward is not called"
            self._advance()

    def _started(self) -> None:
        """The first step has begun: it is known by now whose forwards the steps are."""
        if self._passes is not None:
            (self._passes.let_go if self._counts.root.stand_in is None else self._passes.hold_parameters)()
        self._turn(self._counts.needs_hooks())

    def _advance(self) -> None:
        """A step is over: the hooks are on for the next one if it is due."""
        self._engine.flush()
        self._counts.steps.advance()
        if not self._removed:
            self._turn(self._counts.needs_hooks())

    def _before_step(self, optimizer: Optimizer) -> None:
        self._counts.during.note_step()
        if self._parameters is not None and self._counts.told():
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales by itself, later
            self._parameters.read_gradients(self._engine, scale, of=optimizer)

    def _look_closer(self, metrics: dict[str, Any]) -> None:
        """Where compiled code has come by something that is not finite, have it count NaN and Inf from now on."""
        if self._layout.details or self._looks_closer:
            return
        alarmed = [name for name, value in metrics.items() if name.endswith("/nonfinite") and value]
        if any(f"{name.rpartition('/')[0]}/nan" not in metrics for name in alarmed):
            self._looks_closer = True
            for hook in self._hooks.values():
                hook.look_closer()
            if self._is_on:
                self._turn(False)
                self._turn(True)

    def _forget(self) -> None:
        """Training begins: what was counted until now was something else."""
        self._engine.flush()
        for place in list(self._engine.places.values()):
            if place.kind not in ("", "param"):
                self._engine.empty(place)
        self._counts.steps.restart()

    def _scale(self) -> Tensor | None:
        return None if self._scaler is None else _torch.scale_of(self._scaler)


def _nothing_watched() -> Watch:
    from torch.nn import Identity

    return Watch(Identity(), Layout.of(None), StepSchedule(), frozenset({"train"}), None)
