"""Run the hooks of one firing in order, and put back everything they may have moved.

`FiringEngine` makes a `Firing` of the hooks that are due and reads its metrics and receipts, also when a hook raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hookline.error_policy import ErrorPolicy, error_text
from hookline.errors import GuardError, Hint, LifecycleError
from hookline.guard.guard import Guard
from hookline.guard.loaders import generators_of_loader
from hookline.guard.rng import hook_rng
from hookline.lifecycle.hook_metrics import add_metrics
from hookline.phases import in_phase
from hookline.tables import ShownAsTable, Table

if TYPE_CHECKING:
    from hookline.lifecycle.context import RunDataContext
    from hookline.lifecycle.firing_engine import FiringEngine
    from hookline.lifecycle.plan import PlannedHook, PointHooks
    from hookline.lifecycle.rank_sync import RankSync
    from hookline.when import HookPoint

__all__ = [
    "Done",
    "Firing",
    "FiringReceipt",
    "FiringReceipts",
    "ObserverCheck",
    "handle_hook_error",
    "receipt_of",
]

Done: TypeAlias = "tuple[PlannedHook, float, Any, str]"
"""A hook that was called, its seconds, the guard's receipt, and what it raised."""
_NOT_TRAINING: Final = in_phase("intervention")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(frozen=True, slots=True)
class FiringReceipt:
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


class Firing:
    """Run hooks at a point, and collect their metrics."""

    __slots__ = ("_engine", "ctx", "current", "done", "hooks", "metrics", "step", "thread")

    def __init__(self, engine: FiringEngine, hooks: PointHooks, ctx: RunDataContext, step: int) -> None:
        self._engine = engine
        self.hooks = hooks
        """The hooks of the point, due or not."""
        self.ctx = ctx
        self.step = step
        self.thread = get_ident()
        self.metrics: dict[str, Any] = {}
        """What the hooks so far have returned, by ``"hook/metric"``."""
        self.current: PlannedHook | None = None
        """The hook that runs now."""
        self.done: list[Done] = []
        """The hooks that were called, in order."""

    @property
    def point(self) -> HookPoint:
        """The point that is fired."""
        return self.hooks.point

    def run(self, observers: Sequence[PlannedHook], interventions: Sequence[PlannedHook], model_ctx: Any) -> None:
        """Call them all; raise what the error policy does not pass over."""
        # A forward that a hook makes is not training, so trackers do not count it.
        with _NOT_TRAINING:
            if not interventions:
                for planned in observers:
                    if not planned.hook.pure:
                        break
                else:  # none of them draws
                    self._observe_all(observers, model_ctx)
                    return
            with hook_rng(undone=bool(interventions), generators=generators_of_loader(self.ctx.loader)):
                if not interventions or self._engine.ranks is None:
                    self._observe_all(observers, model_ctx)
                else:
                    self._observe_together(observers, model_ctx, self._engine.ranks)
                if interventions:
                    self._intervene_all(interventions, model_ctx)

    def take_record(self, name: str, value: Any) -> bool:
        """Add a metric to those of the hook that runs now; return False if none does."""
        if self.current is None:
            return False
        add_metrics(self.current.name, {name: value}, self.metrics)
        return True

    def _observe_all(self, hooks: Sequence[PlannedHook], model_ctx: Any) -> None:
        engine, ctx = self._engine, self.ctx
        is_plain = engine.check is None and not engine.profiler.enabled
        first: Exception | None = None
        for planned in hooks:
            self.current = planned
            start = perf_counter()
            try:
                found = planned.hook.compute(ctx) if is_plain else self._compute_checked(planned, model_ctx)
                if found is not None:
                    self._take(planned, found)
            except BaseException as error:
                if not self._handle_error(error, planned, perf_counter() - start):
                    if engine.ranks is None or not isinstance(error, Exception):
                        raise
                    first = first or error  # the others run first: one may wait for the same hook of other ranks
            else:
                self.done.append((planned, perf_counter() - start, None, ""))
            self.current = None
        if first is not None:
            raise first

    def _observe_together(self, hooks: Sequence[PlannedHook], model_ctx: Any, ranks: RankSync) -> None:
        """Call observers, and wait until no rank's has raised: interventions wait for each other, in collectives."""
        error: BaseException | None = None
        try:
            self._observe_all(hooks, model_ctx)
        except Exception as raised:
            error = raised
        error = ranks.meet(error, f"observers at {self.point.name}, step {self.step}")
        if error is not None:
            raise error

    def _take(self, planned: PlannedHook, found: Any) -> None:
        """Add what a hook returned, with its name in front, unless a metric begins with one of the hook's roots."""
        roots = planned.hook.roots
        if not roots:
            add_metrics(planned.name, found, self.metrics)
            return
        own: dict[str, Any] = {}
        add_metrics(planned.name, found, own)
        start = len(planned.name) + 1
        self.metrics |= {key[start:] if key.startswith(roots, start) else key: value for key, value in own.items()}

    def _compute_checked(self, planned: PlannedHook, model_ctx: Any) -> Any:
        check = _NOTHING if self._engine.check is None else self._engine.check.around(planned, self.ctx, model_ctx)
        with check, self._engine.profiler.section(planned.name):
            return planned.hook.compute(self.ctx)

    def _intervene_all(self, hooks: Sequence[PlannedHook], model_ctx: Any) -> None:
        guard = model_ctx.guard
        try:
            scopes = [planned.hook.scope for planned in hooks]  # type: ignore[attr-defined]
            try:
                guard.save(scopes, batch=(self.ctx.batch_data, getattr(model_ctx, "batch", None)))
            except GuardError as error:  # no hook has done anything yet, so the policy decides
                self._refuse(hooks, error)
                return
            for planned in hooks:
                self._intervene(planned, model_ctx, guard)
        finally:
            guard.release()

    def _refuse(self, hooks: Sequence[PlannedHook], error: GuardError) -> None:
        """Tell every intervention that the run cannot be saved for it; raise if the policy does not pass over that."""
        refused = LifecycleError(f"Nothing could be put back after it: {error}")
        for planned in hooks:
            if not self._handle_error(refused, planned, 0.0):
                raise error

    def _intervene(self, planned: PlannedHook, model_ctx: Any, guard: Any) -> None:
        hook: Any = planned.hook
        self.current = planned
        receipt, seconds, error = None, 0.0, None
        try:
            with guard.protecting(planned.name, hook.scope) as receipt:
                start = perf_counter()
                try:
                    with self._engine.profiler.section(planned.name):
                        # Before the state is put back: a metric may be a view of a weight.
                        self._take(planned, hook.intervene(self.ctx, model_ctx))
                finally:
                    seconds = perf_counter() - start
        except BaseException as raised:
            error = raised
        if self._engine.ranks is not None and (error is None or isinstance(error, Exception)):
            what = f"intervention {planned.name!r} at {self.point.name}, step {self.step}"
            error = self._engine.ranks.meet(error, what)
        if error is None:
            self.done.append((planned, seconds, receipt, ""))
        elif not self._handle_error(error, planned, seconds, receipt):
            raise error
        self.current = None

    def _handle_error(self, error: BaseException, planned: PlannedHook, seconds: float, receipt: Any = None) -> bool:
        """Note the error of a hook; return whether the firing goes on."""
        # Not the error itself: its traceback holds the context, and with it a batch, perhaps gradients.
        self.current = None
        self.done.append((planned, seconds, receipt, error_text(error)))
        if handle_hook_error(self._engine.errors, error, planned):
            return True
        self._name_hook(error, planned)
        return False

    def _name_hook(self, error: BaseException, planned: PlannedHook) -> None:
        """Add to the error which hook raised it, and when: the traceback of a class of analyses names neither."""
        note = f"Raised by the hook {planned.name!r} at {self.point.name}, step {self.step}, epoch {self.ctx.epoch}."
        if isinstance(error, Exception) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def receipt_of(planned: PlannedHook, seconds: float, receipt: Any, error: str) -> FiringReceipt:
    """Return the receipt of a hook that was called, for the user."""
    if receipt is None:
        scope = str(getattr(planned.hook, "scope", "")) if planned.intervenes else "observes"
        return FiringReceipt(planned.name, scope, seconds, error=error)
    return FiringReceipt(
        planned.name,
        receipt.scope,
        seconds,
        tuple(receipt.touched),
        tuple(receipt.restored),
        receipt.saved_bytes,
        error,
    )


