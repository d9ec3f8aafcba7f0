"""`HookManager`: fire the hooks of a run at its points, and hand their metrics to sinks.

The loops of hookline call it, and so may a user's own. It has a `Plan`, the `ManagedHooks`, a `MetricOutput` and the
ranks of the run; `fire` reads from top to bottom: what is due, the context, random streams, observers, interventions
with their guard, metrics.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from hookline.distributed.ranks import rank_names
from hookline.error_policy import ErrorPolicy, error_text, warn_user
from hookline.errors import GuardError, Hint, HooklineWarning, HookNameError, LifecycleError, OptionError, RankError
from hookline.guard.guard import Guard, GuardReceipt
from hookline.guard.loaders import generators_of_loader
from hookline.guard.rng import hook_rng, kept_rng, restart_hook_stream
from hookline.lifecycle.context import CheckpointProfiler, RunDataContext
from hookline.lifecycle.output import RECORDER, MetricOutput, add_metrics, copy_metric, make_fan_out
from hookline.lifecycle.plan import PlannedHook, PlanQueries, PointHooks, is_pure, make_plan, split_roles
from hookline.lifecycle.ranks import OneProcess, join_ranks
from hookline.lifecycle.reference import ReferenceWeights
from hookline.lifecycle.registry import HookRegistry, choose_hooks
from hookline.lifecycle.states import ManagedHooks
from hookline.messages import did_you_mean, type_name
from hookline.phases import in_phase
from hookline.tables import ShownAsTable, Table
from hookline.when import HookPoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from hookline.lifecycle.hook import TrainingHook
    from hookline.records.log import RecordLog
    from hookline.records.readers import FanOut

__all__ = ["FiringReceipt", "FiringReceipts", "HookManager"]

logger = logging.getLogger("hookline.lifecycle.firing")

_NOT_TRAINING: Final = in_phase("intervention")
_HOOK_OF: Final = attrgetter("hook")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()
_FIELDS: Final = [field.name for field in dataclasses.fields(RunDataContext)][2:]
_CONSEQUENCES: Final = {"warn": "stays on and the run goes on", "disable": "is switched off and the run goes on"}


class FiringReceipt(NamedTuple):
    """Say what one hook did in one firing.

    Recipe: ``manager.fire(point, ctx, model_ctx)``; then ``print(manager.receipts)``.
    """

    hook: str
    """Its name."""
    scope: str
    """``"observes"``, or what the intervention declared."""
    seconds: float
    """How long it took, saving and putting back not included."""
    touched: tuple[str, ...] = ()
    """What an intervention is known to have changed."""
    restored: tuple[str, ...] = ()
    """What was put back."""
    saved_bytes: int = 0
    """How much had been copied, for it and the other interventions of the firing."""
    error: str = ""
    """What it raised, if it did."""


class FiringReceipts(ShownAsTable, tuple[FiringReceipt, ...]):
    """Hold the receipts of one firing; a tuple that prints as a table."""

    __slots__ = ()

    def _table(self) -> Table:
        if not self:
            return Table(title="no hook has fired yet")
        rows = [
            (r.hook, r.scope, f"{1e3 * r.seconds:.2f}", f"{len(r.touched)}", f"{len(r.restored)}", r.error)
            for r in self
        ]
        return Table(("hook", "scope", "ms", "touched", "put back", "error"), rows, numbers=(2, 3, 4))


@dataclass(slots=True, eq=False)
class _Firing:
    """A point that is being fired."""

    point: HookPoint
    ctx: RunDataContext
    step: int | None
    """The step of the run; None before the first."""
    ranks: OneProcess
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the hooks so far have returned, by ``"hook/metric"``."""
    current: PlannedHook | None = None
    """The hook that runs now."""
    calls: list[FiringReceipt] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)

    @property
    def place(self) -> str:
        """The point and the step, in words."""
        return f"{self.point.name}, step {self.step or 0}"


