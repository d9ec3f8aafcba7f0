"""Streaming statistics of a model: what goes through its modules, its gradients, its parameters.

Puts the hooks of `stats.hooks` on modules and has parameters read at steps; hands out metrics when asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Self

from torch import Tensor

from hookline.errors import NoMatchError, OptionError
from hookline.lifecycle.phase import checked_phases, phase
from hookline.lifecycle.schedule import StepSchedule
from hookline.observe.stats.engine import Engine
from hookline.observe.stats.hooks import ModuleHook
from hookline.observe.stats.layout import Layout
from hookline.observe.stats.parameters import Parameters
from hookline.observe.stats.saved import counted, load_counted
from hookline.observe.stats.steps import ByForward, ByHand, ByOptimizer, Steps
from hookline.observe.stats.table import as_table
from hookline.sites import _torch
from hookline.sites.attach import check_request, fasten
from hookline.sites.handle import HandleSet
from hookline.sites.kinds import Kind
from hookline.sites.parameters import select_parameters
from hookline.sites.select import Named, check_model, select, without_scripted
from hookline.sites.wrappers import unwrap
from hookline.wording import a_or_an

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hookline.types import Target

__all__ = ["Watch", "watch"]

_KINDS: Final = ("forward", "backward", "param", "param_grad")


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
            hookline tell; in a loop of your own, ``with watch.paused():`` around whatever is not to count.

    Without an optimizer, a step is whatever lies between two calls of ``watch.step()``; if you never call it, one
    outermost forward of the model, and gradients of parameters are read at the end of each backward pass through it.
    """
    check_model(model, target)
    kinds = _checked_kinds(on)
    _check_scaler(scaler)
    layout = Layout.of(stats if stats is None or isinstance(stats, str) else tuple(stats))
    found = Watch(unwrap(model), layout, StepSchedule.of(every), checked_phases(during), scaler)
    try:
        found._begin(target, exclude, kinds, optimizer, lenient=on is None)
    except BaseException:
        found.remove(quiet=True)
        raise
    return found