class ObserverCheck:
    """Check in strict mode that observers change nothing: by the guard of the firing, or one of the model alone."""

    def __init__(self) -> None:
        self._guard: Guard | None = None
        self._model: Any = None

    def around(self, planned: PlannedHook, ctx: RunDataContext, model_ctx: Any) -> AbstractContextManager[Any]:
        """Raise at the end of the block if model, gradients, modes, switches or the batch have changed.

        Random streams count for a hook that is `pure`; for others they are put back anyway.
        """
        guard = getattr(model_ctx, "guard", None) or self._guard_of(ctx.model)
        if guard is None:
            return _NOTHING
        return guard.check_observers(planned.name, random=bool(planned.hook.pure), batch=ctx.batch_data)

    def _guard_of(self, model: Any) -> Guard | None:
        if self._model is not model:
            self._guard, self._model = None if model is None else Guard(model), model
        return self._guard


def handle_hook_error(errors: ErrorPolicy, error: BaseException, planned: PlannedHook) -> bool:
    """Count the error of a hook, and keep a warning for the end of the firing; return whether the run goes on."""
    goes_on = errors.handle(planned.name, error)
    if goes_on and errors.on_error == "warn" and errors.counts[planned.name] == 1:
        undone = "what it did is undone, " if planned.intervenes else ""
        errors.warn_later(
            planned.name,
            f"Hook {planned.name!r} raised {error_text(error).rstrip('.')}; {undone}it stays on, and the run goes on.",
            hint=Hint.LATER_FAILURES,
        )
    return goes_on