class HookManager(PlanQueries):
    """Run hooks at the points of a run, and hand their metrics to sinks.

    Recipe::

        with hookline.HookManager(hooks=[MyHook()], sinks=[hookline.sinks.MemorySink()]) as manager:
            for epoch in range(epochs):
                for batch in loader:
                    manager.advance_step(epoch)
                    train_step(batch)
                    manager.fire(HookPoint.POST_STEP, epoch=epoch, model=model)
                manager.flush_step_metrics(epoch)

    Args:
        hook_names: Hooks by their names in `HookRegistry`; also ``"all"``, ``"observers"``, ``"with_debug"``, groups.
        hooks: Hooks as objects or classes; trackers and watches as well, which report when an epoch ends.
        sinks: Where metrics go; anything with ``emit(metrics, epoch, hook_point)``, or a `FanOut` of such. One that
            raises is warned of once and counted (``sink_errors``); the others get theirs, and the run goes on.
        offload_state: Keep the state tensors of hooks on the CPU while they do not run.
        hook_config: Arguments for making hooks: ``{"hessian": {"epsilon": 1e-3}}``.
        step_metrics_log: A file that gets the metrics of single steps, a line of JSON per flush.
        profile_hooks: Time every hook: ``print(manager.profiler)``.
        loop_type: ``"epoch"`` or ``"step"``: which of the ``loop_points`` hold. None: ``hook_points`` do.
        capabilities: What the run can do; hooks that require something else are left out, with a warning.
        on_error: When a hook raises, and what it did has been undone: ``"raise"``, ``"warn"`` (once; it stays on) or
            ``"disable"`` (logged; it is switched off). Metrics of the others go out in any case.
        strict: Check that observers change nothing.
        reference_weights: For hooks that need them: tensors by parameter, a function that finds them, or a file.
        log: A file that gets every record before the sinks do: the record log, which survives a kill.
        flush_every: How many steps from one flush of the step metrics to the next; None: when the epoch ends, or the
            loop says so. What is not flushed dies with the process, or is in its checkpoint.
    """

    def __init__(
        self,
        hook_names: Iterable[str] | str | None = None,
        hooks: Iterable[Any] | None = None,
        sinks: Iterable[Any] | FanOut | None = None,
        offload_state: bool = False,
        hook_config: Mapping[str, Mapping[str, Any]] | None = None,
        step_metrics_log: str | Path | None = None,
        profile_hooks: bool = False,
        loop_type: str | None = None,
        capabilities: Iterable[str] | None = None,
        *,
        on_error: str = "raise",
        strict: bool = False,
        reference_weights: Any = None,
        log: str | Path | RecordLog | None = None,
        flush_every: int | None = None,
    ) -> None:
        super().__init__()
        config = _checked_config(hook_config)
        reference_path = config.pop("reference_weights", {}).get("path")
        with kept_rng():  # a hook may begin with a random projection; a run without it must not differ
            self.hooks: dict[str, TrainingHook] = choose_hooks(hook_names, hooks, config)
        """All hooks by name, in the order they were given."""
        self.profiler = CheckpointProfiler(profile_hooks)
        """Times each hook."""
        self.strict = strict
        self.fired: Counter[str] = Counter()
        """The number of calls of each hook."""
        self._flush_every = _checked_interval(flush_every)
        self._made_for = self._loop_type = loop_type
        self._self = weakref.ref(self)
        self._managed = ManagedHooks(self.hooks, offload=offload_state)
        self._output = MetricOutput(make_fan_out(sinks, log, step_metrics_log))
        # A hook that breaks what it declared may have changed the run: going on would hide it.
        self._errors = ErrorPolicy(on_error, logger, _CONSEQUENCES, always_raise=(GuardError,))
        self._reference = ReferenceWeights(reference_path if reference_weights is None else reference_weights)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._firing: _Firing | None = None
        """The firing under way."""
        self._calls: Sequence[FiringReceipt] = ()
        """What the hooks did that the last firing called."""
        self._checked: tuple[Any, Guard | None] = (None, None)
        """A model, and the guard by which strict mode checks that observers change nothing of it."""
        self._has_met = False
        for hook in self.hooks.values():
            hook.manager = self
        self.set_capabilities(capabilities)

    # -- the plan ----------------------------------------------------------------------------------------

    def set_capabilities(self, capabilities: Iterable[str] | None) -> None:
        """Leave out hooks that require something else than the run can do, with a warning; None: it can do anything."""
        there = {capabilities} if isinstance(capabilities, str) else None if capabilities is None else set(capabilities)
        missing = {} if there is None else {n: sorted(set(h.requires) - there) for n, h in self.hooks.items()}
        self._excluded = {n: f"requires {', '.join(what)}, which is not here" for n, what in missing.items() if what}
        for name, reason in self._excluded.items():
            warn_user(f"Hook {name!r} excluded: {reason}")
        self._make_plan()

    def _make_plan(self) -> None:
        self._output.counts_steps = self._loop_type not in (None, "epoch")
        known = [] if all(not (h.before or h.after) for h in self.hooks.values()) else HookRegistry.known()
        left_out = {**self._excluded, **self._errors.why_disabled()}
        self._plan = make_plan(self.hooks, self._loop_type, left_out, known)
        # By name as well, so that `fire("POST_EPOCH", ...)` is the same look-up.
        self._points: dict[HookPoint | str, PointHooks | None] = {}
        if not self._plan.undecided:  # else `fire` finds nothing there, and says why
            for point in HookPoint:
                self._points[point] = self._points[point.name] = self._plan.points.get(point)

    @property
    def loop_type(self) -> str | None:
        """Which ``loop_points`` hold: ``"epoch"``, ``"step"``; None: ``hook_points`` do. The loops set it."""
        return self._loop_type

    @loop_type.setter
    def loop_type(self, loop_type: str) -> None:
        if self._made_for not in (None, loop_type):
            raise OptionError(f"This manager has loop_type={self._made_for!r}, and the {loop_type} loop was to use it.")
        if loop_type != self._loop_type:
            self._loop_type = loop_type
            self._make_plan()

    # -- steps and firings -------------------------------------------------------------------------------

    def advance_step(self, epoch: int | None = None) -> int:
        """Begin a step; return its number.

        Args:
            epoch: The epoch that it is in, if there is a ``flush_every``: what is flushed now belongs to it. If left
                out, to the epoch of the last firing.
        """
        self._global_step += 1
        ranks = self.ranks
        if self._flush_every is not None and self._global_step % self._flush_every == 0 and self._output.has_steps:
            before = self._global_step - 1
            if self._loop_type == "step":
                epoch = before
            self._flush(self._output.position or 0 if epoch is None else epoch, before)
        RECORDER.manager = self._self
        if not ranks.is_single:
            ranks.check(self._global_step)
            self._settle()
        return self._global_step

    def fire(
        self,
        point: HookPoint | str,
        run_ctx: RunDataContext | Callable[[], RunDataContext] | None = None,
        model_ctx: Any = None,
        *,
        epoch: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Run the hooks that are due at a point; return their metrics, by ``"hook/metric"``.

        Recipe::

            manager.fire(HookPoint.POST_STEP, epoch=epoch, model=model, loss=loss)
            manager.fire(HookPoint.SNAPSHOT, run_ctx, model_ctx)

        Args:
            point: The point.
            run_ctx: What hooks are shown; or a function that makes it, which is called only if a hook is due. If left
                out: a `RunDataContext` of ``epoch`` and ``fields``, made only if a hook is due.
            model_ctx: What interventions work with, or a function that makes it, called only if one is due.
            epoch: The epoch. Beside a ``run_ctx`` it spares making that just to look up the epoch, where hooks have
                windows.
            fields: What else the context has: ``model=``, ``loss=``, ``step=``, …
        """
        if run_ctx is None or fields:
            run_ctx = _context_of_fields(HookPoint.of(point), run_ctx, epoch, fields)
        try:
            hooks = self._points[point]
        except (KeyError, TypeError):
            hooks = self._find_point(HookPoint.of(point))
        if hooks is None or self._global_step < hooks.next_due:
            return {}

        due = hooks.due(self._global_step) if hooks.is_scheduled else hooks.hooks
        if hooks.is_windowed and due:
            run_ctx, due = self._in_window(hooks.point, due, run_ctx, epoch)
        if not due:
            return {}

        ctx = self._make_context(hooks.point, run_ctx)
        step = self._global_step if self._global_step >= 0 else ctx.step
        firing = _Firing(hooks.point, ctx, step, self.ranks)
        observers, interventions = hooks.parts if due is hooks.hooks else split_roles(due)
        if interventions or self.strict:
            model_ctx = model_ctx() if callable(model_ctx) else model_ctx
            interventions = self._possible(interventions, model_ctx)
        outer = self._firing, RECORDER.manager
        if outer[0] is not None:
            _check_nested(outer[0], firing, due)
        self._firing, RECORDER.manager = firing, self._self
        try:
            with _NOT_TRAINING:  # a forward that a hook makes is not training, so trackers do not count it
                if self._managed.offloads or not (hooks.is_pure if due is hooks.hooks else is_pure(due)):
                    streams = hook_rng(undone=bool(interventions), generators=generators_of_loader(ctx.loader))
                    with self._managed.on_device(map(_HOOK_OF, due)), streams:
                        self._observe(firing, observers, model_ctx, is_before=bool(interventions))
                        self._intervene(firing, interventions, model_ctx)
                else:
                    self._observe(firing, observers, model_ctx)
        except BaseException as error:
            self._end(firing, outer, error)
            raise
        self._end(firing, outer)
        return dict(firing.metrics)

    def _find_point(self, point: HookPoint) -> PointHooks | None:
        if self._plan.undecided:
            name = self._plan.undecided[0]
            raise LifecycleError(f"Hook {name!r} has loop_points alone, so HookManager(loop_type=) has to be given.")
        return self._points[point]

    def _in_window(
        self, point: HookPoint, due: tuple[PlannedHook, ...], run_ctx: Any, epoch: int | None
    ) -> tuple[Any, tuple[PlannedHook, ...]]:
        """Return the hooks of ``due`` whose window is open; and the context, made if only it tells the epoch."""
        if self._loop_type != "epoch":
            epoch = self._global_step if self._global_step >= 0 else None
        if epoch is None:
            run_ctx = self._make_context(point, run_ctx)
            epoch = self._position(run_ctx)
        return run_ctx, tuple([planned for planned in due if planned.is_open_at(epoch)])

    def _position(self, ctx: RunDataContext) -> int:
        """Return where metrics belong: the epoch; in other loops than the epoch loop, the step."""
        return ctx.epoch if self._loop_type in (None, "epoch") or ctx.step is None else ctx.step

    def _make_context(self, point: HookPoint, run_ctx: Any) -> RunDataContext:
        ctx = run_ctx() if callable(run_ctx) else run_ctx
        if not isinstance(ctx, RunDataContext):
            raise OptionError(f"fire() takes a RunDataContext, or a function that makes one; got {type_name(ctx)}.")
        if ctx.hook_point is not point and HookPoint.of(ctx.hook_point) is not point:
            raise OptionError(f"fire({point.name}, ...) was given a context of {HookPoint.of(ctx.hook_point).name}.")
        return ctx.with_profiler(self.profiler) if self.profiler.enabled else ctx

    def _end(self, firing: _Firing, outer: tuple[_Firing | None, Any], error: BaseException | None = None) -> None:
        """Hand the metrics of a firing on, however it ended, and warn of what went wrong."""
        self._firing, RECORDER.manager = outer
        self._calls = firing.calls
        for call in firing.calls:
            self.fired[call.hook] += 1
            self._seconds[call.hook] += call.seconds
        output, position = self._output, self._position(firing.ctx)
        firing.metrics = output.take(firing.point, firing.metrics, position, firing.step)
        if not firing.ranks.is_single:
            self._settle(error)
        if error is None and (self._errors.pending or output.fan_out.pending):
            self._warn()

    def _warn(self) -> None:
        """Warn of what went wrong in hooks and sinks; last, as a warning may raise."""
        self._errors.warn_pending()
        self._output.fan_out.warn_pending()

    # -- calling hooks -----------------------------------------------------------------------------------

    def _observe(
        self, firing: _Firing, hooks: Sequence[PlannedHook], model_ctx: Any, *, is_before: bool = False
    ) -> None:
        """Call the observers; if it ``is_before`` interventions, wait until no rank's has raised.

        Interventions wait for each other, in collectives. With several ranks the others run before an error is raised:
        one of them may wait for the same hook of other ranks.
        """
        kept: BaseException | None = None
        ctx = firing.ctx
        is_plain = not (self.strict or self.profiler.enabled)
        for planned in hooks:
            firing.current = planned
            start = perf_counter()
            try:
                if planned.hook.needs_reference_weights:
                    self._reference.give(planned.hook)
                found = planned.hook.compute(ctx) if is_plain else self._compute_checked(planned, ctx, model_ctx)
                if found is not None:
                    add_metrics(planned.name, found, firing.metrics, planned.hook.roots)
            except BaseException as error:
                if not self._goes_on_after(error, firing, planned, perf_counter() - start):
                    if firing.ranks.is_single or not isinstance(error, Exception):
                        raise
                    kept = kept or error
                firing.ranks.hold(planned.name, f"{error_text(error).rstrip('.')} at {firing.place}")
            else:
                firing.calls.append(FiringReceipt(planned.name, planned.scope, perf_counter() - start))
            firing.current = None
        if is_before:
            kept = firing.ranks.meet(kept, f"observers at {firing.place}")
        if kept is not None:
            raise kept

    def _compute_checked(self, planned: PlannedHook, ctx: RunDataContext, model_ctx: Any) -> Any:
        with self._check(planned, ctx, model_ctx), self.profiler.section(planned.name):
            return planned.hook.compute(ctx)

    def _check(self, planned: PlannedHook, ctx: RunDataContext, model_ctx: Any) -> AbstractContextManager[Any]:
        """Return what raises, in strict mode, if an observer changes model, gradients, modes, switches or the batch.

        Random streams count for a hook that is `pure`; for others they are put back anyway.
        """
        guard: Any = getattr(model_ctx, "guard", None)
        if not self.strict or (guard is None and ctx.model is None):
            return _NOTHING
        if guard is None:
            if self._checked[0] is not ctx.model:
                self._checked = ctx.model, Guard(ctx.model)
            guard = self._checked[1]
        found: AbstractContextManager[Any] = guard.check_observers(
            planned.name, random=bool(planned.hook.pure), batch=ctx.batch_data
        )
        return found

    def _possible(self, interventions: tuple[PlannedHook, ...], model_ctx: Any) -> tuple[PlannedHook, ...]:
        """Return the interventions that can run: all, or none, with a warning, where there is no model context."""
        if model_ctx is not None and interventions and getattr(model_ctx, "guard", None) is None:
            raise OptionError(f"fire() takes a ModelDataContext as model_ctx=; got {type_name(model_ctx)}.")
        if model_ctx is not None or not interventions:
            return interventions
        point, names = interventions[0].point.name, ", ".join(repr(planned.name) for planned in interventions)
        self._errors.warn_later(  # once: what is missing at one firing is missing at all of them
            f"no model_ctx: {names}",
            f"Interventions that are due at {point} and do not run, as fire() was given no model_ctx: {names}. Hand "
            "over a ModelDataContext, or a function that makes one.",
        )
        return ()

    def _intervene(self, firing: _Firing, hooks: Sequence[PlannedHook], model_ctx: Any) -> None:
        """Save the run once, and call each intervention in it; what one did is put back before the next."""
        if not hooks:
            return
        guard = model_ctx.guard
        try:
            try:
                batches = firing.ctx.batch_data, getattr(model_ctx, "batch", None)
                guard.save([planned.scope for planned in hooks], batch=batches)
            except GuardError as error:  # no hook has done anything yet, so the policy decides
                refused = LifecycleError(f"Nothing could be put back after it: {error}")
                if not all(self._goes_on_after(refused, firing, planned) for planned in hooks):
                    raise
                return
            for planned in hooks:
                self._intervene_once(firing, planned, model_ctx)
        finally:
            guard.release()

    def _intervene_once(self, firing: _Firing, planned: PlannedHook, model_ctx: Any) -> None:
        hook: Any = planned.hook
        firing.current = planned
        known, error = GuardReceipt(planned.name, planned.scope), None
        try:
            if hook.needs_reference_weights:
                self._reference.give(hook)
            with model_ctx.guard.protecting(planned.name, planned.scope) as known, self.profiler.section(planned.name):
                # Before the state is put back: a metric may be a view of a weight.
                add_metrics(planned.name, hook.intervene(firing.ctx, model_ctx), firing.metrics, hook.roots)
        except BaseException as raised:
            error = raised
        error = firing.ranks.meet(error, f"intervention {planned.name!r} at {firing.place}")
        firing.current = None
        changes = known.touched, known.restored, known.saved_bytes
        if error is None:
            firing.calls.append(FiringReceipt(planned.name, planned.scope, known.seconds, *changes))
        elif not self._goes_on_after(error, firing, planned, known.seconds, *changes):
            raise error

    # -- errors of hooks ---------------------------------------------------------------------------------

    def _goes_on_after(
        self, error: BaseException, firing: _Firing, planned: PlannedHook, seconds: float = 0.0, *changes: Any
    ) -> bool:
        """Count the error of a hook, and keep a warning for the end of the firing; return whether the firing goes on.

        ``seconds`` and ``changes`` are those of its receipt.
        """
        name, text, errors = planned.name, error_text(error), self._errors
        firing.current = None
        # In words: the traceback of the error holds the context, and with it a batch.
        call = FiringReceipt(name, planned.scope, seconds, *changes)
        firing.calls.append(call._replace(error=text))
        if not errors.handle(name, error):
            note = f"Raised by the hook {name!r} at {firing.place}, epoch {firing.ctx.epoch}."
            if isinstance(error, Exception) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)  # the traceback of a class of analyses names neither hook nor step
            return False
        if name in errors.disabled:
            self._make_plan()
        else:
            undone = "what it did is undone, " if planned.intervenes else ""
            sentence = f"Hook {name!r} raised {text.rstrip('.')}; {undone}it stays on, and the run goes on."
            errors.warn_later(name, sentence, hint=Hint.LATER_FAILURES)
        return True

    def _settle(self, raised: BaseException | None = None) -> None:
        """Do on every rank what the error policy says about hooks that failed on any rank, once all know of it."""
        ranks, errors = self._output.ranks, self._errors  # not `self.ranks`: to settle is no reason to meet
        failures, ranks.failures = ranks.failures, {}
        for hook, texts in failures.items():
            error = RankError(f"Hook {hook!r} raised {texts[min(texts)]} on {rank_names([*texts])}.", ranks=(*texts,))
            if errors.on_error == "raise":
                ranks.agreed_error = raised or error
                raise ranks.agreed_error
            if errors.on_error == "disable":
                errors.disabled.add(hook)
            elif ranks.rank not in texts:
                errors.counts[hook] += 1
            errors.warn_later(f"{hook} on other ranks", str(error))
        if failures:
            self._make_plan()
            errors.warn_pending()

    # -- runs --------------------------------------------------------------------------------------------

    def get_hook(self, name: str) -> TrainingHook:
        """Return a hook by its name."""
        if name not in self.hooks:
            raise HookNameError(f"Unknown hook: {name!r}. Available: {', '.join(self.hooks) or 'none'}.")
        return self.hooks[name]

    @property
    def ranks(self) -> OneProcess:
        """What keeps this rank together with the others; to read it first is to meet them, and to compare the hooks."""
        if not self._has_met:
            self._has_met = True
            self._output.ranks = join_ranks(self.hooks, self._flush_every)
        return self._output.ranks

    def leave_ranks(self, error: BaseException) -> Exception | None:
        """Exchange nothing more, since the run ends here by `error`; the loops of hookline call it.

        If all ranks end by it together, what they hold is still exchanged. The record log says what happened. Returns
        an error that names the rank that ended first, where this one only lost it.
        """
        found = self._output.ranks.leave(error)
        if not self._output.ranks.is_single:
            self._output.note(error_text(found or error), self._global_step)
        return found

    def start(self, model: nn.Module) -> None:
        """Tell every hook that training begins, or goes on; the loops of hookline do.

        What the error policy says of one that raises on any rank is done on all of them: one that cannot be started, as
        the model has no such module, is no reason to lose the others.
        """
        ranks, errors = self.ranks, self._errors
        failed: dict[str, Exception] = {}
        ranks.together("starting the hooks", lambda: failed.update(self._managed.start(model, errors.can_continue)))
        for name, error in failed.items():
            text = error_text(error).rstrip(".")
            errors.count(name, error, "in start(model)")  # no traceback: most often the model has no such module
            if errors.on_error == "disable":
                errors.disabled.add(name)
            errors.warn_later(f"start of {name}", f"Hook {name!r} could not be started: {text}; the run goes on.")
            ranks.hold(name, f"{text} in start(model)")
        if errors.on_error != "raise" and not ranks.is_single:
            ranks.reduce({}, "hooks that cannot start")
            self._settle()
        if failed:
            self._make_plan()
            errors.warn_pending()

    def finish(self) -> None:
        """Tell every hook that training is over; the loops of hookline do, however it ended."""
        self._managed.finish()

    def reset_all(self) -> None:
        """Begin another run: steps count from 0, buffers are empty, every hook is reset."""
        restart_hook_stream()
        self.global_step = -1
        self._calls = ()
        self._output.clear()
        self._reference.reset()
        self._managed.reset()

    def set_run_context(self, **context: Any) -> None:
        """Tell hooks and sinks which run this is: ``strategy=``, ``output_dir=``, ``experiment_name=``, …"""
        self._reference.context |= context
        self._managed.set_run_context(context)
        self._output.set_run_context(context)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: the step, what is buffered, and the state of every hook."""
        return {
            "global_step": self._global_step,
            "hooks": self._managed.state_dict(),
            "step_metrics": self._output.steps.state_dict(),
            "disabled": sorted(self._errors.disabled),
            "sinks": self.fan_out.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned. Hooks that it does not have begin anew."""
        missing = [key for key in ("global_step", "hooks", "step_metrics") if key not in state]
        if missing:
            raise OptionError(f"This is no state_dict() of a manager: it has no {', '.join(missing)}.")
        unknown = [name for name in state["hooks"] if name not in self.hooks]
        if unknown:
            warn_user(f"The state of hooks that are not here is passed over: {', '.join(map(repr, unknown))}.")
        self._managed.load_state_dict(state["hooks"])
        self._output.steps.load_state_dict(state["step_metrics"])
        self.fan_out.load_state_dict(state.get("sinks", {}))
        self.fan_out.warn_pending()
        self._errors.disabled = set(state.get("disabled", ())) & set(self.hooks)
        self._make_plan()
        self.global_step = state["global_step"]
        if self._global_step >= 0:  # a run that goes on before its next step may evaluate, and record
            RECORDER.manager = self._self

    # -- metrics and sinks -------------------------------------------------------------------------------

    def take_record(self, name: str, value: Any) -> None:
        """Add a metric to the hook that runs now, or to the current step; ``hookline.record`` calls this."""
        firing = self._firing
        if firing is not None and firing.current is not None:
            add_metrics(firing.current.name, {name: value}, firing.metrics)
        else:
            metrics = {name: copy_metric(value, "record()", name)}
            self._output.steps.add(HookPoint.POST_STEP, max(self._global_step, 0), metrics)

    def flush_step_metrics(self, epoch: int) -> dict[str, Any]:
        """Hand the metrics of all steps since the last time to the sinks, as lists; PRE_STEP first, then POST_STEP."""
        return self._flush(epoch, self._global_step)

    def _flush(self, position: int, step: int) -> dict[str, Any]:
        flushed = self._output.flush_steps(position, step)
        self.fan_out.warn_pending()
        if not self._output.ranks.is_single:
            self._settle()
        return flushed

    def emit_metrics(self, metrics: Mapping[str, Any], step: int, point: HookPoint, *, reduced: bool = False) -> None:
        """Hand metrics of the loop's own to the sinks; of several ranks their mean, unless they are ``reduced``."""
        self._output.emit(metrics, step, HookPoint.of(point), self._global_step, reduced=reduced)

    def get_last_metrics(self, point: HookPoint | None = None) -> dict[str, Any]:
        """Return what the hooks at a point returned last; during a firing there, what they returned so far.

        Args:
            point: None is the point that is firing; outside of a firing, the one that fired last.
        """
        wanted = None if point is None else HookPoint.of(point)
        if self._firing is not None and wanted in (None, self._firing.point):
            return dict(self._firing.metrics)
        return dict(self._output.last.get(wanted, {}))

    @property
    def receipts(self) -> FiringReceipts:
        """The receipts of the last firing: what each hook touched, what was put back, how long it took; as a table."""
        return FiringReceipts(self._calls)

    @property
    def hook_errors(self) -> dict[str, int]:
        """The number of errors of each hook."""
        return dict(self._errors.counts)

    @property
    def sink_errors(self) -> dict[str, int]:
        """The number of errors of each sink."""
        return dict(self.fan_out.errors)

    @property
    def fan_out(self) -> FanOut:
        """The log and the sinks."""
        return self._output.fan_out

    def costs(self) -> dict[str, dict[str, float]]:
        """Return ``count``, ``total_ms`` and ``mean_ms`` of each hook's calls, by the clock of the host."""
        spent = {name: (count, 1e3 * self._seconds[name]) for name, count in self.fired.items()}
        return {name: {"count": n, "total_ms": ms, "mean_ms": ms / n} for name, (n, ms) in spent.items()}

    def flush_sinks(self) -> None:
        """Write what is buffered, and have every sink write what it holds back: the run is over."""
        self._output.flush_rest(self._global_step)
        self.fan_out.flush()
        self.fan_out.warn_pending()

    def close(self) -> None:
        """Write what is buffered, and close sinks and log; may be called again."""
        self._output.flush_rest(self._global_step)
        self.fan_out.close()
        self.fan_out.warn_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                self.leave_ranks(error)
            self.close()
        except HooklineWarning:  # where warnings are errors; what ended the block is what the user has to see
            if kind is None:
                raise

    def __repr__(self) -> str:
        return f"<HookManager of {len(self.hooks)} hooks, step {self._global_step}: {', '.join(self.hooks) or 'none'}>"

    def _repr_html_(self) -> str:
        fired = ", ".join(f"{name} {count}" for name, count in self.fired.items()) or "none yet"
        return self._plan._table().with_foot(f"step {self._global_step}; fired: {fired}").html()


def _check_nested(outer: _Firing, firing: _Firing, due: Sequence[PlannedHook]) -> None:
    """Refuse a firing from another thread, and an intervention inside another, which share one saved state."""
    if outer.thread != firing.thread:
        raise LifecycleError(
            f"{firing.point.name} was fired while another thread fires {outer.point.name}: give each its own manager."
        )
    inner = next((planned.name for planned in due if planned.intervenes), None)
    if inner is not None and outer.current is not None and outer.current.intervenes:
        raise LifecycleError(
            f"The intervention {outer.current.name!r} fires {firing.point.name}, at which {inner!r} intervenes: that "
            "cannot run inside of another. Train by model_ctx.run_training_epoch()."
        )


def _context_of_fields(
    point: HookPoint, run_ctx: Any, epoch: int | None, fields: Mapping[str, Any]
) -> Callable[[], RunDataContext]:
    """Return what makes the context of a ``fire()`` that was given fields in place of one."""
    where = f"fire({point.name}, ...)"
    if run_ctx is not None:
        raise OptionError(f"{where} was given a context, and beside it {', '.join(fields)}; put them into the context.")
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        meant = did_you_mean(unknown[0], _FIELDS)
        raise OptionError(f"{where}: no field {unknown[0]!r}.{meant} A RunDataContext has {', '.join(_FIELDS)}.")
    if epoch is None:
        raise OptionError(f"{where} needs a context, or the epoch at least: fire(point, epoch=epoch, model=model).")
    return partial(RunDataContext, point, epoch, **fields)


def _checked_config(config: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    for name, options in (config or {}).items():
        if not isinstance(options, Mapping):
            raise OptionError(f"hook_config for {name!r} is a dictionary of its arguments; got {options!r}.")
    return dict(config or {})


def _checked_interval(steps: int | None) -> int | None:
    """Return ``flush_every=``, if it is one."""
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1):
        return steps
    raise OptionError(f"flush_every= is a number of steps, 1 or more, or None; got {steps!r}.")
