"""Check every step by the statistics of its modules; run a bad one again at operator level and say what was wrong.

`find_bad_operations` and the lifecycle hook `FirstBadOperation` call `BadOperationFinder` when steps begin and end. It
listens to the steps of the model, goes back by `KeptSteps`, and looks by `OperatorRun`. A guard puts the run back.

The state in which steps began is kept cheaply: a snapshot every so many steps, batch and random streams of each. To go
back to a step, the snapshot before it is restored and the steps in between are run again: they are the same steps, so
the state is the same, bit for bit. Where nobody calls with the step, `FollowedSteps` begins one at the first forward of
the model in training. What the model was given is kept, and so are the gradients that come back to what it returned:
with both, forward and backward of the model run again, whatever the loss was.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import BadOperation, BadStep, describe_batch, find_ids
from hookline.debug.first_bad.operator_run import OperatorRun
from hookline.distributed.ranks import is_distributed
from hookline.guard.digest import digest
from hookline.guard.guard import Guard
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, Where, roots_of
from hookline.observe.watch.monitor import StepRows, listen
from hookline.phases import in_phase, known_phase, phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.training.experiment import MicroBatches
from hookline.tree import leaves

if TYPE_CHECKING:
    from hookline.guard.snapshot import Where
    from hookline.hook_types import Target
    from hookline.sites.site_info import Site

__all__ = [
    "BadOperationFinder", "FollowedBatch", "FollowedSteps", "KeptForward", "KeptStep", "KeptSteps", "RunParts",
    "SecondRun", "StateMarks",
]  # fmt: skip

RunParts = tuple[Any, Any, Any, Any, Any]
"""What a guard saves: model, optimizer, scheduler, scaler, loader."""


@dataclass(slots=True)
class KeptStep:
    """How one step began."""

    number: int
    batch: Any
    """The batch itself, not a copy."""
    ids: Any
    """What names the batch."""
    random: RandomStates
    marks: StateMarks | None = None
    """The state, in a few numbers; None where a snapshot has all of it."""


class SecondRun(NamedTuple):
    """How a step can be run again."""

    run: Callable[[KeptStep], Any] | None
    """Makes the step again, from the state in which it began; returns its loss, or whatever it returns."""
    note: str = ""
    """What of the step it leaves out, for the report; why there is none."""
    is_step: bool = True
    """Whether it is the whole step, so that it ends as the first run did."""


@dataclass(slots=True)
class _Window:
    """A snapshot, and the steps since."""

    snapshot: Snapshot
    put_back: Callable[[], None] | None = None
    """Puts back what the snapshot does not have: the plain attributes of an experiment."""
    steps: list[KeptStep] = field(default_factory=list)


class KeptSteps:
    """The last steps, of two snapshots or three; ``every`` is how many steps one snapshot serves.

    More than one, because a NaN in a gradient shows in the forward of the next step: then the step before is asked for.
    """

    def __init__(self, parts: Callable[[], RunParts], *, every: int, where: Where) -> None:
        self._parts = parts
        self._every = every
        self._most = 2 if every > 1 else 3
        self._where: Where = where
        self._windows: list[_Window] = []

    @property
    def needs_verdict_until(self) -> int:
        """The step up to which it has to be known that all was well before the next step may begin; -1 for none."""
        is_full = len(self._windows) == self._most and len(self._windows[-1].steps) >= self._every
        return self._windows[1].steps[0].number if is_full else -1

    def begin(self, number: int, batch: Any, ids: Any, attributes: Callable[[], Callable[[], None]] | None) -> None:
        """Keep the beginning of a step; ``attributes`` saves what else it may change, and returns what puts it back."""
        if not self._windows or len(self._windows[-1].steps) >= self._every:
            self._begin_window(attributes)
        steps = self._windows[-1].steps
        steps.append(KeptStep(number, batch, ids, RandomStates(), StateMarks(self._parts()[0]) if steps else None))

    def _begin_window(self, attributes: Callable[[], Callable[[], None]] | None) -> None:
        roots = roots_of(*self._parts())
        window = self._windows.pop(0) if len(self._windows) == self._most else None
        # The memory of the older one is used again, unless the run has other parts now (another loader, say).
        snapshot = Snapshot.of(roots, None if window is None else window.snapshot, where=self._where)
        self._windows.append(_Window(snapshot, None if attributes is None else attributes()))

    def has(self, number: int) -> bool:
        """Return whether the beginning of that step is kept."""
        return any(step.number == number for window in self._windows for step in window.steps)

    def get(self, number: int) -> KeptStep | None:
        """Return how that step began."""
        return next((step for window in self._windows for step in window.steps if step.number == number), None)

    def back_to(self, number: int, run: Callable[[KeptStep], Any]) -> KeptStep:
        """Bring the run to the beginning of a step; ``run`` makes the steps between the snapshot and it again."""
        window = next(each for each in self._windows if any(step.number == number for step in each.steps))
        window.snapshot.go_back("A step that was run again")
        if window.put_back is not None:
            window.put_back()
        for step in window.steps:
            step.random.restore()
            if step.number == number:
                return step
            run(step)
        raise AssertionError("the step is in the window")  # pragma: no cover

    def clear(self) -> None:
        """Let go of everything."""
        self._windows.clear()


_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUNDING: Final = 1e-3
"""Up to this relative difference of norms a step that is not deterministic has repeated."""


@dataclass(slots=True)
class KeptForward:
    """One forward of the model."""

    args: Any
    kwargs: Any
    autocast: list[tuple[str, torch.dtype]]
    backwards: list[dict[str, Tensor | None]] = field(default_factory=list)
    """For each backward pass, the gradients that came back, by the leaves of the output."""


class FollowedBatch:
    """The forwards of one step, and its batches with their ids; a step that accumulates gradients has several."""

    def __init__(self) -> None:
        self.forwards: dict[int, KeptForward] = {}
        """By the number that the site has of each."""
        self.batches: list[Any] = []
        self.ids: list[Any] = []
        """What names each batch; None for one without a name."""
        self.starts: list[int] = []
        """How many operators the second run had made when it began with each forward."""

    def add(self, batch: Any, ids: Any) -> None:
        """Take the batch of the forward that follows."""
        self.batches.append(batch)
        self.ids.append(ids)

    def describe(self, number: int | None = None) -> str:
        """Return in words the batch in which the operator of that ``number`` ran; without a number, all of them."""
        shown = self.batches or [forward.args for forward in self.forwards.values()]
        ids = self.ids or [None] * len(shown)
        if number is not None and len(shown) > 1 and len(self.starts) == len(shown):
            at = max(bisect_right(self.starts, number) - 1, 0)
            return f"{describe_batch(shown[at], ids[at])}, micro-batch {at + 1} of {len(shown)}"
        if len(shown) == 1:
            return describe_batch(shown[0], ids[0])
        return describe_batch(tuple(shown), None if any(each is None for each in ids) else ids)


class StateMarks:
    """The norms of parameters and buffers at one moment, in 64 bits: one bit of a float32 in 1e6 numbers shows."""

    __slots__ = ("_norms",)

    def __init__(self, model: nn.Module) -> None:
        self._norms: list[Tensor] = []
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                local = _torch.local_tensor(tensor.detach())
                if local is not None and local.dtype in _TYPES and local.layout is torch.strided:
                    self._norms.append(torch.linalg.vector_norm(local, dtype=torch.float64))

    def difference(self, model: nn.Module) -> str:
        """Return how the model differs now: ``""``, ``"rounding"`` or ``"other"``; waits for the device."""
        before, now = ([float(norm) for norm in marks._norms] for marks in (self, StateMarks(model)))
        if len(before) != len(now):
            return "other"
        pairs = [pair for pair in zip(before, now, strict=True) if not _is_same(*pair)]
        if not pairs:
            return ""
        return "rounding" if all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in pairs) else "other"


def _is_same(before: float, now: float) -> bool:
    return before == now or (math.isnan(before) and math.isnan(now))


# -- loops that are only followed -------------------------------------------------------------------------------------

_NO_LOSS: Final = (
    "forward and backward of the model were run again, from what it was given and the gradients that came back; the "
    "loss and the optimizer were not: to have them too, give step_fn="
)


class FollowedSteps:
    """Begin steps at forwards of the model, and run its part of them again."""

    def __init__(self, finder: BadOperationFinder, model: nn.Module) -> None:
        self._finder = finder
        self._model = model
        self._current: FollowedBatch | None = None
        self._noted: list[tuple[Any, Any]] = []
        self._again = SecondRun(self._run_again, _NO_LOSS, is_step=False)
        self._handles = HandleSet()
        name = "first bad operation"
        self._handles.add(
            attach(model, self._begin_forward, on="forward_pre", with_kwargs=True, observe=True, name=name)
        )
        self._handles.add(attach(model, self._take_gradients, on="backward_pre", observe=True, name=name))

    def note_batch(self, batch: Any, ids: Any = None) -> None:
        """Name the batch of the forwards that follow."""
        ids = self._finder.ids_of(batch) if ids is None else ids
        if self._current is None:
            self._noted.append((batch, ids))
        else:
            self._current.add(batch, ids)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        is_training = self._model.training and torch.is_grad_enabled() and known_phase() in (None, "train")
        if not is_training or _torch.in_recomputation():
            return
        if self._current is None:
            self._current = followed = FollowedBatch()
            noted, self._noted = self._noted, []
            for batch, ids in noted:
                followed.add(batch, ids)
            self._finder.begin_step(followed, self._again)
        self._current.forwards[site.step] = KeptForward(args, kwargs, _autocast())

    def _take_gradients(self, module: nn.Module, grads: Any, *, site: Site) -> None:
        if self._current is not None and site.step in self._current.forwards and phase() != "intervention":
            self._current.forwards[site.step].backwards.append(dict(zip(site.outputs, grads, strict=False)))

    def end_step(self, loss: Any, batch: Any = None) -> list[BadStep]:
        """End the step, if one has begun; ``batch`` is that of the step, if it becomes known only now."""
        followed, self._current = self._current, None
        if followed is None:
            return []
        if batch is not None and not followed.batches:
            for each in batch if isinstance(batch, MicroBatches) else [batch]:
                followed.add(each, self._finder.ids_of(each))
        return self._finder.end_step(loss, self._again)

    def flush(self) -> list[BadStep]:
        """Judge all steps whose numbers are still under way."""
        return self._finder.flush(self._again)

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)
        self._current = None

    def _run_again(self, kept: KeptStep) -> Any:
        """Run forwards and backwards in turns, as a loop that accumulates makes them; return what the model returns."""
        followed: FollowedBatch = kept.batch
        self._model.train()
        followed.starts = []
        ends: list[Tensor] = []
        for forward in followed.forwards.values():
            followed.starts.append(self._finder.operators_run)
            with _under(forward.autocast):
                output = self._model(*forward.args, **forward.kwargs)
            made = {str(path): leaf for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad}
            for number, grads in enumerate(forward.backwards, 1):
                given = {path: grad for path, grad in grads.items() if grad is not None and path in made}
                if given:
                    is_last = number == len(forward.backwards)
                    outputs = [made[path] for path in given]
                    torch.autograd.backward(outputs, [*given.values()], retain_graph=not is_last)
            ends += made.values()
        return ends


@contextmanager
def _under(autocast: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Cast as the forward did."""
    with ExitStack() as entered:
        for device, dtype in autocast:
            entered.enter_context(torch.autocast(device, dtype=dtype))
        yield


