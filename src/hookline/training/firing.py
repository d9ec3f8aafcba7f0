"""One firing: the hooks that are due, run in order, with everything put back that they may have moved.

Takes the entries that are due from `HookManager`, hands it metrics and receipts, also when a hook has raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hookline.error_policy import ErrorPolicy, error_text
from hookline.errors import GuardError
from hookline.guard.guard import Guard
from hookline.guard.loaders import generators_of_loader
from hookline.guard.rng import hook_rng
from hookline.lifecycle.run_phase import in_phase
from hookline.tables import ShownAsTable, Table
from hookline.training.hook_metrics import checked

if TYPE_CHECKING:
    from hookline.lifecycle.points import HookPoint
    from hookline.lifecycle.run_context import RunDataContext
    from hookline.training.checkpoint_profiler import CheckpointProfiler
    from hookline.training.point_hooks import Entry

__all__ = [
    "Done",
    "Firing",
    "FiringReceipt",
    "FiringReceipts",
    "ObserverCheck",
    "handle_hook_error",
    "new_error_policy",
    "receipt_of",
]

Done: TypeAlias = "tuple[Entry, float, Any, str]"
_NOT_TRAINING: Final = in_phase("intervention")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()
_LOGGER: Final = logging.getLogger(__name__)
_CONSEQUENCES: Final = {"warn": "stays on and the run goes on", "disable": "is switched off and the run goes on"}


@dataclass(frozen=True, slots=True)
class FiringReceipt:
    """What one hook did in one firing.

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
    """What the hooks of one firing did; a tuple that prints as a table."""

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
    """A firing under way, and what came of it."""

    __slots__ = ("_check", "_errors", "_profiler", "ctx", "current", "done", "metrics", "point", "step", "thread")

    def __init__(
        self,
        point: HookPoint,
        ctx: RunDataContext,
        step: int,
        profiler: CheckpointProfiler,
        errors: ErrorPolicy,
        check: ObserverCheck | None,
    ) -> None:
        self.point = point
        self.ctx = ctx
        self.step = step
        self.thread = threading.get_ident()
        self.metrics: dict[str, Any] = {}
        """Everything that the hooks so far have returned, by ``"hook/metric"``."""
        self.current: Entry | None = None
        """The hook that runs now."""
        self._profiler = profiler
        self._errors = errors
        self._check = check
        self.done: list[Done] = []
        """Of each hook that was called, in order: the hook, its seconds, the guard's receipt, what it raised."""

    def run(self, observers: Sequence[Entry], interventions: Sequence[Entry], model_ctx: Any) -> None:
        """Call them all, unless one raises that is not to be passed over."""
        # A forward that a hook makes is not training, so trackers do not count it.
        with _NOT_TRAINING:
            may_draw = interventions or [entry for entry in observers if not entry.hook.pure]
            if not may_draw:
                self._observe_all(observers, model_ctx)
                return
            with hook_rng(undone=bool(interventions), generators=generators_of_loader(self.ctx.loader)):
                self._observe_all(observers, model_ctx)
                if interventions:
                    self._intervene_all(interventions, model_ctx)

    def take_record(self, name: str, value: Any) -> bool:
        """Add a metric to those of the hook that runs now; False if none does."""
        if self.current is None:
            return False
        checked(self.current.name, {name: value}, self.metrics)
        return True

    def _observe_all(self, entries: Sequence[Entry], model_ctx: Any) -> None:
        is_plain = self._check is None and not self._profiler.enabled
        for entry in entries:
            self.current = entry
            start = time.perf_counter()
            try:
                found = entry.hook.compute(self.ctx) if is_plain else self._looked_after(entry, model_ctx)
                self._take(entry, found)
            except BaseException as error:
                if not self._goes_on_after(error, entry, time.perf_counter() - start):
                    raise
            else:
                self.done.append((entry, time.perf_counter() - start, None, ""))
            self.current = None

    def _take(self, entry: Entry, found: Any) -> None:
        """What a hook returned goes to the metrics: by its name in front, unless a name begins with a root of its."""
        roots = entry.hook.roots
        if not roots:
            checked(entry.name, found, self.metrics)
            return
        own: dict[str, Any] = {}
        checked(entry.name, found, own)
        start = len(entry.name) + 1
        self.metrics |= {key[start:] if key.startswith(roots, start) else key: value for key, value in own.items()}

    def _looked_after(self, entry: Entry, model_ctx: Any) -> Any:
        check = _NOTHING if self._check is None else self._check.around(entry, self.ctx, model_ctx)
        with check, self._profiler.section(entry.name):
            return entry.hook.compute(self.ctx)

    def _intervene_all(self, entries: Sequence[Entry], model_ctx: Any) -> None:
        guard = model_ctx.guard
        try:
            scopes = [entry.hook.scope for entry in entries]  # type: ignore[attr-defined]
            guard.save(scopes, batch=(self.ctx.batch_data, getattr(model_ctx, "batch", None)))
            for entry in entries:
                self._intervene(entry, model_ctx, guard)
        finally:
            guard.release()

    def _intervene(self, entry: Entry, model_ctx: Any, guard: Any) -> None:
        hook: Any = entry.hook
        self.current = entry
        receipt, seconds = None, 0.0
        try:
            with guard.protecting(entry.name, hook.scope) as receipt:
                start = time.perf_counter()
                try:
                    with self._profiler.section(entry.name):
                        # Taken in before the state goes back: a metric may be a view of a weight.
                        self._take(entry, hook.intervene(self.ctx, model_ctx))
                finally:
                    seconds = time.perf_counter() - start
        except BaseException as error:
            if not self._goes_on_after(error, entry, seconds, receipt):
                raise
        else:
            self.done.append((entry, seconds, receipt, ""))
        self.current = None

    def _goes_on_after(self, error: BaseException, entry: Entry, seconds: float, receipt: Any = None) -> bool:
        # Nobody keeps the error itself: its traceback holds the context, and with it a batch, perhaps gradients.
        self.current = None
        self.done.append((entry, seconds, receipt, error_text(error)))
        if handle_hook_error(self._errors, error, entry):
            return True
        self._name_hook(error, entry)
        return False

    def _name_hook(self, error: BaseException, entry: Entry) -> None:
        """Add to the error which hook raised it, and when: the traceback of a class of analyses names neither."""
        note = f"Raised by the hook {entry.name!r} at {self.point.name}, step {self.step}, epoch {self.ctx.epoch}."
        if isinstance(error, Exception) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def receipt_of(entry: Entry, seconds: float, receipt: Any, error: str) -> FiringReceipt:
    """What is kept of a hook that was called, as the user sees it; made when asked for."""
    if receipt is None:
        scope = str(getattr(entry.hook, "scope", "")) if entry.intervenes else "observes"
        return FiringReceipt(entry.name, scope, seconds, error=error)
    return FiringReceipt(
        entry.name, receipt.scope, seconds, tuple(receipt.touched), tuple(receipt.restored), receipt.saved_bytes, error
    )


