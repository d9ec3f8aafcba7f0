"""Fire a point: pick the hooks that are due, make their contexts, run them, hand their metrics on.

`HookManager.fire` calls the engine; the engine runs a `Firing` and hands its metrics to `MetricOutput`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hookline.error_policy import ErrorPolicy, error_text
from hookline.errors import GuardError, LifecycleError, OptionError, RankError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.firing import Done, Firing, ObserverCheck, handle_hook_error
from hookline.lifecycle.output import RECORDER
from hookline.lifecycle.plan import split_roles
from hookline.lifecycle.rank_sync import join_ranks
from hookline.lifecycle.reference import ReferenceWeights
from hookline.messages import nearest_names, type_name
from hookline.records.fan_out import has_ranks
from hookline.when import HookPoint

if TYPE_CHECKING:
    import weakref

    from torch import nn

    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.output import MetricOutput
    from hookline.lifecycle.plan import PlannedHook, PointHooks
    from hookline.lifecycle.profiler import CheckpointProfiler
    from hookline.lifecycle.rank_sync import RankSync
    from hookline.lifecycle.states import ManagedHooks, Offload

__all__ = ["FiringEngine", "parse_moment"]

_FIELDS: Final = [
    field.name for field in dataclasses.fields(RunDataContext) if field.name not in ("hook_point", "epoch")
]
_CONSEQUENCES: Final = {"warn": "stays on and the run goes on", "disable": "is switched off and the run goes on"}


class FiringEngine:
    """Run hooks at points, count their calls and errors."""

    def __init__(
        self,
        output: MetricOutput,
        profiler: CheckpointProfiler,
        recorder: weakref.ref[Any],
        *,
        on_error: str,
        strict: bool,
        offload: Offload | None,
        reference: Any,
    ) -> None:
        self.loop_type: str | None = None
        """``"epoch"`` or ``"step"``; None: not known."""
        # A hook that breaks what it declared may have changed the run: going on would hide it.
        logger = logging.getLogger("hookline.lifecycle.firing")
        self.errors = ErrorPolicy(on_error, logger, _CONSEQUENCES, always_raise=(GuardError,))
        self.calls: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.current: Firing | None = None
        """The firing under way."""
        self.done: Sequence[Done] = ()
        """The hooks that the last firing called."""
        self.reference = ReferenceWeights(reference)
        self.run_context: dict[str, Any] = {}
        """What ``set_run_context`` said; the path of the reference weights may name it."""
        self._output = output
        self.profiler = profiler
        """Times each hook, if it is on."""
        self._recorder = recorder
        self._offload = offload
        self.check = ObserverCheck() if strict else None
        """Checks in strict mode that observers change nothing."""
        self._has_reference: set[str] = set()
        self._warned: set[str] = set()
        self.has_met = False
        """Whether it is known if there are other ranks."""
        self.ranks: RankSync | None = None
        """Keeps this rank together with the others; None in one process."""

    def reset(self) -> None:
        """Forget the last run."""
        self.done = ()
        self.reference.reset()
        self._has_reference.clear()

    def costs(self) -> dict[str, dict[str, float]]:
        """Return how often each hook was called and how long that took."""
        total = {name: self.seconds[name] * 1e3 for name in self.calls}
        return {
            name: {"count": count, "total_ms": total[name], "mean_ms": total[name] / count}
            for name, count in self.calls.items()
        }

    def fire(
        self, hooks: PointHooks, run_ctx: Any, model_ctx: Any, epoch: int | None, global_step: int
    ) -> dict[str, Any]:
        """Run the hooks that are due at a point; return their metrics."""
        due = hooks.due(global_step) if hooks.is_scheduled else hooks.hooks
        if hooks.is_windowed and due:
            run_ctx, due = self._in_window(hooks, due, run_ctx, epoch, global_step)
        if not due:
            return {}
        ctx = self._make_context(hooks, run_ctx)
        step = global_step if global_step >= 0 else (ctx.step or 0)
        firing = Firing(self, hooks, ctx, step)
        outer = self.current
        if outer is not None:
            _check_nested(outer, firing, due)
        self.current = firing
        recorder, RECORDER.manager = RECORDER.manager, self._recorder
        raised: Exception | None = None
        try:
            self._run(firing, hooks, due, model_ctx)
        except BaseException as error:
            if self.ranks is None or not isinstance(error, Exception):
                self._finish(firing, outer, global_step)
                raise
            raised = error
        finally:
            RECORDER.manager = recorder
        if self.ranks is not None:
            self._hold(firing, raised, self.ranks)
        metrics = self._finish(firing, outer, global_step)
        if self.ranks is not None:
            self.settle(raised)
            # At a step the other ranks are training: an error of a hook waits until the ranks meet.
            if raised is not None and not (hooks.is_step and any(text for *_, text in firing.done)):
                raise raised
        if self.errors.pending:
            self.errors.warn_pending()
        if self._output.fan_out.pending:
            self._output.fan_out.warn_pending()
        return dict(metrics)

    def _in_window(
        self, hooks: PointHooks, due: tuple[PlannedHook, ...], run_ctx: Any, epoch: int | None, global_step: int
    ) -> tuple[Any, tuple[PlannedHook, ...]]:
        """Return the hooks of ``due`` whose window is open; and the context, made if only it tells the epoch."""
        now = self._window_number(None, epoch, global_step)
        if now is None:
            run_ctx = self._make_context(hooks, run_ctx)
            now = self._window_number(run_ctx, epoch, global_step)
        return run_ctx, tuple([planned for planned in due if planned.is_open_at(now)])

    # -- with several ranks -------------------------------------------------------------------------------

    def meet_ranks(self, hooks: Mapping[str, TrainingHook], flush_every: int | None) -> RankSync | None:
        """Find out, once, whether there are other ranks; check then that they have the same hooks."""
        if not self.has_met:
            self.has_met = True
            self.ranks = join_ranks(hooks, flush_every) if has_ranks() else None
        return self.ranks

    def start_hooks(self, hooks: ManagedHooks, model: nn.Module) -> bool:
        """Start all hooks; what the error policy says of one that raises on any rank is done on all of them.

        One that cannot be started, as the model has no such module, is no reason to lose the others. Returns whether
        there is one.
        """
        failed: dict[str, Exception] = {}
        where: dict[str, str] = {}

        def start() -> None:
            failed.update(hooks.start(model, self.errors.can_continue))

        if self.ranks is None:
            start()
        else:
            self.ranks.together("starting the hooks", start)
            if self.errors.on_error != "raise":
                own = {name: error_text(error) for name, error in failed.items()}
                for rank, texts in enumerate(self.ranks.gather(own, "hooks that cannot be started")):
                    for name, text in texts.items():
                        failed.setdefault(name, RankError(text, ranks=(rank,)))
                        where.setdefault(name, f" on rank {rank}")
        becomes = _CONSEQUENCES.get(self.errors.on_error)
        for name, error in failed.items():
            self.errors.count(name, error, f"in start(model){where.get(name, '')}")
            if self.errors.on_error == "disable":
                self.errors.disabled.add(name)
            why = f"{where.get(name, '')}: {error_text(error).rstrip('.')}"
            self.errors.warn_later(f"start of {name}", f"Hook {name!r} could not be started{why}; it {becomes}.")
        self.errors.warn_pending()
        return bool(failed)

    def _hold(self, firing: Firing, raised: Exception | None, ranks: RankSync) -> None:
        """Keep what hooks raised for the next exchange, where all ranks learn of it."""
        names = [planned.name for planned, _, _, text in firing.done if text]
        for planned, _, _, text in firing.done:
            if text:
                is_last = raised is not None and planned.name == names[-1]
                where = f"at {firing.point.name}, step {firing.step}"
                ranks.hold(planned.name, f"{text.rstrip('.')} {where}", raised if is_last else None)

    def settle(self, raised: Exception | None = None) -> None:
        """Do on every rank what the error policy says about hooks that failed on any rank, once all know of it."""
        failed = {} if self.ranks is None else self.ranks.take_failures()
        for hook, failure in failed.items():
            if failure.ends:
                assert self.ranks is not None
                error = raised or failure.error or RankError(failure.sentence(hook), ranks=failure.ranks)
                self.ranks.agreed_error = error
                raise error
            if self.errors.on_error == "disable":
                self.errors.disabled.add(hook)
            elif failure.error is None:
                self.errors.counts[hook] += 1
            self.errors.warn_later(f"{hook} on other ranks", failure.sentence(hook))
        if failed and self.errors.pending:
            self.errors.warn_pending()

    def _make_context(self, hooks: PointHooks, run_ctx: Any) -> RunDataContext:
        ctx = run_ctx() if callable(run_ctx) else run_ctx
        if not isinstance(ctx, RunDataContext):
            raise OptionError(f"fire() takes a RunDataContext, or a function that makes one; got {type_name(ctx)}.")
        if ctx.hook_point is not hooks.point and HookPoint.of(ctx.hook_point) is not hooks.point:
            raise OptionError(
                f"fire({hooks.point.name}, ...) was given a context of {HookPoint.of(ctx.hook_point).name}, so hooks "
                "would be told two things; make the context for the point that is fired."
            )
        if ctx.profiler is None:
            ctx.__dict__["profiler"] = self.profiler  # so that hooks may time sections in any loop
        return ctx

    def _run(self, firing: Firing, hooks: PointHooks, due: tuple[PlannedHook, ...], model_ctx: Any) -> None:
        if self._offload is not None:
            self._offload.bring(planned.hook for planned in due)
        if hooks.needs_reference:
            due = tuple(planned for planned in due if self._give_reference(planned))
        observers, interventions = hooks.parts if due is hooks.hooks else split_roles(due)
        if interventions or self.check is not None:
            model_ctx = model_ctx() if callable(model_ctx) else model_ctx
        if interventions:
            if model_ctx is None:
                self._warn_skipped(interventions)
                interventions = ()
            elif getattr(model_ctx, "guard", None) is None:
                raise OptionError(f"fire() takes a ModelDataContext as model_ctx=; got {type_name(model_ctx)}.")
        firing.run(observers, interventions, model_ctx)

    def _finish(self, firing: Firing, outer: Firing | None, global_step: int) -> dict[str, Any]:
        """Hand the metrics on, however the firing has ended."""
        self.current = outer
        self.done = firing.done  # not the firing itself: its context holds a batch, perhaps gradients
        for planned, seconds, _, _ in firing.done:
            self.calls[planned.name] += 1
            self.seconds[planned.name] += seconds
        if self._offload is not None and outer is None:
            self._offload.send()
        return self._output.take(firing, self._position(firing.ctx), global_step)

    def _give_reference(self, planned: PlannedHook) -> bool:
        """Give a hook the reference weights it needs; return whether it may run."""
        if not planned.hook.needs_reference_weights or planned.name in self._has_reference:
            return True
        try:
            with kept_rng():
                weights = self.reference.get(self.run_context)
                if weights is not None:
                    planned.hook.set_reference_weights(weights)
        except BaseException as error:
            if not handle_hook_error(self.errors, error, planned):
                raise
            return False
        self._has_reference.add(planned.name)
        return True

    def _warn_skipped(self, hooks: tuple[PlannedHook, ...]) -> None:
        # Once: what is missing at one firing is missing at all of them.
        names = [planned.name for planned in hooks if planned.name not in self._warned]
        self._warned.update(names)
        if names:
            self.errors.warn_later(
                f"no model_ctx: {names}",
                f"Interventions that are due at {hooks[0].point.name} and do not run, as fire() was given no "
                f"model_ctx: {', '.join(map(repr, names))}. Hand over a ModelDataContext, or a function that makes "
                "one.",
            )

    def _window_number(self, ctx: RunDataContext | None, epoch: int | None, global_step: int) -> int | None:
        """Return what windows are compared with: the epoch; in other loops than the epoch loop, the step."""
        if self.loop_type != "epoch" and global_step >= 0:
            return global_step
        if ctx is None:
            return epoch if self.loop_type == "epoch" else None
        return self._position(ctx)

    def _position(self, ctx: RunDataContext) -> int:
        """Return where metrics belong: the epoch; in other loops than the epoch loop, the step."""
        return ctx.epoch if self.loop_type in (None, "epoch") or ctx.step is None else ctx.step


def _check_nested(outer: Firing, firing: Firing, due: tuple[PlannedHook, ...]) -> None:
    """Refuse a firing from another thread, and an intervention inside another, which share one saved state."""
    if outer.thread != firing.thread:
        raise LifecycleError(
            f"{firing.point.name} was fired while another thread is firing {outer.point.name}; a manager fires one "
            "point at a time. Fire from one thread, or give each its own manager."
        )
    inner = next((planned.name for planned in due if planned.intervenes), None)
    if inner is not None and outer.current is not None and outer.current.intervenes:
        raise LifecycleError(
            f"The intervention {outer.current.name!r} fires {firing.point.name}, at which {inner!r} intervenes; "
            "interventions cannot run inside of one another. Train in it by model_ctx.run_training_epoch()."
        )


def parse_moment(
    point: Any, run_ctx: Any, model_ctx: Any, epoch: int | None, fields: dict[str, Any]
) -> tuple[HookPoint, Any, Any]:
    """Return point, context and model context of a ``fire()`` that names the point once: by a context, or by fields."""
    if isinstance(point, RunDataContext):
        if fields or isinstance(run_ctx, RunDataContext) or (run_ctx is not None and model_ctx is not None):
            raise OptionError(
                f"fire() was given a context of {HookPoint.of(point.hook_point).name} and more than a model_ctx beside "
                "it; write fire(run_ctx), fire(run_ctx, model_ctx), or fire(point, run_ctx, model_ctx)."
            )
        return HookPoint.of(point.hook_point), point, model_ctx if run_ctx is None else run_ctx
    point = HookPoint.of(point)
    if run_ctx is not None:
        raise OptionError(
            f"fire({point.name}, ...) was given a context and fields of one beside it ({', '.join(fields)}); put them "
            "into the context, or leave the context out."
        )
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        near = nearest_names(unknown[0], _FIELDS)
        raise OptionError(
            f"fire({point.name}, ...): a RunDataContext has no field {unknown[0]!r}"
            f"{f'; nearest: {near[0]!r}' if near else ''}. It has {', '.join(_FIELDS)}."
        )
    if epoch is None:
        raise OptionError(
            f"fire({point.name}, ...) was given no context, so it has to be told what hooks are shown, the epoch at "
            f"least: fire({point.name}, epoch=epoch, model=model)."
        )
    return point, partial(RunDataContext, point, epoch, **fields), model_ctx