def _autocast() -> list[tuple[str, torch.dtype]]:
    """Return the devices whose operators are cast now, and to which type."""
    devices = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    return [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]


# -- the finder -------------------------------------------------------------------------------------------------------

logger = logging.getLogger("hookline.debug.first_bad")


_UNREPEATED: Final = "not repeated"
_OUTSIDE: Final = (
    "the steps since the last copy of the run were made again and ended elsewhere, so something outside was changed: "
    "data that the step fetches itself, a counter, an optimizer that was not given"
)
_ROUNDED: Final = "the steps before it were repeated up to rounding only: they are not deterministic"
_EAGER: Final = "the model is compiled; the second run was eager, operator by operator, so its rounding may differ"


class BadOperationFinder:
    """Find bad operations in the steps that it is told of.

    Args:
        model: The model.
        parts: Returns what a guard saves.
        target: Which modules are checked.
        exclude: Modules to leave out.
        every: How many steps one snapshot serves.
        where: Where the copies go, as for `Guard`.
        most: How many bad steps are run again; later ones are counted.
        batch_ids: Returns the ids of a batch.
        on_report: Called with every report.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Callable[[], RunParts],
        *,
        target: Target = "*",
        exclude: Target = None,
        every: int = 16,
        where: Where = "auto",
        most: int = 10,
        batch_ids: Callable[[Any], Any] | None = None,
        on_report: Callable[[BadStep], Any] | None = None,
    ) -> None:
        self._model = model
        self._parts = parts
        self._most = most
        self._batch_ids = batch_ids or find_ids
        self._on_report = on_report
        self.reports: list[BadStep] = []
        """What was found, the first first."""
        self.meant: list[BadStep] = []
        """Infinities that were given and reach neither loss nor gradient, as those of a mask do."""
        self.bad_steps = 0
        """How many steps had something that was not finite."""
        self.scaled_steps = 0
        """How many of them had it in gradients alone under a ``GradScaler``, which skips such steps by design."""
        self.steps = 0
        """How many steps have begun."""
        self._expected: set[str] = set()
        """Places whose infinities turned out to be meant."""
        self._last_bad = -2
        self._run: OperatorRun | None = None
        self._listener = listen(model, target, on=("forward", "backward"), stats=("nonfinite",), exclude=exclude)
        self._kept = KeptSteps(parts, every=every, where=where)
        self._attributes: Callable[[], Callable[[], None]] | None = None

    # -- steps -------------------------------------------------------------------------------------------------

    def ids_of(self, batch: Any) -> Any:
        """Return what names a batch, if that is known."""
        return None if batch is None or isinstance(batch, FollowedBatch) else self._batch_ids(batch)

    @property
    def operators_run(self) -> int:
        """How many operators the second run that is under way has made."""
        return 0 if self._run is None else self._run.num_operators

    def begin_step(
        self, batch: Any, again: SecondRun, attributes: Any = None, ids: Any = None, number: int | None = None
    ) -> None:
        """Keep how a step begins; ``number`` is that of the run, if it does not count from 0 here."""
        if number is not None:
            self.steps = number
        self._attributes = attributes
        until = self._kept.needs_verdict_until
        if until >= 0:
            self._judge_all(self._listener.arrived(until=until), again)
        ids = self.ids_of(batch) if ids is None else ids
        self._kept.begin(self.steps, batch, ids, attributes)
        self.steps += 1

    def end_step(self, loss: Any, again: SecondRun) -> list[BadStep]:
        """End a step; return the reports about it, or about an earlier one whose numbers have arrived now."""
        self._listener.end_step(self.steps - 1, loss if isinstance(loss, Tensor | float) else None)
        return self._judge_all(self._listener.arrived(), again)

    def flush(self, again: SecondRun) -> list[BadStep]:
        """Wait for the numbers of all steps, and judge them."""
        return self._judge_all(self._listener.arrived(wait=True), again)

    def remove(self) -> None:
        """Take all hooks off, let go of what was kept."""
        self._listener.remove(quiet=True)
        self._kept.clear()

    # -- judging -----------------------------------------------------------------------------------------------

    def _judge_all(self, steps: list[StepRows], again: SecondRun) -> list[BadStep]:
        found = [self._judge(step, again) for step in steps]
        return [report for report in found if report is not None]

    def _judge(self, rows: StepRows, again: SecondRun) -> BadStep | None:
        calls = rows.bad_places(self._expected)
        bad = [place.label for place in calls.places]
        if rows.loss is not None and not math.isfinite(float(rows.loss)):
            bad.append("loss")
        if not bad:
            return None
        if _scales(self._parts()[3]) and all(map(_is_of("backward"), bad)):
            self.scaled_steps += 1
            return None
        self.bad_steps += 1
        goes_on, self._last_bad = rows.number == self._last_bad + 1, rows.number
        if goes_on or len(self.reports) >= self._most:
            return None  # what a NaN in the weights does to every step from then on
        report = replace(self._look(rows.number, tuple(bad), again), num_candidates=max(calls.num_candidates, 1))
        is_given_inf = report.verdict == "given" and report.operation is not None and report.operation.what == "Inf"
        if is_given_inf and all(map(_is_of("forward"), bad)):
            # A mask: what it hides reaches neither the loss nor a gradient, so it is no fault.
            self._expected.update(bad)
            self.bad_steps -= 1
            self._last_bad = -2
            self.meant.append(report)
            logger.info("%s; it reaches neither loss nor gradient, and is taken as meant", report.headline())
            return None
        if report.verdict == "did not repeat":
            self._last_bad = -2
        self.reports.append(report)
        logger.warning("%s", report)
        if self._on_report is not None:
            self._on_report(report)
        return report

    # -- running again -----------------------------------------------------------------------------------------

    def _look(self, number: int, places: tuple[str, ...], again: SecondRun) -> BadStep:
        kept = self._kept.get(number)
        batch = _describe(kept)
        why = self._why_not(kept, again)
        if why:
            return BadStep(number, places, "not run again", batch=batch, notes=(why,))
        notes = (again.note,) if again.note else ()
        if any(map(_torch.is_compiled, self._model.modules())):
            notes = (*notes, _EAGER)
        try:
            operation, at, is_same, note = self._protected(number, again)
        except _UnrepeatedError:
            return BadStep(number, places, _UNREPEATED, batch=batch, notes=(*notes, _OUTSIDE))
        except _SecondRunError as error:
            # Behind the first sentence torch lists its backends.
            told = str(error.cause).partition("\n")[0].partition(". ")[0][:200]
            note = f"the second run raised {type(error.cause).__name__}: {told}"
            return BadStep(number, places, "not run again", batch=batch, notes=(*notes, note))
        notes = (*notes, note) if note else notes
        if operation is not None:
            batch = _describe(self._kept.get(at), operation.number)
            notes = notes if at == number else (*notes, f"the operator ran in step {at}; the batch is that step's")
        if operation is None:
            return BadStep(number, places, "did not repeat", None, batch, is_same, notes)
        return BadStep(number, places, "given" if operation.given else "found", operation, batch, is_same, notes)

    @staticmethod
    def _why_not(kept: KeptStep | None, again: SecondRun) -> str:
        if is_distributed():
            return "there are other ranks, which would have to run the step again too; run this rank's batch alone"
        if again.run is None:
            return again.note or "nothing says how to run the step again: give step_fn="
        return "" if kept is not None else "the beginning of the step is not kept any more"

    def _protected(self, number: int, again: SecondRun) -> tuple[BadOperation | None, int, bool | None, str]:
        """Run a step again; return what was found, in which step, whether it ended as the first time, and a note.

        The run stays as it is.
        """
        guard = Guard(*self._parts()[:4], loader=self._parts()[4])
        guard.save(["trains"])
        put_back = None if self._attributes is None else self._attributes()
        is_latest = number == self.steps - 1
        end = self._end() if again.is_step and is_latest else None
        try:
            with in_phase("intervention"), self._listener.watch.paused(), guard.protecting("first bad operation"):
                run, note = self._run_again(number, again)
                is_same = None if end is None else self._ends_as(end)
                found, at = run.first, number
                if run.begins_bad and self._kept.has(number - 1):
                    # The step before has made it, in a gradient or in the optimizer.
                    with suppress(_UnrepeatedError):
                        earlier = self._run_again(number - 1, again)[0].first
                        if earlier is not None and not earlier.given:
                            found, at = earlier, number - 1
        finally:
            if put_back is not None:
                put_back()
            guard.release()
        return found, at, is_same, note

    def _run_again(self, number: int, again: SecondRun) -> tuple[OperatorRun, str]:
        assert again.run is not None
        run_by = BadOperationFinder._run_again.__code__
        try:
            kept = self._kept.back_to(number, again.run)
            difference = "" if kept.marks is None else kept.marks.difference(self._model)
            if difference == "other":
                raise _UnrepeatedError
            with torch.compiler.set_stance("force_eager"), OperatorRun(self._model, run_by) as run:
                self._run = run
                run.note_end(again.run(kept))
            return run, _ROUNDED if difference else ""
        except _UnrepeatedError:
            raise
        except Exception as error:
            raise _SecondRunError(error) from error
        finally:
            self._run = None

    def _ends_as(self, end: bytes) -> bool | None:
        """Return whether the state has the digest ``end``; None if that tells nothing, since no parameter is finite."""
        if self._end() != end:
            return False
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return True if any(bool(each.detach().isfinite().any()) for each in trained) else None

    def _end(self) -> bytes:
        return digest([*self._model.parameters(), *self._model.buffers()])


class _UnrepeatedError(Exception):
    """The steps before did not lead to the state in which the step began."""


class _SecondRunError(Exception):
    """The step raised when it was run again."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _describe(kept: KeptStep | None, number: int | None = None) -> str:
    """Return the batch of a step in words; of several, the one in which the operator of that ``number`` ran."""
    if kept is None:
        return ""
    if isinstance(kept.batch, FollowedBatch):
        return kept.batch.describe(number)
    return describe_batch(kept.batch, kept.ids)


def _is_of(kind: str) -> Callable[[str], bool]:
    """Return a function that tells whether a label is of that kind of flow; that of the model is the kind alone."""
    return lambda label: label.rpartition("/")[2] == kind


def _scales(scaler: Any) -> bool:
    return scaler is not None and callable(getattr(scaler, "is_enabled", None)) and bool(scaler.is_enabled())
