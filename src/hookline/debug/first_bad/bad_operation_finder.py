"""Check every step by the statistics of its modules; run a bad one again at operator level and say what was wrong.

`find_bad_operations` and the lifecycle hook `FirstBadOperation` call `BadOperationFinder` when steps begin and end. It
listens to the steps of the model, goes back by `KeptSteps`, and looks by `OperatorRun`. A guard puts the run back.

The state in which steps began is kept cheaply: a snapshot every so many steps, batch and random streams of each. To go
back to a step, the snapshot before it is restored and the steps in between are run again: they are the same steps, so
the state is the same, bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import BadOperation, BadStep
from hookline.debug.first_bad.operator_run import OperatorRun
from hookline.distributed.ranks import is_distributed
from hookline.guard.guard import Guard
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, roots_of
from hookline.observe.watch.monitor import StepRows, listen
from hookline.phases import in_phase
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.hook_types import Target

__all__ = ["BadOperationFinder"]

logger = logging.getLogger("hookline.debug.first_bad")

RunParts = tuple[Any, Any, Any, Any, Any]
"""What a guard saves: model, optimizer, scheduler, scaler, loader."""
SaveAttributes = Callable[[], Callable[[], None]]
"""Saves the plain attributes of an experiment; returns what puts them back."""

_MOST: Final = 10
"""How many bad steps are run again; later ones are counted."""
_OTHER_RANKS: Final = (
    "there are other ranks, which would have to run the step again too; run this rank's batch in a process of its own"
)
_NOT_KEPT: Final = "the beginning of the step is not kept any more"
_OUTSIDE: Final = (
    "the steps since the last copy of the run were made again and ended elsewhere, so something outside was changed: "
    "data that the step fetches itself, a counter, an optimizer that was not given"
)
_EAGER: Final = "the model is compiled; the second run was eager, operator by operator, so its rounding may differ"


# -- how steps began --------------------------------------------------------------------------------------------------

_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUNDING: Final = 1e-3
"""Up to this relative difference of norms a step that is not deterministic has repeated."""


class StateMarks:
    """The norms of parameters and buffers at one moment, in 64 bits; taken without waiting for a device."""

    __slots__ = ("_norms",)

    def __init__(self, model: nn.Module) -> None:
        held = [{**module._parameters, **module._buffers}.values() for module in model.modules()]
        found = [_torch.local_tensor(tensor) for some in held for tensor in some if tensor is not None]
        read = [each for each in found if each is not None and each.dtype in _TYPES and each.layout is torch.strided]
        with torch.no_grad():  # few launches for all of them
            self._norms = _torch.norms_of_all(read, 2, dtype=torch.float64) if read else ()

    def are_those_of(self, model: nn.Module) -> bool:
        """Return whether the model is now as it was then, up to rounding; waits for the device."""
        before, now = ([float(norm) for norm in marks._norms] for marks in (self, StateMarks(model)))
        return len(before) == len(now) and all(map(_is_close, before, now))


def _is_close(before: float, now: float) -> bool:
    return math.isclose(before, now, rel_tol=_ROUNDING) or (math.isnan(before) and math.isnan(now))


@dataclass(slots=True)
class KeptStep:
    """How one step began."""

    number: int
    batch: Any
    """What the step is run again with; itself, not a copy."""
    describe: Callable[[int | None], str]
    """Returns the batch in words; of several, the one in which the operator of that number ran."""
    random: RandomStates
    marks: StateMarks | None = None
    """The state, in a few numbers; None where a snapshot has all of it."""


@dataclass(slots=True)
class _Window:
    """A snapshot, and the steps since."""

    snapshot: Snapshot
    put_back: Callable[[], None]
    """Puts back what the snapshot does not have: the plain attributes of an experiment."""
    steps: list[KeptStep] = field(default_factory=list)


class KeptSteps:
    """The last steps, of two snapshots or three; ``every`` is how many steps one snapshot serves.

    More than one, because a NaN in a gradient shows in the forward of the next step: then the step before is asked for.
    """

    def __init__(self, parts: Callable[[], RunParts], save_attributes: SaveAttributes, every: int) -> None:
        self._parts, self._save_attributes, self._every = parts, save_attributes, every
        self._most = 2 if every > 1 else 3
        self._windows: list[_Window] = []

    @property
    def needs_verdict_until(self) -> int:
        """The step up to which it has to be known that all was well before the next step may begin; -1 for none."""
        is_full = len(self._windows) == self._most and len(self._windows[-1].steps) >= self._every
        return self._windows[1].steps[0].number if is_full else -1

    def begin(self, number: int, batch: Any, describe: Callable[[int | None], str]) -> None:
        """Keep the beginning of a step."""
        if not self._windows or len(self._windows[-1].steps) >= self._every:
            self._begin_window()
        steps = self._windows[-1].steps
        marks = StateMarks(self._parts()[0]) if steps else None
        steps.append(KeptStep(number, batch, describe, RandomStates(), marks))

    def _begin_window(self) -> None:
        oldest = self._windows.pop(0) if len(self._windows) == self._most else None
        # The memory of the oldest is used again, unless the run has other parts now (another loader, say).
        snapshot = Snapshot.of(roots_of(*self._parts()), None if oldest is None else oldest.snapshot)
        self._windows.append(_Window(snapshot, self._save_attributes()))

    def get(self, number: int) -> KeptStep | None:
        """Return how that step began; None if it is not kept any more."""
        return next((step for window in self._windows for step in window.steps if step.number == number), None)

    def back_to(self, kept: KeptStep, run: Callable[[Any], Any]) -> None:
        """Bring the run to the beginning of a step; ``run`` makes the steps between the snapshot and it again."""
        window = next(each for each in self._windows if kept in each.steps)
        window.snapshot.go_back("A step that was run again")
        window.put_back()
        for step in window.steps:
            step.random.restore()
            if step is kept:
                return
            run(step.batch)

    def clear(self) -> None:
        """Let go of everything."""
        self._windows.clear()


# -- the finder -------------------------------------------------------------------------------------------------------


class BadOperationFinder:
    """Find bad operations in the steps that it is told of.

    Args:
        model: The model.
        parts: Returns what a guard saves.
        run_again: Makes a step again with its batch, from the state in which it began; returns its loss, say.
        target: Which modules are checked.
        every: How many steps one snapshot serves.
        save_attributes: Saves what else a step may change.
        on_report: Called with every report.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Callable[[], RunParts],
        run_again: Callable[[Any], Any],
        *,
        target: Target = "*",
        every: int = 16,
        save_attributes: SaveAttributes = lambda: lambda: None,
        on_report: Callable[[BadStep], Any] = lambda report: None,
    ) -> None:
        self._model = model
        self._parts = parts
        self._run_again = run_again
        self._save_attributes = save_attributes
        self._on_report = on_report
        self.note = ""
        """What of a step a second run leaves out, for the reports."""
        self.reports: list[BadStep] = []
        """What was found, the first first."""
        self.bad_steps = 0
        """How many steps had something that was not finite."""
        self.scaled_steps = 0
        """How many had it in gradients alone under a ``GradScaler``, which skips such steps by design."""
        self.steps = 0
        """How many steps have begun."""
        self._run: OperatorRun | None = None
        """The second run that is under way."""
        self._meant: set[str] = set()
        """Places whose infinities turned out to be meant."""
        self._last_bad = -2
        self._listener = listen(model, target, on=("forward", "backward"))
        self._kept = KeptSteps(parts, save_attributes, every)

    @property
    def operators_run(self) -> int:
        """How many operators the second run that is under way has made."""
        return 0 if self._run is None else self._run.num_operators

    def begin_step(self, batch: Any, describe: Callable[[int | None], str], number: int | None = None) -> None:
        """Keep how a step begins; ``number`` is that of the run, if it does not count from 0 here."""
        if number is not None:
            self.steps = number
        until = self._kept.needs_verdict_until
        if until >= 0:
            self._judge(self._listener.arrived(until=until))
        self._kept.begin(self.steps, batch, describe)
        self.steps += 1

    def end_step(self, loss: Any) -> None:
        """End a step; judge those whose numbers have arrived."""
        self._listener.end_step(self.steps - 1, loss if isinstance(loss, Tensor | float) else None)
        self._judge(self._listener.arrived())

    def flush(self) -> None:
        """Wait for the numbers of all steps, and judge them."""
        self._judge(self._listener.arrived(wait=True))

    def remove(self) -> None:
        """Take all hooks off, let go of what was kept."""
        self._listener.remove(quiet=True)
        self._kept.clear()

    # -- judging -----------------------------------------------------------------------------------------------

    def _judge(self, steps: Sequence[StepRows]) -> None:
        for rows in steps:
            bad = tuple(place.label for place in rows.bad_places(self._meant).places)
            if rows.loss is not None and not math.isfinite(float(rows.loss)):
                bad = (*bad, "loss")
            if bad and _scales(self._parts()[3]) and _are_all(bad, "backward"):
                self.scaled_steps += 1
            elif bad:
                self._take(rows.number, bad)

    def _take(self, number: int, bad: tuple[str, ...]) -> None:
        """Report a bad step, unless it is what a NaN in the weights does to every step from then on."""
        self.bad_steps += 1
        goes_on, self._last_bad = number == self._last_bad + 1, number
        if goes_on or len(self.reports) >= _MOST:
            return
        report = self._look(number, bad)
        is_given_inf = report.verdict == "given" and report.operation is not None and report.operation.what == "Inf"
        is_meant = is_given_inf and _are_all(bad, "forward")
        if is_meant or report.verdict == "did not repeat":
            self._last_bad = -2
        if is_meant:  # a mask: what it hides reaches neither the loss nor a gradient, so it is no fault
            self._meant.update(bad)
            self.bad_steps -= 1
            logger.info("%s; it reaches neither loss nor gradient, and is taken as meant", report.headline())
            return
        self.reports.append(report)
        logger.warning("%s", report)
        self._on_report(report)

    # -- running again -----------------------------------------------------------------------------------------

    def _look(self, number: int, places: tuple[str, ...]) -> BadStep:
        kept = self._kept.get(number)
        if kept is None or is_distributed():
            batch = "" if kept is None else kept.describe(None)
            why = _NOT_KEPT if kept is None else _OTHER_RANKS
            return BadStep(number, places, "not run again", batch=batch, notes=(why,))
        notes = [self.note] if self.note else []
        if any(map(_torch.is_compiled, self._model.modules())):
            notes.append(_EAGER)
        try:
            found, step = self._protected(kept)
        except _NotRepeatedError as error:
            return BadStep(number, places, error.verdict, None, kept.describe(None), (*notes, error.why))
        if found is None:
            return BadStep(number, places, "did not repeat", None, kept.describe(None), tuple(notes))
        if step is not kept:
            notes.append(f"the operator ran in step {step.number}; the batch is that step's")
        verdict = "given" if found.given else "found"
        return BadStep(number, places, verdict, found, step.describe(found.number), tuple(notes))

    def _protected(self, kept: KeptStep) -> tuple[BadOperation | None, KeptStep]:
        """Run a step again; return what was found, and in which step. The run stays as it is."""
        *parts, loader = self._parts()
        guard = Guard(*parts, loader=loader)
        guard.save(["trains"])
        put_back = self._save_attributes()
        try:
            with in_phase("intervention"), guard.protecting("first bad operation"):
                run = self._operators_of(kept)
                before = self._kept.get(kept.number - 1)
                if run.begins_bad and before is not None:
                    # The step before has made it, in a gradient or in the optimizer.
                    with suppress(_NotRepeatedError):
                        earlier = self._operators_of(before).first
                        if earlier is not None and not earlier.given:
                            return earlier, before
                return run.first, kept
        finally:
            put_back()
            guard.release()

    def _operators_of(self, kept: KeptStep) -> OperatorRun:
        """Run a step operator by operator."""
        try:
            self._kept.back_to(kept, self._run_again)
            if kept.marks is not None and not kept.marks.are_those_of(self._model):
                raise _NotRepeatedError("not repeated", _OUTSIDE)
            run_by = BadOperationFinder._operators_of.__code__
            with torch.compiler.set_stance("force_eager"), OperatorRun(self._model, run_by) as run:
                self._run = run
                run.note_end(self._run_again(kept.batch))
            return run
        except _NotRepeatedError:
            raise
        except Exception as error:
            told = str(error).partition("\n")[0].partition(". ")[0][:200]  # behind that torch lists its backends
            why = f"the second run raised {type(error).__name__}: {told}"
            raise _NotRepeatedError("not run again", why) from error
        finally:
            self._run = None


class _NotRepeatedError(Exception):
    """A step could not be run again from the state in which it began."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


def _are_all(labels: Sequence[str], kind: str) -> bool:
    """Return whether all places are of that kind of flow; the label of the model itself is the kind alone."""
    return all(label.rpartition("/")[2] == kind for label in labels)


def _scales(scaler: Any) -> bool:
    return scaler is not None and callable(getattr(scaler, "is_enabled", None)) and bool(scaler.is_enabled())
