"""`HookManager`: fire the hooks of a run at its points, and hand their metrics to sinks.

The loops of hookline call it, and so may a user's own. It has a `Plan`, a `FiringEngine` and a `MetricOutput`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from hookline.errors import HooklineWarning, HookNameError, LifecycleError, OptionError
from hookline.guard.rng import kept_rng, restart_hook_stream
from hookline.lifecycle.choose_hooks import checked_interval, choose_hooks, find_excluded, split_config
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.firing import FiringReceipts, receipt_of
from hookline.lifecycle.firing_engine import FiringEngine, parse_moment
from hookline.lifecycle.hook_metrics import copy_metric
from hookline.lifecycle.output import RECORDER, MetricOutput, make_fan_out
from hookline.lifecycle.plan import PointHooks, make_plan
from hookline.lifecycle.plan_queries import PlanQueries
from hookline.lifecycle.profiler import CheckpointProfiler
from hookline.lifecycle.rank_member import RankMember
from hookline.lifecycle.registry import HookRegistry
from hookline.lifecycle.states import ManagedHooks
from hookline.messages import caller_stacklevel
from hookline.when import HookPoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.rank_sync import RankSync
    from hookline.records.fan_out import FanOut
    from hookline.records.log import RecordLog

__all__ = ["HookManager"]


class HookManager(PlanQueries, RankMember):
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
        config, reference_path = split_config(hook_config)
        with kept_rng():  # a hook may begin with a random projection; a run without it must not differ
            self.hooks: dict[str, TrainingHook] = choose_hooks(hook_names, hooks, config)
        """All hooks by name, in the order they were given."""
        self.profiler = CheckpointProfiler(profile_hooks)
        """Times each hook."""
        self.strict = strict
        self._flush_every = checked_interval(flush_every)
        self._self = weakref.ref(self)
        self._managed = ManagedHooks(self.hooks, offload_state=offload_state)
        self._output = MetricOutput(make_fan_out(sinks, log, step_metrics_log))
        self._engine = FiringEngine(
            self._output,
            self.profiler,
            self._self,
            on_error=on_error,
            strict=strict,
            offload=self._managed.offload,
            reference=reference_path if reference_weights is None else reference_weights,
        )
        self._engine.loop_type = self._made_for = loop_type
        for hook in self.hooks.values():
            hook.manager = self
        self.set_capabilities(capabilities)

    # -- the plan ----------------------------------------------------------------------------------------

    def set_capabilities(self, capabilities: Iterable[str] | None) -> None:
        """Leave out hooks that require something else than the run can do; None: it can do anything."""
        self._excluded = find_excluded(self.hooks, capabilities)
        self._make_plan()

    def _make_plan(self) -> None:
        self._output.counts_steps = self.loop_type not in (None, "epoch")
        off = self._engine.errors.why_disabled()
        known = [] if all(not (h.before or h.after) for h in self.hooks.values()) else HookRegistry.known()
        self._set_plan(make_plan(self.hooks, self.loop_type, {**self._excluded, **off}, known))
        # By name as well, so that `fire("POST_EPOCH", ...)` is the same look-up.
        self._points: dict[HookPoint | str, PointHooks | None] = {}
        if not self._plan.undecided:  # else `fire` finds nothing there, and says why
            for point in HookPoint:
                self._points[point] = self._points[point.name] = self._plan.points.get(point)

    @property
    def loop_type(self) -> str | None:
        """The loop whose ``loop_points`` hold: ``"epoch"``, ``"step"``, or None for ``hook_points``."""
        return self._engine.loop_type

    def set_loop_type(self, loop_type: str) -> None:
        """Say which loop runs, unless the manager was made for one; the loops of hookline do."""
        if self._made_for not in (None, loop_type):
            raise OptionError(
                f"This manager was made for the {self._made_for} loop (loop_type={self._made_for!r}), and the "
                f"{loop_type} loop was to use it; leave loop_type= out, or make another manager."
            )
        if loop_type != self.loop_type:
            self._engine.loop_type = loop_type
            self._make_plan()

    # -- steps and firings -------------------------------------------------------------------------------

    def advance_step(self, epoch: int | None = None) -> int:
        """Begin a step; return its number.

        Args:
            epoch: The epoch that it is in, if there is a ``flush_every``: what is flushed now belongs to it. If left
                out, to the epoch of the last firing.
        """
        self._global_step += 1
        if not self._engine.has_met:
            self.meet_ranks()
        if self._flush_every is not None and self._global_step % self._flush_every == 0 and self._output.has_steps:
            before = self._global_step - 1
            if self.loop_type == "step":
                epoch = before
            self._flush(self._output.position or 0 if epoch is None else epoch, before)
        RECORDER.manager = self._self
        if self._engine.ranks is not None:
            self._check_ranks(self._engine.ranks)
        return self._global_step

    def fire(
        self,
        point: HookPoint | str | RunDataContext,
        run_ctx: RunDataContext | Callable[[], RunDataContext] | None = None,
        model_ctx: Any = None,
        *,
        epoch: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Run the hooks that are due at a point; return their metrics, by ``"hook/metric"``.

        Recipe::

            manager.fire(HookPoint.POST_STEP, epoch=epoch, model=model, loss=loss)
            manager.fire(RunDataContext(HookPoint.POST_STEP, epoch, model=model, loss=loss))
            manager.fire(HookPoint.SNAPSHOT, run_ctx, model_ctx)  # the point twice: the two have to agree

        Args:
            point: The point; or a context alone, which has it: ``fire(run_ctx, model_ctx)``.
            run_ctx: What hooks are shown; or a function that makes it, which is called only if a hook is due. If left
                out: a `RunDataContext` of ``epoch`` and ``fields``, made only if a hook is due.
            model_ctx: What interventions work with, or a function that makes it, called only if one is due.
            epoch: The epoch. Beside a ``run_ctx`` it spares making that just to look up the epoch, where hooks have
                windows.
            fields: What else the context has: ``model=``, ``loss=``, ``step=``, …
        """
        if run_ctx is None or fields or isinstance(point, RunDataContext):
            point, run_ctx, model_ctx = parse_moment(point, run_ctx, model_ctx, epoch, fields)
        try:
            hooks = self._points[point]
        except (KeyError, TypeError):
            hooks = self._find_point(HookPoint.of(point))
        if hooks is None or self._global_step < hooks.next_due:
            return {}
        if not self._engine.has_met:
            self.meet_ranks()
        try:
            return self._engine.fire(hooks, run_ctx, model_ctx, epoch, self._global_step)
        finally:
            if self._engine.errors.disabled:
                self._drop_disabled()

    def _find_point(self, point: HookPoint) -> PointHooks | None:
        if self._plan.undecided:
            raise LifecycleError(
                f"Hook {self._plan.undecided[0]!r} has loop_points and no hook_points, so it has to be known which "
                'loop runs; say HookManager(..., loop_type="epoch"), or "step", or give it hook_points.'
            )
        return self._points[point]

    def take_record(self, name: str, value: Any) -> None:
        """Add a metric to the hook that runs now, or to the current step; ``hookline.record`` calls this."""
        firing = self._engine.current
        if firing is None or not firing.take_record(name, value):
            metrics = {name: copy_metric(value, "record()", name)}
            self._output.steps.add(HookPoint.POST_STEP, max(self._global_step, 0), metrics)

    # -- runs --------------------------------------------------------------------------------------------

    def get_hook(self, name: str) -> TrainingHook:
        """Return a hook by its name."""
        if name not in self.hooks:
            raise HookNameError(f"Unknown hook: {name!r}. Available: {', '.join(self.hooks) or 'none'}.")
        return self.hooks[name]

    def start(self, model: nn.Module) -> None:
        """Tell every hook that training begins, or goes on; the loops of hookline do."""
        self.meet_ranks()
        if self._engine.start_hooks(self._managed, model):
            self._drop_disabled()

    def meet_ranks(self) -> RankSync | None:
        """Find out whether there are other ranks, and check that they have the same hooks; the loops call it."""
        self._output.ranks = self._engine.meet_ranks(self.hooks, self._flush_every)
        return self._output.ranks

    def finish(self) -> None:
        """Tell every hook that training is over; the loops of hookline do, however it ended."""
        self._managed.finish()

    def reset_all(self) -> None:
        """Begin another run: steps count from 0, buffers are empty, every hook is reset."""
        restart_hook_stream()
        self._set_step(-1)
        self._output.clear()
        self._engine.reset()
        self._managed.reset(firing=self._engine.current is not None)

    def set_run_context(self, **context: Any) -> None:
        """Tell hooks and sinks which run this is: ``strategy=``, ``output_dir=``, ``experiment_name=``, …"""
        self._engine.run_context |= context
        self._managed.set_run_context(context)
        self._output.set_run_context(context)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: the step, what is buffered, and the state of every hook."""
        return {
            "global_step": self._global_step,
            "hooks": self._managed.state_dict(firing=self._engine.current is not None),
            "step_metrics": self._output.steps.state_dict(),
            "disabled": sorted(self._engine.errors.disabled),
            "sinks": self.fan_out.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned. Hooks that it does not have begin anew."""
        missing = [key for key in ("global_step", "hooks", "step_metrics") if key not in state]
        if missing:
            raise OptionError(
                f"load_state_dict() takes what state_dict() of a manager gave; this has no {', '.join(missing)}."
            )
        unknown = [name for name in state["hooks"] if name not in self.hooks]
        if unknown:
            text = f"The state of hooks that are not here is passed over: {', '.join(map(repr, unknown))}."
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
        self._managed.load_state_dict(state["hooks"], firing=self._engine.current is not None)
        self._output.steps.load_state_dict(state["step_metrics"])
        self.fan_out.load_state_dict(state.get("sinks", {}))
        self.fan_out.warn_pending()
        self._engine.errors.disabled = set(state.get("disabled", ())) & set(self.hooks)
        self._make_plan()
        self._set_step(state["global_step"])
        if self._global_step >= 0:  # a run that goes on before its next step may evaluate, and record
            RECORDER.manager = self._self

    # -- metrics and sinks -------------------------------------------------------------------------------

    def flush_step_metrics(self, epoch: int) -> dict[str, Any]:
        """Hand the metrics of all steps since the last time to the sinks, as lists; PRE_STEP first, then POST_STEP."""
        return self._flush(epoch, self._global_step)

    def _flush(self, position: int, step: int) -> dict[str, Any]:
        flushed = self._output.flush_steps(position, step)
        self.fan_out.warn_pending()
        if self._engine.ranks is not None:
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
        return self._output.last(None if point is None else HookPoint.of(point), self._engine.current)

    @property
    def fired(self) -> Counter[str]:
        """The number of calls of each hook."""
        return self._engine.calls

    @property
    def receipts(self) -> FiringReceipts:
        """The receipts of the last firing: what each hook touched, what was put back, how long it took; as a table."""
        return FiringReceipts(receipt_of(*done) for done in self._engine.done)

    @property
    def hook_errors(self) -> dict[str, int]:
        """The number of errors of each hook."""
        return dict(self._engine.errors.counts)

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
        return self._engine.costs()

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
