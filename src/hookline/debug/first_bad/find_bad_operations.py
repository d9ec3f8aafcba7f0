"""Find the operator that made the first NaN or infinity: in any loop, and by a hook in run files and a `HookManager`.

Users call `find_bad_operations`, or give `FirstBadOperation` to a manager. Both tell a `BadOperationFinder` when steps
begin and end: by ``check.step(batch)`` or ``around_step`` where they know the step, else by the forwards of the model
and the steps of the optimizer (`FollowedSteps`).
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from torch import nn
from torch.optim import Optimizer

from hookline.debug.first_bad.bad_operation import BadStep, name_batch
from hookline.debug.first_bad.bad_operation_finder import BadOperationFinder, FollowedSteps, SecondRun
from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.guard.snapshot import first_names
from hookline.lifecycle.hook import MetricInfo, TrainingHook
from hookline.messages import type_name
from hookline.phases import phase
from hookline.sites.modules.attach_everywhere import attach_everywhere
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.sites.targets import check_model
from hookline.tables import OFF, ON, ShownAsTable, Table
from hookline.when import HookPoint

if TYPE_CHECKING:
    from torch import nn

    from hookline.guard.snapshot import Where
    from hookline.hook_types import Target
    from hookline.lifecycle.context import RunDataContext
    from hookline.training.run import RunStep

__all__ = [
    "BadOperations", "FirstBadOperation", "JoinedOptimizers", "OtherOptimizers", "find_bad_operations",
    "join_optimizers", "list_optimizers",
]  # fmt: skip

logger = logging.getLogger("hookline.debug.first_bad")


def find_bad_operations(
    model: nn.Module,
    optimizer: Any = None,
    *,
    step_fn: Callable[[Any], Any] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    target: Target = "*",
    exclude: Target = None,
    every: int = 16,
    where: Where = "auto",
    most: int = 10,
    batch_ids: Callable[[Any], Any] | None = None,
    on_report: Callable[[BadStep], Any] | None = None,
) -> BadOperations:
    """Find the operator that made the first NaN or infinity.

    Recipe::

        with hookline.debug.find_bad_operations(model, optimizer, step_fn=train_step) as check:
            for batch in loader:
                loss = check.step(batch)  # calls train_step(batch)
        print(check)

    The outputs of modules and their gradients are checked at every step, by statistics that wait for no device. When
    one is not finite, the run goes back to the beginning of that step, makes it again operator by operator, and names
    the first operator whose result was not finite although its inputs were. Then the state is put back, bit for bit,
    and the run goes on. Reports are logged (logger ``hookline.debug.first_bad``) and kept in ``check.reports``.

    Without ``step_fn`` write your loop as it is, and give the optimizer: its step ends a step. Forward and backward of
    the model are run again, on what it was given and the gradients that came back; the loss and the optimizer are not.
    ``check.note_batch(batch)`` before a forward names the batch for the report.

    Args:
        model: The model.
        optimizer: What trains it; a list of all optimizers where there are several. Without ``step_fn`` the step of the
            last one ends a step.
        step_fn: ``step_fn(batch)`` makes one whole step and returns the loss. All that it changes beside the parts
            given here, and what it prints, happens again in the second run.
        scheduler: The scheduler, if the step moves it.
        scaler: The ``GradScaler`` in use. Gradients that overflow under it are its own affair, and are counted in
            ``check.scaled_steps``.
        loader: The loader, if the step reads from it.
        target: Which modules are checked, as in ``attach``; all by default.
        exclude: Modules to leave out.
        every: How many steps one snapshot of the run serves; the steps since are run again to get to a later one. Only
            with ``step_fn``, else every step has its own.
        where: Where the copies go: ``"device"``, ``"host"`` or ``"auto"``.
        most: How many bad steps are run again; more are counted.
        batch_ids: ``batch_ids(batch)`` names the samples of a batch, for the report. By default the entry ``"ids"``,
            ``"id"``, ``"indices"``, ``"index"`` or ``"idx"`` of a dictionary.
        on_report: Called with each report, a `BadStep`.
    """
    check_model(model, target)
    if every < 1 or most < 0:
        raise OptionError(f"every= is at least 1 and most= at least 0; got {every!r} and {most!r}.")
    if step_fn is not None and not callable(step_fn):
        raise OptionError(f"step_fn= is a function of the batch that makes a step; got {type_name(step_fn)}.")
    if step_fn is None and optimizer is None:
        raise OptionError("Nothing says when a step is over: give step_fn=, or the optimizer.")
    joined = join_optimizers(optimizer)
    finder = BadOperationFinder(
        model,
        lambda: (model, joined, scheduler, scaler, loader),
        target=target,
        exclude=exclude,
        every=every if step_fn is not None else 1,
        where=where,
        most=most,
        batch_ids=batch_ids,
        on_report=on_report,
    )
    try:
        return BadOperations(finder, model, optimizer, step_fn)
    except BaseException:
        finder.remove()
        raise


class BadOperations(ShownAsTable):
    """The bad steps that one `find_bad_operations` has found; prints as a table.

    Recipe: ``check = hookline.debug.find_bad_operations(model, optimizer, step_fn=train_step)``; then
    ``check.step(batch)``, ``print(check)``, ``check.reports``. Comes off by ``check.remove()``, or at the end of a
    ``with`` block.
    """

    def __init__(
        self,
        finder: BadOperationFinder,
        model: nn.Module,
        optimizer: Any,
        step_fn: Callable[[Any], Any] | None,
    ) -> None:
        self._finder = finder
        self._step_fn = step_fn
        self._removed = False
        self._has_warned = False
        self._followed: FollowedSteps | None = None
        self._others: OtherOptimizers | None = None
        self._handle: Any = None
        if step_fn is None:
            self._followed = FollowedSteps(finder, model)
            last = unwrap_optimizer(list_optimizers(optimizer)[-1])
            self._handle = attach_optimizer(last, self._end_followed, on="step_post", name="first bad operation")
        else:
            self._others = OtherOptimizers(model, optimizer)

    @property
    def reports(self) -> list[BadStep]:
        """What was found, the first first."""
        return self._finder.reports

    @property
    def meant(self) -> list[BadStep]:
        """Infinities that were put in and reach neither the loss nor a gradient, as those of a mask; no fault."""
        return self._finder.meant

    @property
    def bad_steps(self) -> int:
        """The number of steps that had something that was not finite."""
        return self._finder.bad_steps

    @property
    def scaled_steps(self) -> int:
        """The number of steps with overflows in gradients alone, which the scaler skips."""
        return self._finder.scaled_steps

    def step(self, batch: Any = None, *, ids: Any = None) -> Any:
        """Make a step by ``step_fn(batch)``, and check it; return what that returned."""
        if self._step_fn is None or self._removed:
            raise OptionError("check.step(batch) calls step_fn(batch), which was not given, or the check is off.")
        if batch is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "check.step() was called without a batch: if step_fn fetches its data itself, a second run takes the "
                "next data of the run. Next: fetch the batch in the loop, and call check.step(batch)."
            )
        self._finder.begin_step(batch, self._again, ids=ids)
        result = self._step_fn(batch)
        self._finder.end_step(result, self._again)
        return result

    def note_batch(self, batch: Any, *, ids: Any = None) -> None:
        """Name the batch of the forward that follows; only where no ``step_fn`` was given."""
        if self._followed is None:
            raise OptionError("check.step(batch) knows the batch; note_batch() is for a check without step_fn=.")
        self._followed.note_batch(batch, ids)

    def flush(self) -> list[BadStep]:
        """Wait for the numbers of all steps; return the reports that they gave rise to."""
        if self._followed is not None:
            return self._followed.flush()
        return self._finder.flush(self._again)

    def remove(self) -> None:
        """Take all hooks off; what was found stays."""
        if self._removed:
            return
        self._removed = True
        if self._handle is not None:
            self._handle.remove(quiet=True)
        for part in (self._followed, self._others):
            if part is not None:
                part.remove()
        self._finder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if exc_info[0] is None and not self._removed:
                self.flush()
        finally:
            self.remove()

    @property
    def _again(self) -> SecondRun:
        step_fn = self._step_fn
        if step_fn is None or (self._others is not None and self._others.note):
            return SecondRun(None, "" if self._others is None else self._others.note)
        return SecondRun(lambda kept: step_fn(kept.batch))

    def _end_followed(self, *args: Any) -> None:
        if self._followed is not None and phase() != "intervention":
            self._followed.end_step(None)

    def _table(self) -> Table:
        if not self.reports:
            return Table(title=f"{self._finder.steps} steps, all finite" if not self.bad_steps else self._counted())
        return Table(title=self._counted(), foot=[str(report) for report in self.reports])

    def _counted(self) -> str:
        return f"{self.bad_steps} of {self._finder.steps} steps had numbers that were not finite"

    def _state(self) -> str:
        return OFF if self._removed else ON


# -- all optimizers of a run ------------------------------------------------------------------------------------------

_NEXT: Final = "Next: give all optimizers of the step, optimizer=[first, second]"


class JoinedOptimizers:
    """Hold several optimizers as one object, which a guard looks through."""

    def __init__(self, given: list[Any]) -> None:
        self.optimizers = [unwrap_optimizer(each) for each in given]
        # Wrappers that are no optimizers themselves are saved by their attributes.
        self.wrappers = [vars(each) for each in given if not isinstance(each, Optimizer) and hasattr(each, "__dict__")]


def list_optimizers(optimizer: Any) -> list[Any]:
    """Return what was given for ``optimizer=`` as a list; refuse a list with nothing in it, or with None."""
    if not isinstance(optimizer, list | tuple):
        return [] if optimizer is None else [optimizer]
    if not optimizer or any(not hasattr(each, "__dict__") for each in optimizer):
        raise OptionError(f"optimizer= is an optimizer, or a list of all that the step uses; got {optimizer!r}.")
    return list(optimizer)


def join_optimizers(optimizer: Any) -> Any:
    """Return one object for what was given: an optimizer as it is, several as `JoinedOptimizers`."""
    found = list_optimizers(optimizer)
    return JoinedOptimizers(found) if len(found) > 1 else found[0] if found else None


class OtherOptimizers:
    """Notice when an optimizer that was not given trains the model; a hook on all optimizers of the process."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._given = [inner for each in list_optimizers(optimizer) for inner in _inside(each)]
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(self._given)
        self.note = ""
        """Which parameters another optimizer trains, and what to do; empty while there is none."""
        self._handle = attach_everywhere(self._see_step, on="step_post", name="first bad operation")

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove(quiet=True)

    def _see_step(self, optimizer: Any, *args: Any) -> None:
        if optimizer in self._known or phase() == "intervention":
            return
        self._known.add(optimizer)
        owned = {id(parameter) for each in self._given for parameter in _parameters(each)}
        others = [id(parameter) for parameter in _parameters(optimizer) if id(parameter) not in owned]
        names = [self._names[each] for each in others if each in self._names]
        if names and not self.note:
            self.note = (
                f"{type(optimizer).__name__} trains {first_names(names)} and was not given: a second run would change "
                f"its state for good. {_NEXT}"
            )
            logger.warning("Bad steps are found, but not run again: %s", self.note)


