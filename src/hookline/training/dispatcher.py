"""Firing a point: who is due, what they are shown, and what becomes of their metrics.

Takes contexts from loops through `HookManager`, whose other half this is; runs a `Firing`, hands its metrics to
`Records`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import LifecycleError, OptionError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.points import HookPoint
from hookline.lifecycle.run_context import RunDataContext
from hookline.messages import nearest_names, type_name
from hookline.training import record_api as recording
from hookline.training.firing import Done, Firing, handle_hook_error
from hookline.training.queries import Questions

if TYPE_CHECKING:
    from hookline.error_policy import ErrorPolicy
    from hookline.training.checkpoint_profiler import CheckpointProfiler
    from hookline.training.firing import ObserverCheck
    from hookline.training.hook_state import Offload, Reference
    from hookline.training.metric_buffer import Records
    from hookline.training.point_hooks import Entry, Slot

__all__ = ["Dispatcher"]

_FIELDS: Final = [
    field.name for field in dataclasses.fields(RunDataContext) if field.name not in ("hook_point", "epoch")
]


class Dispatcher(Questions):
    """The part of `HookManager` that fires; what it works with is made there."""

    loop_type: str | None
    profiler: CheckpointProfiler
    fired: Counter[str]
    _seconds: defaultdict[str, float]
    _slots: dict[HookPoint | str, Slot | None]
    _records: Records
    _errors: ErrorPolicy
    _reference: Reference
    _offload: Offload | None
    _check: ObserverCheck | None
    _context: dict[str, Any]
    _firing: Firing | None
    _done: Sequence[Done]
    _told: set[str]
    _referenced: set[str]
    _self: weakref.ref[Any]

    def _make_plan(self) -> None:
        raise NotImplementedError

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
            point: Which moment it is; or the context alone, which says so itself: ``fire(run_ctx, model_ctx)``.
            run_ctx: What hooks are shown; or a function that makes it, which is called only if a hook is due. If left
                out: a `RunDataContext` of ``epoch`` and ``fields``, made only if a hook is due.
            model_ctx: What interventions work with, or a function that makes it, called only if one is due.
            epoch: The epoch. Beside a ``run_ctx`` it spares making that just to look up the epoch, where hooks have
                windows.
            fields: What else the context has: ``model=``, ``loss=``, ``step=``, …
        """
        if run_ctx is None or fields or isinstance(point, RunDataContext):
            point, run_ctx, model_ctx = _one_moment(point, run_ctx, model_ctx, epoch, fields)
        try:
            slot = self._slots[point]
        except (KeyError, TypeError):
            slot = self._slot_of(HookPoint.of(point))
        if slot is None or self._global_step < slot.wakes:
            return {}
        return self._fire(slot, run_ctx, model_ctx, epoch)

    def _slot_of(self, point: HookPoint) -> Slot | None:
        if self._plan.undecided:
            raise LifecycleError(
                f"Hook {self._plan.undecided[0]!r} has loop_points and no hook_points, so it has to be known which "
                'loop runs; say HookManager(..., loop_type="epoch"), or "step", or give it hook_points.'
            )
        return self._slots[point]

    def _fire(self, slot: Slot, run_ctx: Any, model_ctx: Any, epoch: int | None) -> dict[str, Any]:
        due = slot.due(self._global_step)
        if due and slot.is_windowed:
            now = self._number(None, epoch)
            if now is None:
                run_ctx = self._context_for(slot, run_ctx)
                now = self._number(run_ctx, epoch)
            due = tuple([entry for entry in due if entry.is_open_at(now)])
        if not due:
            return {}
        ctx = self._context_for(slot, run_ctx)
        step = self._global_step if self._global_step >= 0 else (ctx.step or 0)
        firing = Firing(slot.point, ctx, step, self.profiler, self._errors, self._check)
        outer = self._firing
        if outer is not None:
            _check_nested(outer, firing, due)
        self._firing = firing
        recorder = recording.now(self._self)
        try:
            self._run(firing, slot, due, model_ctx)
        except BaseException:
            self._finish(firing, outer)
            raise
        finally:
            recording.now(recorder)
        metrics = self._finish(firing, outer)
        self._errors.warn_pending()
        self._records.out.tell()
        return dict(metrics)

    def _context_for(self, slot: Slot, run_ctx: Any) -> RunDataContext:
        ctx = _made(run_ctx)
        if not isinstance(ctx, RunDataContext):
            raise OptionError(f"fire() takes a RunDataContext, or a function that makes one; got {type_name(ctx)}.")
        if ctx.hook_point is not slot.point and HookPoint.of(ctx.hook_point) is not slot.point:
            raise OptionError(
                f"fire({slot.point.name}, ...) was given a context of {HookPoint.of(ctx.hook_point).name}, so hooks "
                "would be told two things; make the context for the point that is fired."
            )
        if ctx.profiler is None:
            vars(ctx)["profiler"] = self.profiler  # so that hooks may mark sections in a loop that knows nothing of it
        return ctx

    def _run(self, firing: Firing, slot: Slot, due: tuple[Entry, ...], model_ctx: Any) -> None:
        if self._offload is not None:
            self._offload.bring(entry.hook for entry in due)
        if slot.needs_reference:
            due = tuple(entry for entry in due if self._has_reference(entry))
        observers, interventions = slot.parts(due)
        if interventions or self._check is not None:
            model_ctx = _made(model_ctx)
        if interventions and model_ctx is None:
            self._tell_skipped(interventions)
            interventions = ()
        elif interventions and getattr(model_ctx, "guard", None) is None:
            raise OptionError(f"fire() takes a ModelDataContext as model_ctx=; got {type_name(model_ctx)}.")
        firing.run(observers, interventions, model_ctx)

    def _finish(self, firing: Firing, outer: Firing | None) -> dict[str, Any]:
        """Have the metrics go where they belong, however the firing has ended."""
        self._firing = outer
        # Not the firing itself: its context holds a batch, perhaps gradients.
        self._done = firing.done
        for entry, seconds, _, _ in firing.done:
            self.fired[entry.name] += 1
            self._seconds[entry.name] += seconds
        if self._offload is not None and outer is None:
            self._offload.send()
        metrics = self._records.take(firing, self._axis(firing.ctx), self._global_step)
        if self._errors.disabled and not self._errors.disabled <= self._plan.left_out.keys():
            self._make_plan()
        return metrics

    def _has_reference(self, entry: Entry) -> bool:
        """Whether it may run: it needs no reference weights, or has taken what there is."""
        if not entry.hook.needs_reference_weights or entry.name in self._referenced:
            return True
        try:
            with kept_rng():
                weights = self._reference.weights(self._context)
                if weights is not None:
                    entry.hook.set_reference_weights(weights)
        except BaseException as error:
            if not handle_hook_error(self._errors, error, entry):
                raise
            return False
        self._referenced.add(entry.name)
        return True

    def _tell_skipped(self, entries: tuple[Entry, ...]) -> None:
        # Once: what is missing at one firing is missing at all of them.
        names = [entry.name for entry in entries if entry.name not in self._told]
        if names:
            self._told.update(names)
            self._errors.warn_later(
                f"no model_ctx: {names}",
                f"Interventions that are due at {entries[0].point.name} and do not run, as fire() was given no "
                f"model_ctx: {', '.join(map(repr, names))}. Hand over a ModelDataContext, or a function that makes "
                "one.",
            )

    def _number(self, ctx: RunDataContext | None, epoch: int | None) -> int | None:
        """What windows are compared with: the epoch; in other loops than those by epoch, the step."""
        if self.loop_type != "epoch" and self._global_step >= 0:
            return self._global_step
        if ctx is None:
            return epoch if self.loop_type == "epoch" else None
        return self._axis(ctx)

    def _axis(self, ctx: RunDataContext) -> int:
        """Where the metrics of a moment belong: the epoch; in other loops than those by epoch, the step."""
        return ctx.epoch if self.loop_type in (None, "epoch") or ctx.step is None else ctx.step


def _check_nested(outer: Firing, firing: Firing, due: tuple[Entry, ...]) -> None:
    """A manager fires for one thread, and one save serves one intervention: the outer would go back to its middle."""
    if outer.thread != firing.thread:
        raise LifecycleError(
            f"{firing.point.name} was fired while another thread is firing {outer.point.name}; a manager fires one "
            "point at a time. Fire from one thread, or give each its own manager."
        )
    inner = next((entry.name for entry in due if entry.intervenes), None)
    if inner is not None and outer.current is not None and outer.current.intervenes:
        raise LifecycleError(
            f"The intervention {outer.current.name!r} fires {firing.point.name}, at which {inner!r} intervenes; "
            "interventions cannot run inside of one another. Train in it by model_ctx.run_training_epoch()."
        )


def _one_moment(
    point: Any, run_ctx: Any, model_ctx: Any, epoch: int | None, fields: dict[str, Any]
) -> tuple[HookPoint, Any, Any]:
    """Return point, context and model context of a moment that was named once: by its context, or by its fields."""
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


def _made(given: Any) -> Any:
    """The context itself, or what the function makes."""
    return given() if callable(given) else given