class ObserverCheck:
    """Strict mode: whether observers only observe.

    The guard of the firing looks; where none is at hand, one of the model alone.
    """

    def __init__(self) -> None:
        self._guard: Guard | None = None
        self._model: Any = None

    def around(self, entry: Entry, ctx: RunDataContext, model_ctx: Any) -> AbstractContextManager[Any]:
        """Raises at the end of the block if model, gradients, modes, switches or the batch have changed.

        Random streams count for a hook that has promised to draw nothing. Others may: the streams are put back.
        """
        guard = getattr(model_ctx, "guard", None) or self._guard_of(ctx.model)
        if guard is None:
            return _NOTHING
        return guard.check_observers(entry.name, random=bool(entry.hook.pure), batch=ctx.batch_data)

    def _guard_of(self, model: Any) -> Guard | None:
        if self._model is not model:
            self._guard, self._model = None if model is None else Guard(model), model
        return self._guard


def new_error_policy(on_error: str) -> ErrorPolicy:
    """Return the policy of a manager; a hook that breaks what it declared always raises, as going on would hide it."""
    return ErrorPolicy(on_error, _LOGGER, _CONSEQUENCES, always_raise=(GuardError,))


def handle_hook_error(errors: ErrorPolicy, error: BaseException, entry: Entry) -> bool:
    """Count the error of a hook, and keep a warning for the end of the firing; return whether the run goes on."""
    goes_on = errors.handle(entry.name, error)
    if goes_on and errors.on_error == "warn" and errors.counts[entry.name] == 1:
        undone = "what it did is undone, " if entry.intervenes else ""
        errors.warn_later(
            entry.name,
            f"Hook {entry.name!r} raised {error_text(error).rstrip('.')}; {undone}it stays on, and the run goes on. "
            "Further failures are counted in manager.hook_errors.",
        )
    return goes_on