def _inside(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer without wrappers, and those that an object of the user's own holds, also in a list."""
    inner = unwrap_optimizer(optimizer)
    if isinstance(inner, Optimizer):
        yield inner
    for value in vars(inner).values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (each for each in held if isinstance(each, Optimizer))


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


# -- the lifecycle hook -----------------------------------------------------------------------------------------------

_METRICS = (
    ("bad_steps", "steps so far in which something was not finite"),
    ("reports", "of these, how many were run again, operator by operator"),
)


class FirstBadOperation(TrainingHook):
    """Find the operator that made the first NaN or infinity of a run.

    Recipe: ``HookManager(hooks=[hookline.debug.FirstBadOperation()])``; ``hookline run EXPERIMENT --hooks
    first_bad_operation``.

    Reports are logged (logger ``hookline.debug.first_bad``), kept in ``reports``, and written to
    ``first_bad_operation.json`` in the folder of the run, if it has one.

    Args:
        every: How many steps one snapshot of the run serves, in the loops of hookline.
        most: How many bad steps are run again; more are counted.
        on_report: Called with each report.
    """

    name = "first_bad_operation"
    description = "check every module; name the operator that made the first NaN or infinity"
    hook_points = frozenset({HookPoint.POST_STEP})
    wraps_steps = True
    pure = True
    debug = True
    reduce = "max"

    def __init__(
        self,
        *,
        every: int = 16,
        most: int = 10,
        on_report: Callable[[BadStep], Any] | None = None,
    ) -> None:
        self._every, self._most = every, most
        self._on_report = on_report
        self._folder: Path | None = None
        self._finder: BadOperationFinder | None = None
        self._followed: FollowedSteps | None = None
        self._model: nn.Module | None = None
        self._step: RunStep | None = None
        self._told = 0
        self.reports: list[BadStep] = []
        """What was found, the first first."""

    @property
    def bad_steps(self) -> int:
        """The number of steps of this run that had something that was not finite."""
        return 0 if self._finder is None else self._finder.bad_steps

    def set_run_context(self, **context: Any) -> None:
        """Learn where the run is kept."""
        if context.get("run_dir") is not None:
            self._folder = Path(context["run_dir"])

    def start(self, model: nn.Module) -> None:
        """Begin to check; until a step is handed over, as in a loop that is only followed."""
        self._model = model
        self._finder = self._make_finder(1)
        self._followed = FollowedSteps(self._finder, model)

    def finish(self) -> None:
        """Judge the last steps, and take everything off."""
        if self._finder is not None:
            if self._followed is not None:
                self._followed.flush()
                self._followed.remove()
            else:
                self._finder.flush(self._again)
            self._finder.remove()
        self._finder = self._followed = self._step = None

    def reset(self) -> None:
        """Forget the last run."""
        self.reports, self._told = [], 0

    def around_step(self, step: RunStep, batch: Any) -> Any:
        """Make a step, and check it."""
        if self._finder is None or self._model is None:
            return step(batch)
        if self._followed is not None:  # the loop is ours: whole steps can be made again
            self._followed.remove()
            self._finder.remove()
            self._followed, self._step = None, step
            self._finder = self._make_finder(self._every)
        finder, run = self._finder, step.run
        ids = name_batch(finder.ids_of(batch), run.batch_idx, run.epoch)
        finder.begin_step(batch, self._again, run.guarded.save_attributes, ids, number=run.step)
        result = step(batch)
        finder.end_step(result.loss, self._again)
        return result

    @property
    def _again(self) -> SecondRun:
        step = self._step
        return SecondRun(None if step is None else lambda kept: step.repeat(kept.batch).loss)

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """End a step of a loop that is only followed; return how many steps were bad when that has changed."""
        if self._followed is not None:
            self._followed.end_step(ctx.raw("loss"), ctx.batch_data)
            if self._finder is not None and self.manager is not None:
                # `hookline run -- python train.py` begins in the middle of a step, whose forward was not seen here.
                self._finder.steps = max(self._finder.steps, self.manager.global_step + 1)
        bad = self.bad_steps
        if bad == self._told:
            return None
        self._told = bad
        return {"bad_steps": bad, "reports": len(self.reports)}

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric."""
        return [MetricInfo(*row) for row in _METRICS]

    def _make_finder(self, every: int) -> BadOperationFinder:
        assert self._model is not None
        model = self._model
        return BadOperationFinder(
            model,
            lambda: (model, None, None, None, None) if self._step is None else self._step.parts,
            every=every,
            most=self._most,
            on_report=self._take,
        )

    def _take(self, report: BadStep) -> None:
        self.reports.append(report)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            told = [
                {"headline": each.headline(), **each.to_dict()} for each in self.reports
            ]  # the page shows the lines
            text = json.dumps(told, indent=1, default=str)
            replace_file(self._folder / "first_bad_operation.json", text)
        if self._on_report is not None:
            self._on_report(report)
