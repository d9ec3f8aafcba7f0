"""Find the first bad operation of a run: check every step, and run a bad one again at operator level.

Users call `find_bad_operations`, or use `FirstBadOperation` as a lifecycle hook. Both tell a `BadOperationFinder` when
steps begin and end, which listens to the statistics of the model's modules, goes back by `KeptSteps`, and looks by
`OperatorRun`; a guard puts the run back. Steps of a loop that nobody hands over are followed by `FollowedSteps`.

The state in which steps began is kept cheaply: a snapshot every so many steps, batch and random streams of each. To go
back to a step, the snapshot before it is restored and the steps in between are run again: they are the same steps, so
the state is the same, bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline.debug.first_bad.bad_operation import BadOperation, BadStep, describe_batch
from hookline.debug.first_bad.operator_run import OperatorRun
from hookline.distributed.ranks import is_distributed
from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.guard.guard import Guard, TorchSwitches
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, roots_of
from hookline.lifecycle.hook import MetricInfo, TrainingHook
from hookline.observe.watch.monitor import StepRows, listen
from hookline.phases import in_phase, known_phase, phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.sites.targets import check_model
from hookline.tables import OFF, ON, ShownAsTable, Table
from hookline.training.experiment import MicroBatches
from hookline.tree import leaves
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.lifecycle.context import RunDataContext
    from hookline.sites.hook_at_site import Site
    from hookline.training.run import RunStep


def find_bad_operations(
    model: nn.Module,
    optimizer: Any = None,
    *,
    step_fn: Callable[[Any], Any] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    target: Target = "*",
    every: int = 16,
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
    and the run goes on. Reports are logged (logger ``hookline.debug.first_bad``) and kept in ``check.reports``; ten bad
    steps are run again, and more are counted.

    Without ``step_fn`` write your loop as it is, and give the optimizer: its step ends a step. Forward and backward of
    the model are run again, on what it was given and the gradients that came back; the loss and the optimizer are not.

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
        every: How many steps one snapshot of the run serves; the steps since are run again to get to a later one. Only
            with ``step_fn``, else every step has its own.
    """
    check_model(model, target)
    if every < 1:
        raise OptionError(f"every= is a number of steps, at least 1; got {every!r}.")
    optimizers = list_optimizers(optimizer)
    if step_fn is None:
        if not optimizers:
            raise OptionError("Nothing says when a step is over: give step_fn=, or the optimizer.")
        followed = FollowedSteps(model, scaler, target=target)
        try:
            return BadOperations(followed.finder, followed=followed, optimizer=unwrap_optimizer(optimizers[-1]))
        except BaseException:
            followed.remove()
            raise
    parts = (model, join_optimizers(optimizer), scheduler, scaler, loader)

    def run_again(batch: Any) -> Any:
        with only_steps_of(optimizers):
            return step_fn(batch)

    return BadOperations(BadOperationFinder(model, lambda: parts, run_again, target=target, every=every), step_fn)


