"""`HookManager`: fire the hooks of a run at its points, and hand their metrics to sinks.

The loops of hookline call it, and so may a user's own. It has the `ManagedHooks` with their `Plan`, and a
`MetricOutput`; `fire` reads from top to bottom: what is due, the context, random streams, observers, interventions
with their guard, metrics. Metrics are checked and copied when a hook returns them; those of steps wait in a buffer,
others go at once, and all are brought to the host before `FanOut` writes them. `record` adds single ones.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from hookline.error_policy import error_text, warn_user
from hookline.errors import GuardError, HooklineWarning, HookNameError, LifecycleError, MetricError, OptionError
from hookline.guard.guard import GuardReceipt
from hookline.guard.loaders import generators_of_loader
from hookline.guard.rng import hook_rng, kept_rng, restart_hook_stream
from hookline.lifecycle.context import CheckpointProfiler, RunDataContext
from hookline.lifecycle.managed_hooks import (
    FiringReceipt,
    ManagedHooks,
    PlannedHook,
    ReferenceWeights,
    is_pure,
    split_roles,
)
from hookline.lifecycle.ranks import OneProcess, join_ranks
from hookline.lifecycle.registry import choose_hooks
from hookline.messages import did_you_mean, type_name
from hookline.observe.host_values import on_host
from hookline.phases import in_phase
from hookline.records.log import FanOut, own_rank
from hookline.records.sink import Record, StepSeries
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.managed_hooks import Plan
    from hookline.records.log import RecordLog

_NOT_TRAINING: Final = in_phase("intervention")
PLAIN: Final = frozenset({float, int, bool, str, type(None)})
"""Types that every sink can write as they are."""
_NAMES: Final = frozenset({str})
_FIELDS: Final = [field.name for field in dataclasses.fields(RunDataContext)][2:]
_STEP_POINTS: Final = (HookPoint.PRE_STEP, HookPoint.POST_STEP)


class HookManager:
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
            raises is warned of once and counted (``fan_out.errors``); the others get theirs, and the run goes on.
        offload_state: Keep the state tensors of hooks on the CPU while they do not run.
        hook_config: Arguments for making hooks: ``{"hessian": {"epsilon": 1e-3}}``.
        step_metrics_log: A file that gets the metrics of single steps, a line of JSON per flush.
        profile_hooks: Time every hook: ``print(manager.profiler)``.
        loop_type: ``"epoch"`` or ``"step"``: which of the ``loop_points`` hold. None: ``hook_points`` do.
        capabilities: What the run can do; hooks that require something else are left out, with a warning.
        on_error: When a hook raises, and what it did has been undone: ``"raise"``, ``"warn"`` (once; it stays on) or
            ``"disable"`` (logged; it is switched off). Metrics of the others go out in any case.
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
        reference_weights: Any = None,
        log: str | Path | RecordLog | None = None,
        flush_every: int | None = None,
    ) -> None:
        config = _checked_config(hook_config)
        reference_path = config.pop("reference_weights", {}).get("path")
        with kept_rng():  # a hook may begin with a random projection; a run without it must not differ
            chosen = choose_hooks(hook_names, hooks, config)
        self.hooks = ManagedHooks(chosen, loop_type, on_error, offload=offload_state)
        """All hooks by name, in the order they were given; with their receipts, errors and costs."""
        self.plan = self.hooks.plan
        """Which hook runs at which point, in which order, on which steps, and what it needs; prints as a table."""
        self.global_step = -1
        """The current step of the run, counted from 0; -1 before the first. May be set by a loop that goes on."""
        self._known = self.plan.known
        self.profiler = CheckpointProfiler(profile_hooks)
        """Times each hook."""
        self.fan_out = make_fan_out(sinks, log, step_metrics_log)
        """The log and the sinks."""
        if flush_every is not None and flush_every < 1:
            raise OptionError(f"flush_every= is a number of steps, 1 or more, or None; got {flush_every!r}.")
        self._flush_every = flush_every
        self.output = MetricOutput(self.fan_out, self.plan, partial(join_ranks, self.hooks, flush_every))
        """Takes metrics to the log and the sinks, and knows the ranks of the run."""
        self._recorder = weakref.ref(self.output)
        self._reference = ReferenceWeights(reference_path if reference_weights is None else reference_weights)
        for hook in self.hooks.values():
            hook.manager = self
        self.set_capabilities(capabilities)

    def set_capabilities(self, capabilities: Iterable[str] | None) -> None:
        """Leave out hooks that require something else than the run can do, with a warning; None: it can do anything."""
        there = {capabilities} if isinstance(capabilities, str) else None if capabilities is None else set(capabilities)
        missing = {} if there is None else {n: sorted(set(h.requires) - there) for n, h in self.hooks.items()}
        reasons = {n: f"requires {', '.join(what)}, which is not here" for n, what in missing.items() if what}
        for name, reason in reasons.items():
            warn_user(f"Hook {name!r} excluded: {reason}")
        self.hooks.exclude(reasons)

    # -- what a loop may ask before it computes or allocates anything: is there a hook that needs it? With an
    # ``epoch`` (in the step loop, the step), is there one whose window has that?

    def has_hooks_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether any hook fires at one of these points."""
        return any(True for _ in self.plan.hooks_at(points, epoch))

    def has_interventions(self) -> bool:
        """Return whether any hook intervenes anywhere."""
        return self.has_interventions_at(*HookPoint)

    def has_interventions_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether any hook intervenes at one of these points; if not, no ``model_ctx`` is needed there."""
        return any(planned.intervenes for planned in self.plan.hooks_at(points, epoch))

    def needs_grad_accumulation(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether a hook at one of these points, or at any if none is given, has ``needs_grads``."""
        return self.plan.needs("needs_grads", *points, epoch=epoch)

    needs_grad_accumulation_at = needs_grad_accumulation

    def needs_pre_epoch_state(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether a hook at one of these points, or at any if none is given, has ``needs_pre_epoch_state``."""
        return self.plan.needs("needs_pre_epoch_state", *points, epoch=epoch)

    needs_pre_epoch_state_at = needs_pre_epoch_state

    def needs_prev_step_grads(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether a hook at one of these points, or at any if none is given, has ``needs_prev_step_grads``."""
        return self.plan.needs("needs_prev_step_grads", *points, epoch=epoch)

    needs_prev_step_grads_at = needs_prev_step_grads

    def needs_prev_step_grads_this_step(self, epoch: int | None = None) -> bool:
        """Return whether a hook that is due at this step has ``needs_prev_step_grads``."""
        return self.plan.needs("needs_prev_step_grads", *_STEP_POINTS, epoch=epoch, step=self.global_step)

    def has_active_step_hooks(self, epoch: int | None = None) -> bool:
        """Return whether a hook is due at this step."""
        return any(True for _ in self.plan.hooks_at(_STEP_POINTS, epoch, self.global_step))

    def has_active_step_interventions(self, epoch: int | None = None) -> bool:
        """Return whether a hook that is due at this step intervenes."""
        return any(hook.intervenes for hook in self.plan.hooks_at(_STEP_POINTS, epoch, self.global_step))

    # -- steps and firings -------------------------------------------------------------------------------

    def advance_step(self, epoch: int | None = None) -> int:
        """Begin a step; return its number.

        Args:
            epoch: The epoch that it is in, if there is a ``flush_every``: what is flushed now belongs to it. If left
                out, to the epoch of the last firing.
        """
        output = self.output
        ranks = output.ranks
        self.global_step += 1
        if self._flush_every is not None and self.global_step % self._flush_every == 0 and output.has_steps:
            before = self.global_step - 1
            if self.plan.loop_type == "step":
                epoch = before
            self._flush(output.position or 0 if epoch is None else epoch, before)
        output.step = self.global_step
        RECORDER.output = self._recorder
        if not ranks.is_single:
            ranks.check(self.global_step)
            self.hooks.settle(ranks)
        return self.global_step

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
            hooks = self._known[point]
        except (KeyError, TypeError):
            hooks = self.plan.find(point)
        if hooks is None or self.global_step in hooks.quiet:
            return {}

        due = hooks.due(self.global_step) if hooks.is_scheduled else hooks.hooks
        if hooks.is_windowed and due:
            run_ctx, due = self._in_window(hooks.point, due, run_ctx, epoch)
        if not due:
            return {}

        ctx = self._make_context(hooks.point, run_ctx)
        step = self.global_step if self.global_step >= 0 else ctx.step
        firing = Firing(hooks.point, ctx, step, self.plan.position(ctx.epoch, ctx.step), self.output.ranks)
        observers, interventions = hooks.parts if due is hooks.hooks else split_roles(due)
        if interventions:
            model_ctx = model_ctx() if callable(model_ctx) else model_ctx
            interventions = self._possible(interventions, model_ctx)
        outer = self.output.firing, RECORDER.output
        if outer[0] is not None:
            _check_nested(outer[0], firing, due)
        self.output.firing, RECORDER.output = firing, self._recorder
        try:
            with _NOT_TRAINING:  # a forward that a hook makes is not training, so trackers do not count it
                if self.hooks.offloads or not (hooks.is_pure if due is hooks.hooks else is_pure(due)):
                    streams = hook_rng(undone=bool(interventions), generators=generators_of_loader(ctx.loader))
                    with self.hooks.on_device([planned.hook for planned in due]), streams:
                        self._observe(firing, observers, is_before=bool(interventions))
                        if interventions:
                            self._intervene(firing, interventions, model_ctx)
                else:
                    self._observe(firing, observers)
        except BaseException as error:
            self._end(firing, outer, error)
            raise
        self._end(firing, outer)
        return dict(firing.metrics)

    def _in_window(
        self, point: HookPoint, due: tuple[PlannedHook, ...], run_ctx: Any, epoch: int | None
    ) -> tuple[Any, tuple[PlannedHook, ...]]:
        """Return the hooks of ``due`` whose window is open; and the context, made if only it tells the epoch."""
        if self.plan.loop_type == "step":
            epoch = self.global_step if self.global_step >= 0 else None
        if epoch is None:
            run_ctx = self._make_context(point, run_ctx)
            epoch = self.plan.position(run_ctx.epoch, run_ctx.step)
        return run_ctx, tuple([planned for planned in due if planned.is_open_at(epoch)])

    def _make_context(self, point: HookPoint, run_ctx: Any) -> RunDataContext:
        ctx = run_ctx() if callable(run_ctx) else run_ctx
        if not isinstance(ctx, RunDataContext):
            raise OptionError(f"fire() takes a RunDataContext, or a function that makes one; got {type_name(ctx)}.")
        if ctx.hook_point is not point and HookPoint.of(ctx.hook_point) is not point:
            raise OptionError(f"fire({point.name}, ...) was given a context of {HookPoint.of(ctx.hook_point).name}.")
        return ctx.with_profiler(self.profiler) if self.profiler.enabled else ctx

    def _end(self, firing: Firing, outer: tuple[Firing | None, Any], error: BaseException | None = None) -> None:
        """Hand the metrics of a firing on, however it ended, and warn of what went wrong."""
        self.output.firing, RECORDER.output = outer
        hooks = self.hooks
        hooks.receipts = firing.receipts
        for receipt in firing.receipts:
            hooks.fired[receipt.hook] += 1
            hooks.seconds[receipt.hook] += receipt.seconds
        firing.metrics = self.output.take(firing)
        if not firing.ranks.is_single:
            hooks.settle(firing.ranks, error)
        if error is None and (hooks.policy.pending or self.fan_out.pending):
            hooks.policy.warn_pending()  # last, as a warning may raise
            self.fan_out.warn_pending()

    # -- calling hooks -----------------------------------------------------------------------------------

    def _observe(self, firing: Firing, hooks: Sequence[PlannedHook], *, is_before: bool = False) -> None:
        """Call the observers; if it ``is_before`` interventions, wait until no rank's has raised.

        Interventions wait for each other, in collectives. With several ranks the others run before an error is raised:
        one of them may wait for the same hook of other ranks.
        """
        kept: BaseException | None = None
        for planned in hooks:
            firing.current = planned
            start = perf_counter()
            try:
                if planned.hook.needs_reference_weights:
                    self._reference.give(planned.hook)
                with self.profiler.section(planned.name):
                    found = planned.hook.compute(firing.ctx)
                if found is not None:
                    add_metrics(planned.name, found, firing.metrics)
            except BaseException as error:
                if not self._goes_on_after(error, firing, planned, perf_counter() - start):
                    if firing.ranks.is_single or not isinstance(error, Exception):
                        raise
                    kept = kept or error
                firing.ranks.hold(planned.name, f"{error_text(error).rstrip('.')} at {firing.place}")
            else:
                firing.receipts.append(FiringReceipt(planned.name, planned.scope, perf_counter() - start))
            firing.current = None
        if is_before:
            kept = firing.ranks.meet(kept, f"observers at {firing.place}")
        if kept is not None:
            raise kept

    def _possible(self, interventions: tuple[PlannedHook, ...], model_ctx: Any) -> tuple[PlannedHook, ...]:
        """Return the interventions that can run: all, or none, with a warning, where there is no model context."""
        if model_ctx is not None and interventions and getattr(model_ctx, "guard", None) is None:
            raise OptionError(f"fire() takes a ModelDataContext as model_ctx=; got {type_name(model_ctx)}.")
        if model_ctx is not None or not interventions:
            return interventions
        point, names = interventions[0].point.name, ", ".join(repr(planned.name) for planned in interventions)
        self.hooks.policy.warn_later(  # once: what is missing at one firing is missing at all of them
            f"no model_ctx: {names}",
            f"Interventions that are due at {point} and do not run, as fire() was given no model_ctx: {names}. Hand "
            "over a ModelDataContext, or a function that makes one.",
        )
        return ()

    def _intervene(self, firing: Firing, hooks: Sequence[PlannedHook], model_ctx: Any) -> None:
        """Save the run once, and call each intervention in it; what one did is put back before the next."""
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

    def _intervene_once(self, firing: Firing, planned: PlannedHook, model_ctx: Any) -> None:
        hook: Any = planned.hook
        firing.current = planned
        known, error = GuardReceipt(planned.name, planned.scope), None
        try:
            if hook.needs_reference_weights:
                self._reference.give(hook)
            with model_ctx.guard.protecting(planned.name, planned.scope) as known, self.profiler.section(planned.name):
                # Before the state is put back: a metric may be a view of a weight.
                add_metrics(planned.name, hook.intervene(firing.ctx, model_ctx), firing.metrics)
        except BaseException as raised:
            error = raised
        error = firing.ranks.meet(error, f"intervention {planned.name!r} at {firing.place}")
        firing.current = None
        changes = known.touched, known.restored, known.saved_bytes
        if error is None:
            firing.receipts.append(FiringReceipt(planned.name, planned.scope, known.seconds, *changes))
        elif not self._goes_on_after(error, firing, planned, known.seconds, *changes):
            raise error

    def _goes_on_after(
        self, error: BaseException, firing: Firing, planned: PlannedHook, seconds: float = 0.0, *changes: Any
    ) -> bool:
        """Note the error of a hook, with `seconds` and `changes` in its receipt; return whether the firing goes on."""
        firing.current = None
        # In words: the traceback of the error holds the context, and with it a batch.
        receipt = FiringReceipt(planned.name, planned.scope, seconds, *changes)
        firing.receipts.append(receipt._replace(error=error_text(error)))
        return self.hooks.goes_on_after(error, planned, f"{firing.place}, epoch {firing.ctx.epoch}")

    # -- runs --------------------------------------------------------------------------------------------

    def get_hook(self, name: str) -> TrainingHook:
        """Return a hook by its name."""
        if name not in self.hooks:
            raise HookNameError(f"Unknown hook: {name!r}. Available: {', '.join(self.hooks) or 'none'}.")
        return self.hooks[name]

    def reset_all(self) -> None:
        """Begin another run: steps count from 0, buffers are empty, every hook is reset."""
        restart_hook_stream()
        self.global_step = -1
        self.output.clear()
        self._reference.reset()
        self.hooks.reset()

    def set_run_context(self, **context: Any) -> None:
        """Tell hooks and sinks which run this is: ``strategy=``, ``output_dir=``, ``experiment_name=``, …"""
        self._reference.context |= context
        self.hooks.set_run_context(context)
        self.output.set_run_context(context)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: the step, what is buffered, and the state of every hook."""
        return {
            "global_step": self.global_step,
            "hooks": self.hooks.state_dict(),
            "step_metrics": self.output.steps.state_dict(),
            "disabled": sorted(self.hooks.policy.disabled),
            "sinks": self.fan_out.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned. Hooks that it does not have begin anew."""
        missing = [key for key in ("global_step", "hooks", "step_metrics") if key not in state]
        if missing:
            raise OptionError(f"This is no state_dict() of a manager: it has no {', '.join(missing)}.")
        self.hooks.load_state_dict(state["hooks"], state.get("disabled", ()))
        self.output.steps.load_state_dict(state["step_metrics"])
        self.fan_out.load_state_dict(state.get("sinks", {}))
        self.fan_out.warn_pending()
        self.global_step = self.output.step = state["global_step"]
        if self.global_step >= 0:  # a run that goes on before its next step may evaluate, and record
            RECORDER.output = self._recorder

    # -- metrics and sinks -------------------------------------------------------------------------------

    def flush_step_metrics(self, epoch: int) -> dict[str, Any]:
        """Hand the metrics of all steps since the last time to the sinks, as lists; PRE_STEP first, then POST_STEP."""
        return self._flush(epoch, self.global_step)

    def _flush(self, position: int, step: int) -> dict[str, Any]:
        flushed = self.output.flush_steps(position, step)
        self.fan_out.warn_pending()
        if not self.output.met.is_single:
            self.hooks.settle(self.output.met)
        return flushed

    def emit_metrics(self, metrics: Mapping[str, Any], step: int, point: HookPoint, *, reduced: bool = False) -> None:
        """Hand metrics of the loop's own to the sinks; of several ranks their mean, unless they are ``reduced``."""
        self.output.emit(metrics, step, HookPoint.of(point), self.global_step, reduced=reduced)

    def get_last_metrics(self, point: HookPoint | None = None) -> dict[str, Any]:
        """Return what the hooks at a point returned last; during a firing there, what they returned so far.

        Args:
            point: None is the point that is firing; outside of a firing, the one that fired last.
        """
        return self.output.last(None if point is None else HookPoint.of(point))

    def flush_sinks(self) -> None:
        """Write what is buffered, and have every sink write what it holds back: the run is over."""
        self.output.flush_rest(self.global_step)
        self.fan_out.flush()
        self.fan_out.warn_pending()

    def close(self) -> None:
        """Write what is buffered, and close sinks and log; may be called again."""
        self.output.flush_rest(self.global_step)
        self.fan_out.close()
        self.fan_out.warn_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                self.output.met.leave(error)
            self.close()
        except HooklineWarning:  # where warnings are errors; what ended the block is what the user has to see
            if kind is None:
                raise

    def __repr__(self) -> str:
        return f"<HookManager of {len(self.hooks)} hooks, step {self.global_step}: {', '.join(self.hooks) or 'none'}>"

    def _repr_html_(self) -> str:
        fired = ", ".join(f"{name} {count}" for name, count in self.hooks.fired.items()) or "none yet"
        return self.plan._table().with_foot(f"step {self.global_step}; fired: {fired}").html()


def _check_nested(outer: Firing, firing: Firing, due: Sequence[PlannedHook]) -> None:
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
    found = config or {}
    if not isinstance(found, Mapping) or not all(isinstance(options, Mapping) for options in found.values()):
        form = '{"hessian": {"epsilon": 1e-3}}'
        raise OptionError(f"hook_config= has a dictionary of arguments for each hook, {form}; got {config!r}.")
    return dict(found)


# -- metrics, to the log and the sinks ---------------------------------------------------------------------------


class _Recorder:
    # Of the process, not of a thread: on CUDA, gradient hooks run in a thread of autograd's.
    __slots__ = ("output",)

    def __init__(self) -> None:
        self.output: weakref.ref[MetricOutput] | None = None


RECORDER: Final = _Recorder()
"""Has the ``output`` that `record` adds to: who sets one puts back the one before."""


def record(name: str, value: Any) -> None:
    """Add a metric to the current record.

    Recipe::

        def hook(module, inputs, output):
            hookline.record("largest", output.detach().abs().amax())

    Inside a hook of a manager it is one more of that hook's metrics, ``"hook/name"``. Elsewhere, in a hook of a module
    say, it is a metric ``name`` of the current step of the manager whose ``advance_step()`` was called last. Tensors
    stay on their device until the step metrics are flushed.
    """
    output = None if RECORDER.output is None else RECORDER.output()
    if output is None:
        raise LifecycleError(f"record({name!r}, ...) has no record to join: call manager.advance_step() at each step.")
    if not isinstance(name, str):
        raise MetricError(f"record() was given the name {name!r}; names of metrics are strings.")
    output.record(name, value)


@dataclass(slots=True, eq=False)
class Firing:
    """A point that is being fired."""

    point: HookPoint
    ctx: RunDataContext
    step: int | None
    """The step of the run; None before the first."""
    position: int
    """Where its metrics belong: the epoch; in the step loop the step."""
    ranks: OneProcess
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the hooks so far have returned, by ``"hook/metric"``."""
    current: PlannedHook | None = None
    """The hook that runs now."""
    receipts: list[FiringReceipt] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)

    @property
    def place(self) -> str:
        """The point and the step, in words."""
        return f"{self.point.name}, step {self.step or 0}"


class MetricOutput:
    """Hand metrics to the log and the sinks; remember what each point returned last.

    Args:
        fan_out: The log and the sinks.
        plan: Says whether the run counts steps, so that records have no epoch.
        join: Makes the ranks of the run, when they are first asked for.
    """

    def __init__(self, fan_out: FanOut, plan: Plan, join: Callable[[], OneProcess]) -> None:
        self.fan_out = fan_out
        self.steps = StepBuffer()
        self.step = -1
        """The current step, to which `record` adds."""
        self.firing: Firing | None = None
        """The firing under way."""
        self.position: int | None = None
        """The epoch, or step, of the last firing: buffered metrics belong there if no loop flushes them."""
        self.met = OneProcess()
        """The ranks that were met: one process, as long as nobody asked for `ranks`."""
        self._plan, self._join = plan, join
        self._has_met = False
        self._last: dict[HookPoint | None, dict[str, Any]] = {}
        """What each point returned last; under None, the point that fired last."""
        self._strategy: str | None = None
        self._rank = own_rank()

    @property
    def ranks(self) -> OneProcess:
        """What keeps this rank together with the others; to read it first is to meet them, and to compare the hooks."""
        if not self._has_met:
            self._has_met = True
            self.met = self._join()
        return self.met

    def record(self, name: str, value: Any) -> None:
        """Add a metric to the hook that runs now, or to the current step; `hookline.record` calls this."""
        firing = self.firing
        if firing is not None and firing.current is not None:
            add_metrics(firing.current.name, {name: value}, firing.metrics)
        else:
            metrics = {name: copy_metric(value, "record()", name)}
            self.steps.add(HookPoint.POST_STEP, max(self.step, 0), metrics)

    def take(self, firing: Firing) -> dict[str, Any]:
        """Buffer the metrics of a firing at a step, or write those of another point, of all ranks; return them."""
        point, metrics = firing.point, firing.metrics
        if point.is_step:
            if metrics:
                self.steps.add(point, max(firing.step or 0, 0), metrics)  # ranks exchange them when they are flushed
        elif metrics or not self.met.is_single:
            metrics = to_host(metrics)
            if not self.met.is_single:
                metrics = self.met.reduce(metrics, f"metrics at {point.name}")
            self._write(metrics, firing.position, point, firing.step)
        self._last[point] = self._last[None] = metrics
        self.position = firing.position
        return metrics

    def last(self, point: HookPoint | None) -> dict[str, Any]:
        """Return what a point returned last, or the point that fired last; of one that is firing, what is there yet."""
        if self.firing is not None and point in (None, self.firing.point):
            return dict(self.firing.metrics)
        return dict(self._last.get(point, {}))

    def flush_steps(self, position: int, step: int) -> dict[str, Any]:
        """Write the buffered metrics of all steps, of all ranks, as lists; return them."""
        flushed: dict[str, Any] = {}
        for point, metrics in self.met.reduce_steps(self.steps.take()).items():
            self._write(metrics, position, point, step)
            flushed |= metrics
        if self.met.last_words:
            self._write({"run/error": self.met.last_words}, position, HookPoint.POST_STEP, step)
            self.met.last_words = ""
        return flushed

    @property
    def has_steps(self) -> bool:
        """True if there is something to flush; with several ranks it is asked of all of them, by the flush itself."""
        return bool(self.steps) or not self.met.is_single

    def flush_rest(self, step: int) -> None:
        """Write what is buffered when no loop says where it belongs: at the position of the last firing."""
        if self.has_steps:
            self.flush_steps(max(step, 0) if self.position is None else self.position, step)

    def emit(self, metrics: Mapping[str, Any], position: int, point: HookPoint, step: int, *, reduced: bool) -> None:
        """Write metrics that are no hook's at once."""
        metrics = to_host({name: copy_metric(value, "emit_metrics()", name) for name, value in metrics.items()})
        if not reduced:
            metrics = self.met.reduce(metrics, f"metrics of the loop at {point.name}")
        self._write(metrics, position, point, step)
        self.fan_out.warn_pending()

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Tell the sinks which run follows."""
        if "strategy" in context:
            self._strategy = None if context["strategy"] is None else str(context["strategy"])
        self.fan_out.set_run_context(context)
        self.fan_out.warn_pending()

    def _write(self, metrics: Mapping[str, Any], position: int, point: HookPoint, step: int | None) -> None:
        if metrics and not self.fan_out.is_empty:
            number = None if step is None or step < 0 else step
            epoch: int | None = position
            if self._plan.loop_type == "step":
                # The position counts where the user's loop does not; 0 is also that before the first step.
                epoch, number = None, number if number is not None else position or None
            self.fan_out.write(Record(metrics, epoch, point, number, self._strategy, self._rank, time.time()))

    def clear(self) -> None:
        """Drop everything that is not written."""
        self.steps.clear()
        self._last.clear()
        self.position, self.step = None, -1


class StepBuffer:
    """Hold values by point and metric, with their steps; tensors stay on their device."""

    def __init__(self) -> None:
        self._series: dict[HookPoint, dict[str, StepSeries]] = {}

    def add(self, point: HookPoint, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one step."""
        series = self._series.setdefault(point, {})
        for name, value in metrics.items():
            kept = series.get(name)
            if kept is None:
                kept = series[name] = StepSeries()
            kept.append(value)
            kept.steps.append(step)

    def take(self) -> dict[HookPoint, dict[str, StepSeries]]:
        """Return everything, on the host, and empty the buffer."""
        found = self._read()
        self.clear()
        return found

    def _read(self) -> dict[HookPoint, dict[str, StepSeries]]:
        """Return everything, on the host; PRE_STEP before POST_STEP."""
        # One transfer for all points: the values go over as one dictionary of lists.
        lists = {f"{point.name} {name}": list(s) for point, found in self._series.items() for name, s in found.items()}
        host = to_host(lists)
        return {
            point: {name: StepSeries(host[f"{point.name} {name}"], s.steps) for name, s in self._series[point].items()}
            for point in HookPoint
            if point in self._series
        }

    def clear(self) -> None:
        """Empty the buffer."""
        self._series.clear()

    def __bool__(self) -> bool:
        return bool(self._series)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {
            point.name: {name: {"steps": list(series.steps), "values": list(series)} for name, series in found.items()}
            for point, found in self._read().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._series = {
            HookPoint.of(point): {name: StepSeries(kept["values"], kept["steps"]) for name, kept in found.items()}
            for point, found in state.items()
        }


def make_fan_out(sinks: Iterable[Any] | FanOut | None, log: Any, step_log: str | Path | None) -> FanOut:
    """Return the fan-out of what a manager was given."""
    if isinstance(sinks, FanOut):
        if log is not None:
            raise OptionError("log= was given beside a FanOut, which has one or has none; say FanOut(sinks, log=...).")
        out = sinks
    else:
        out = FanOut(() if sinks is None else sinks, log)
    out.keep_streams = kept_rng
    if step_log:
        out.add(JSONLSink(step_log, points="step"))
    return out


# -- values -----------------------------------------------------------------------------------------------------


def add_metrics(hook: str, found: Any, into: dict[str, Any]) -> None:
    """Add what `hook` returned to `into`, as ``"hook/metric"``; raise for a value that no sink can write."""
    if found is None:
        return
    if type(found) is not dict and not isinstance(found, Mapping):
        raise MetricError(f"Hook {hook!r} returned {type_name(found)}; metrics are a dictionary by name, or None.")
    if not _NAMES.issuperset(map(type, found)) and (wrong := [name for name in found if not isinstance(name, str)]):
        raise MetricError(f"Hook {hook!r} returned a metric by the name {wrong[0]!r}; names of metrics are strings.")
    # All or nothing: a bad metric leaves none of its neighbours behind.
    into.update({
        f"{hook}/{name}": value if type(value) in PLAIN else copy_metric(value, hook, name)
        for name, value in found.items()
    })  # fmt: skip


def copy_metric(value: Any, hook: str, name: str) -> Any:
    """Return `value` as it is now, with copies of tensors, still on their device.

    ``hook`` is the name of the hook, or of the function (``"record()"``), that the error names.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):  # ranks hold it in parts, or have not added it up
            value = value.full_tensor()
        # A copy: it may be a parameter, a buffer, or a view of one, which the run goes on to change.
        return _checked_tensor(value, hook, name).detach().clone()
    if isinstance(value, Mapping):
        return {_sub_key(key, hook, name): copy_metric(item, hook, name) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [copy_metric(item, hook, name) for item in value]
    if isinstance(value, Real | str):
        return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)
    if isinstance(value, np.ndarray | np.bool_):
        return copy_metric(value.tolist(), hook, name)
    raise _unwritable(hook, name, type_name(value))


def _unwritable(hook: str, name: str, found: str) -> MetricError:
    who = f"{hook} was given" if hook.endswith("()") else f"Hook {hook!r} returned"
    wanted = "numbers, tensors, strings, and lists or dictionaries of these"
    return MetricError(f"{who} {found} as {name!r}, which no sink can write. It takes {wanted}.")


def _checked_tensor(tensor: Tensor, hook: str, name: str) -> Tensor:
    if tensor.is_complex() or tensor.is_meta:
        raise _unwritable(hook, name, "a complex tensor" if tensor.is_complex() else "a tensor of device 'meta'")
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _sub_key(key: Any, hook: str, name: str) -> str | int | float | bool:
    if isinstance(key, str | int | float | bool):
        return key
    raise _unwritable(hook, name, f"a dictionary with {type_name(key)} as a key")


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with numbers in place of tensors: one transfer per device and dtype."""
    if PLAIN.issuperset(map(type, metrics.values())):
        return dict(metrics)
    waiting: list[Tensor] = []
    _without_tensors(dict(metrics), waiting.append)
    values = (tensor.tolist() for tensor in on_host(waiting))
    found: dict[str, Any] = _without_tensors(dict(metrics), lambda tensor: next(values))
    return found


def _without_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return ``value`` with what ``change`` returns in place of each tensor, in order."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _without_tensors(item, change) for key, item in value.items()}
    return [_without_tensors(item, change) for item in value] if isinstance(value, list) else value