class Watch:
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
        self._during = during
        self._scaler = scaler
        self._engine = Engine(layout)
        self._chosen: list[Named] = []
        self._hooks: dict[str, ModuleHook] = {}
        self._handles = HandleSet()
        self._parameters: Parameters | None = None
        self._steps: Steps = ByHand(schedule)
        self._is_on = False
        self._looks_closer = False
        self._paused = 0
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
        if self._due():
            place = self._engine.place(name, "")
            self._engine.take(place, tensor)
            self._engine.take_beside(place, tensor)

    @property
    def steps(self) -> int:
        """How many steps there have been."""
        return self._steps.count

    @property
    def step_is(self) -> str:
        """What counts as a step, in words."""
        return self._steps.what

    def report(self) -> dict[str, Any]:
        """How often each place was looked at, what counts as a step, and why a place has nothing to tell."""
        read = self._engine.read()
        return {
            "step": self.step_is,
            "steps": self.steps,
            "fired": {place.label: int(cells["fires"]) for place, cells in read.items()},
            "silent": {
                place.label: place.silent or place.unread or "nothing came by"
                for place, cells in read.items()
                if place.silent or not (cells["fires"] or place.kind == "param")
            },
        }

    def __repr__(self) -> str:
        return as_table(self.to_metrics())

    # -- going on and coming off -------------------------------------------------------------------------

    def step(self) -> None:
        """A step is over; call it after the backward pass, before gradients are set to zero."""
        if isinstance(self._steps, ByOptimizer):
            raise OptionError("The optimizer makes the steps of this watch; call step(), or give optimizer=, not both.")
        if isinstance(self._steps, ByForward):
            self._count_by_hand()
        if self._parameters is not None and self._due():
            self._parameters.read_gradients(self._engine, None)
        self._advance()

    def _count_by_hand(self) -> None:
        """The first step is over, by the user's count: what was read at the end of backward passes is read anew."""
        if self._scaler is not None and self._parameters is not None and self._parameters.wants_gradients:
            raise OptionError(
                "watch.step() cannot tell whether the scaler has unscaled the gradients of parameters yet; give "
                "optimizer= to watch(), or leave 'param_grad' out of on=."
            )
        self._steps.remove()
        self._steps = ByHand(self._schedule)
        if self._parameters is not None:
            self._parameters.forget_gradients(self._engine)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: all that was counted, and which step it is in."""
        by_hand = isinstance(self._steps, ByHand)
        return {"counted": counted(self._engine), "steps": self._steps.state_dict(), "by_hand": by_hand}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        if state["by_hand"] and isinstance(self._steps, ByForward):
            self._count_by_hand()  # or the first step from now on would begin the count anew
        load_counted(self._engine, state["counted"])
        self._steps.load_state_dict(state["steps"])
        self._turn(self._steps.is_due or self._steps.keeps_hooks())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For as long as the block lasts, nothing is counted: ``with watch.paused(): evaluate()``."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off; what was counted stays. Warns, unless ``quiet``, if the model ran unseen."""
        if self._removed:
            return
        self._removed = True
        self._steps.remove()
        # That one module of many was never called is in the report; that none was is worth a warning.
        seen = any(report.fired for report in self._handles.report()) or not self._steps.is_due
        self._handles.remove(quiet=quiet or seen)
        self._engine.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # As with handles: a copied or unpickled model carries no hooks, so a watch that it keeps has nothing to say.
        return _nothing_watched, ()

    # -- hooks -------------------------------------------------------------------------------------------

    def _begin(self, target: Target, exclude: Target, kinds: list[str], optimizer: Any, *, lenient: bool) -> None:
        modules = [kind for kind in kinds if kind in _MODULE_KINDS]
        if modules:
            modules = self._choose_modules(target, exclude, modules, lenient=lenient)
        for kind in modules:
            scale = self._scale if kind == "backward" else None
            self._hooks[kind] = ModuleHook(self._engine, self._chosen, kind, self._due, scale)
        if set(kinds) - set(_MODULE_KINDS):
            self._choose_parameters(target, exclude, kinds, required=not modules)
        if optimizer is not None:
            self._steps = ByOptimizer(self._schedule, optimizer, self._before_step, self._advance)
        else:
            self._steps = ByForward(self._schedule, self._model, self._advance)
        self._turn(self._steps.is_due or self._steps.keeps_hooks())

    def _choose_modules(self, target: Target, exclude: Target, kinds: list[str], *, lenient: bool) -> list[str]:
        try:
            self._chosen = without_scripted(select(self._model, target, exclude=exclude), target)
        except NoMatchError:
            if not lenient:
                raise
            return []  # parameters may answer to it
        return kinds

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
            as_kind, call, beside = _MODULE_KINDS[kind]
            request = check_request(getattr(hook, call), as_kind, observe=True, name=self.name)
            # A graph does not know the scale of the moment, so it could not tell what is over a threshold.
            if kind == "forward" or self._scaler is None or not self._layout.thresholds:
                request.summary = hook
            self._handles.add(fasten(request, self._model, self._chosen))
            if self._layout.by_unit:
                more = check_request(getattr(hook, beside), as_kind, observe=True, name=f"{self.name} by unit")
                self._handles.add(fasten(more, self._model, self._chosen))
        if self._reads_after_backward():
            request = check_request(self._backward_begins, Kind.BACKWARD_PRE, observe=True, name=self.name)
            self._handles.add(fasten(request, self._model, [("", self._model)]))

    def _reads_after_backward(self) -> bool:
        """Whether gradients of parameters are read when a backward pass is over."""
        by_forward = isinstance(self._steps, ByForward)
        return by_forward and self._parameters is not None and self._parameters.wants_gradients

    def _backward_begins(self, module: nn.Module, grads: Any) -> None:
        # Queued from the end of the pass, so that it comes after DDP, which averages gradients there. A pass inside of
        # this one, as reentrant checkpointing makes them, ends before.
        _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._read_gradients))

    def _advance(self) -> None:
        """A step is over: the hooks are on for the next one if it is due."""
        self._engine.flush()
        self._steps.advance()
        if not self._removed:
            self._turn(self._steps.is_due or self._steps.keeps_hooks())

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._parameters is not None and self._due():
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales by itself, later
            self._parameters.read_gradients(self._engine, scale, of=optimizer)

    def _read_gradients(self) -> None:
        if self._parameters is not None and self._due() and self._reads_after_backward():
            self._parameters.read_gradients(self._engine, self._scale())

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

    def _due(self) -> bool:
        return self._steps.is_due and not self._paused and phase() in self._during

    def _scale(self) -> Tensor | None:
        return None if self._scaler is None else _torch.scale_of(self._scaler)


_MODULE_KINDS: Final[dict[str, tuple[Kind, str, str]]] = {
    "forward": (Kind.FORWARD, "forward", "beside"),
    "backward": (Kind.BACKWARD_PRE, "backward", "beside_backward"),
}
"""For each kind: what to attach as, the method of the hook, and the method for what is kept per unit."""


def _checked_kinds(on: str | Iterable[str] | None) -> list[str]:
    kinds = list(dict.fromkeys(_KINDS if on is None else [on] if isinstance(on, str) else on))
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown or not kinds:
        near = get_close_matches(str(unknown[0]), _KINDS, n=1) if unknown else []
        meant = f" Did you mean {near[0]!r}?" if near else ""
        got = f"unknown kind {unknown[0]!r}" if unknown else "no kind"
        raise OptionError(f"watch(on=...): {got}.{meant} There are {', '.join(map(repr, _KINDS))}.")
    return kinds


def _check_scaler(scaler: Any) -> None:
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "scale")):
        raise OptionError(f"scaler= takes a torch.amp.GradScaler, got {a_or_an(scaler)}.")


def _nothing_watched() -> Watch:
    from torch.nn import Identity

    return Watch(Identity(), Layout.of(None), StepSchedule(), frozenset({"train"}), None)