class BadOperations(ShownAsTable):
    """The bad steps that one `find_bad_operations` has found; prints as a table.

    Recipe: ``check = hookline.debug.find_bad_operations(model, optimizer, step_fn=train_step)``; then
    ``check.step(batch)``, ``print(check)``, ``check.reports``. Comes off by ``check.remove()``, or at the end of a
    ``with`` block.
    """

    def __init__(
        self,
        finder: BadOperationFinder,
        step_fn: Callable[[Any], Any] | None = None,
        followed: FollowedSteps | None = None,
        optimizer: Any = None,
    ) -> None:
        self._finder = finder
        self._step_fn = step_fn
        self._followed = followed
        self._removed = False
        self._handle: Any = None
        if followed is not None:
            self._handle = attach_optimizer(optimizer, self._end_step, on="step_post", name="first bad operation")

    @property
    def reports(self) -> list[BadStep]:
        """What was found, the first first."""
        return self._finder.reports

    @property
    def bad_steps(self) -> int:
        """The number of steps that had something that was not finite."""
        return self._finder.bad_steps

    @property
    def scaled_steps(self) -> int:
        """The number of steps with overflows in gradients alone, which the scaler skips."""
        return self._finder.scaled_steps

    def step(self, batch: Any) -> Any:
        """Make a step by ``step_fn(batch)``, and check it; return what that returned."""
        if self._step_fn is None or self._removed:
            raise OptionError("check.step(batch) calls step_fn(batch), which was not given, or the check is off.")
        self._finder.begin_step(batch, lambda operator: describe_batch(batch))
        result = self._step_fn(batch)
        self._finder.end_step(result)
        return result

    def _end_step(self, *args: Any) -> None:
        if self._followed is not None and phase() != "intervention":
            self._followed.end_step()

    def flush(self) -> None:
        """Wait for the numbers of all steps, and judge them."""
        self._finder.flush()

    def remove(self) -> None:
        """Take all hooks off; what was found stays."""
        if self._removed:
            return
        self._removed = True
        if self._handle is not None:
            self._handle.remove(quiet=True)
        (self._followed or self._finder).remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if exc_info[0] is None and not self._removed:
                self.flush()
        finally:
            self.remove()

    def _table(self) -> Table:
        steps = self._finder.steps
        if not self.bad_steps:
            return Table(title=f"{steps} steps, all finite")
        title = f"{self.bad_steps} of {steps} steps had numbers that were not finite"
        return Table(title=title, foot=[str(report) for report in self.reports])

    def _state(self) -> str:
        return OFF if self._removed else ON


# -- all optimizers of a run ------------------------------------------------------------------------------------------


class _JoinedOptimizers:
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
    """Return one object for what was given: an optimizer as it is, several as `_JoinedOptimizers`."""
    found = list_optimizers(optimizer)
    return _JoinedOptimizers(found) if len(found) > 1 else found[0] if found else None


@contextmanager
def only_steps_of(optimizers: list[Any]) -> Iterator[None]:
    """Refuse the step of any other optimizer, before it changes something that nobody puts back."""
    given = [each for one in optimizers for each in (one, unwrap_optimizer(one))]

    def check(optimizer: Any, *args: Any) -> None:
        if not any(optimizer is each for each in given):
            told = f"{type(optimizer).__name__} was not given, so nothing would put it back"
            raise OptionError(f"{told}: give all optimizers of the step, optimizer=[first, second]")

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


# -- the lifecycle hook -----------------------------------------------------------------------------------------------


class FirstBadOperation(TrainingHook):
    """Find the operator that made the first NaN or infinity of a run.

    Recipe: ``HookManager(hooks=[hookline.debug.FirstBadOperation()])``; ``hookline run EXPERIMENT --hooks
    first_bad_operation``.

    Reports are logged (logger ``hookline.debug.first_bad``), kept in ``reports``, and written to
    ``first_bad_operation.json`` in the folder of the run, if it has one, where the page of the run finds them.

    Args:
        every: How many steps one snapshot of the run serves, in the loops of hookline.
    """

    name = "first_bad_operation"
    description = "check every module; name the operator that made the first NaN or infinity"
    hook_points = frozenset({HookPoint.POST_STEP})
    wraps_steps = True
    pure = True
    debug = True
    reduce = "max"

    def __init__(self, *, every: int = 16) -> None:
        self._every = every
        self._folder: Path | None = None
        self._finder: BadOperationFinder | None = None
        self._followed: FollowedSteps | None = None
        self._model: nn.Module | None = None
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
        self._followed = FollowedSteps(model, on_report=self._take)
        self._finder = self._followed.finder

    def finish(self) -> None:
        """Judge the last steps, and take everything off."""
        if self._finder is not None:
            self._finder.flush()
            (self._followed or self._finder).remove()
        self._finder = self._followed = None

    def reset(self) -> None:
        """Forget the last run."""
        self.reports, self._told = [], 0

    def around_step(self, step: RunStep, batch: Any) -> Any:
        """Make a step, and check it."""
        if self._model is None or self._finder is None:
            return step(batch)
        run = step.run
        if self._followed is not None:  # the loop is ours: whole steps can be made again
            self._followed.remove()
            self._followed = None
            self._finder = BadOperationFinder(
                self._model,
                lambda: step.parts,
                lambda batch: step.repeat(batch).loss,
                every=self._every,
                save_attributes=run.guarded.save_attributes,
                on_report=self._take,
            )
        tell = partial(describe_batch, batch, run.batch_idx, run.epoch)
        self._finder.begin_step(batch, lambda operator: tell(), number=run.step)
        result = step(batch)
        self._finder.end_step(result.loss)
        return result

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """End a step of a loop that is only followed; return how many steps were bad when that has changed."""
        if self._followed is not None:
            self._followed.end_step(ctx.raw("loss"), ctx.batch_data)
            if self.manager is not None:
                # `hookline run -- python train.py` begins in the middle of a step, whose forward was not seen here.
                finder = self._followed.finder
                finder.steps = max(finder.steps, self.manager.global_step + 1)
        if self.bad_steps == self._told:
            return None
        self._told = self.bad_steps
        return {"bad_steps": self.bad_steps, "reports": len(self.reports)}

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric."""
        return [
            MetricInfo("bad_steps", "steps so far in which something was not finite"),
            MetricInfo("reports", "of these, how many were run again, operator by operator"),
        ]

    def _take(self, report: BadStep) -> None:
        self.reports.append(report)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            told = [
                {"headline": each.headline(), **each.to_dict()} for each in self.reports
            ]  # the page shows the lines
            text = json.dumps(told, indent=1, default=str)
            replace_file(self._folder / "first_bad_operation.json", text)


# -- a loop that is followed ------------------------------------------------------------------------------------------


_NO_LOSS: Final = (
    "forward and backward of the model were run again, from what it was given and the gradients that came back; the "
    "loss and the optimizer were not: to have them too, give step_fn="
)


@dataclass(slots=True)
class KeptForward:
    """One forward of the model; a step that accumulates gradients has several."""

    args: Any
    kwargs: Any
    switches: TorchSwitches
    """Those that the forward ran under, autocast among them."""
    batch: Any = None
    """The batch of it, if the loop tells that."""
    backwards: list[dict[str, Tensor | None]] = field(default_factory=list)
    """For each backward pass, the gradients that came back, by the leaves of the output."""
    begins_at: int = 0
    """How many operators the second run had made when it came to this."""


class FollowedSteps:
    """Begin steps at forwards of the model, check them by a `BadOperationFinder`, and run the model's part again.

    Args:
        model: The model.
        options: As for the finder.
    """

    def __init__(self, model: nn.Module, scaler: Any = None, **options: Any) -> None:
        self._model = model
        # A second run changes the model alone.
        parts = (model, None, None, scaler, None)
        self.finder = BadOperationFinder(model, lambda: parts, self._run_again, every=1, **options)
        self.finder.note = _NO_LOSS
        self._current: dict[int, KeptForward] | None = None
        """The forwards of the step, by the number that the site has of each."""
        self._handles = HandleSet()
        add = partial(attach, model, observe=True, name="first bad operation")
        self._handles.add(add(self._begin_forward, on="forward_pre", with_kwargs=True))
        self._handles.add(add(self._take_gradients, on="backward_pre"))

    def end_step(self, loss: Any = None, batch: Any = None) -> None:
        """End the step, if one has begun; ``batch`` is that of the step, if it becomes known only now."""
        forwards, self._current = self._current, None
        if forwards is None:
            return
        batches = batch if isinstance(batch, MicroBatches) else [batch]
        for forward, each in zip(forwards.values(), batches, strict=False):
            forward.batch = each
        self.finder.end_step(loss)

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)
        self._current = None
        self.finder.remove()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        is_training = self._model.training and torch.is_grad_enabled() and known_phase() in (None, "train")
        if not is_training or _torch.in_recomputation():
            return
        if self._current is None:
            self._current = {}
            self.finder.begin_step(self._current, partial(_describe, self._current))
        self._current[site.step] = KeptForward(args, kwargs, TorchSwitches())

    def _take_gradients(self, module: nn.Module, grads: Any, *, site: Site) -> None:
        if self._current is not None and site.step in self._current and phase() != "intervention":
            self._current[site.step].backwards.append(dict(zip(site.outputs, grads, strict=False)))

    def _run_again(self, forwards: dict[int, KeptForward]) -> list[Tensor]:
        """Run forwards and backwards in turns, as a loop that accumulates makes them; return what the model returns."""
        self._model.train()
        ends: list[Tensor] = []
        outside = TorchSwitches()
        for forward in forwards.values():
            forward.begins_at = self.finder.operators_run
            forward.switches.restore()
            output = self._model(*forward.args, **forward.kwargs)
            outside.restore()
            made = {str(path): leaf for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad}
            for number, grads in enumerate(forward.backwards, 1):
                given = {path: grad for path, grad in grads.items() if grad is not None and path in made}
                if given:
                    is_last = number == len(forward.backwards)
                    outputs = [made[path] for path in given]
                    torch.autograd.backward(outputs, [*given.values()], retain_graph=not is_last)
            ends += made.values()
        return ends


def _describe(forwards: dict[int, KeptForward], operator: int | None) -> str:
    """Return the batches of a step in words, or the one in which the operator of that number ran."""
    kept = list(forwards.values())
    told = [describe_batch((each.args or (each.kwargs,)) if each.batch is None else each.batch) for each in kept]
    if operator is None or len(kept) == 1:
        return "; ".join(told)
    place = sum(each.begins_at <= operator for each in kept)
    return f"{told[place - 1]}, micro-batch {place} of {len(kept)}"


# -- going back, and looking ------------------------------------------------------------------------------------------


logger = logging.getLogger("hookline.debug.first_bad")

RunParts = tuple[Any, Any, Any, Any, Any]
"""What a guard saves: model, optimizer, scheduler, scaler, loader."""
SaveAttributes = Callable[[], Callable[[], None]]
"""Saves the plain attributes of an experiment; returns what puts them back."""

_MOST: Final = 10
"""How many bad steps are run again; later ones are counted."""
_OTHER_RANKS: Final = (
    "there are other ranks, which would have to run the step again too; run this rank's batch in a separate process"
)
_NOT_KEPT: Final = "the beginning of the step is not kept any more"
_OUTSIDE: Final = (
    "the steps since the last copy of the run were made again and ended elsewhere, so something outside was changed: "
    "data that the step fetches itself, a counter, an optimizer that was not given"
)
_EAGER: Final = "the model is compiled; the second run was eager, operator by operator, so its rounding may differ"


# -- how steps began --------------------------------------------------------------------------------------------------

_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MARKED: Final = 4096
"""So many numbers of a tensor on a CPU are looked at."""
_ROUNDING: Final = 1e-3
"""Up to this relative difference of norms a step that is not deterministic has repeated."""


class StateMarks:
    """The norms of parameters and buffers at one moment; taken without waiting for a device."""

    __slots__ = ("_norms",)

    def __init__(self, model: nn.Module) -> None:
        held = [{**module._parameters, **module._buffers}.values() for module in model.modules()]
        found = [_torch.local_tensor(tensor) for some in held for tensor in some if tensor is not None]
        read = [each for each in found if each is not None and each.dtype in _TYPES and each.layout is torch.strided]
        # Another step shows at the beginning of a tensor too; on a GPU, to cut it costs more than to read it.
        read = [each.view(-1)[:_MARKED] if each.is_cpu and each.is_contiguous() else each for each in read]
        short = [each for each in read if each.dtype.itemsize == 2]
        long = [each for each in read if each.dtype.itemsize > 2]  # no wider: a CPU takes five times as long
        with torch.no_grad():  # few launches for all of them
            self._norms = [
                *(_torch.norms_of_all(long, 2) if long else ()),
                *(_torch.norms_of_all(short, 2, dtype=torch.float32) if short else ()),
            ]

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
