"""Run a step several times from one state and compare the bits: does it repeat, and where does it first not?

Users call `replay_check`. It saves the run by a `Guard`, runs the step operator by operator, and keeps a digest
of each result. The order of operators is the order of calls, backward and optimizer included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.debug.first_bad.find_bad_operations import join_optimizers, list_optimizers
from hookline.debug.first_bad.operator_run import UNFILLED, OperatorPlace, OperatorPlaces, operator_name
from hookline.errors import OptionError
from hookline.guard.digest import SWITCH, digest, run_digest
from hookline.guard.guard import Guard
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, roots_of
from hookline.phases import in_phase
from hookline.sites import _torch
from hookline.sites.optimizers import unwrap_optimizer
from hookline.sites.targets import check_model
from hookline.tables import ShownAsTable, Table

__all__ = ["Replay", "replay_check"]


def replay_check(
    step_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: Any = None,
    *args: Any,
    times: int = 3,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
) -> Replay:
    """Run a step several times from one state, and compare the bits of everything that it computes.

    Recipe::

        print(hookline.debug.replay_check(train_step, model, optimizer, batch))

    Afterwards the run is as it was before, random streams included. A step that does not repeat draws from a stream
    that nobody saved, uses operators that add up in any order, or runs on a machine that computes wrong.

    Args:
        step_fn: ``step_fn(*args)`` makes one step.
        model: The model.
        optimizer: What trains it; a list of all optimizers where there are several.
        args: What the step is called with: the batch.
        times: How often it is run, 2 or more.
        scheduler: The scheduler, if the step moves it.
        scaler: The ``GradScaler``, if there is one.
        loader: The loader, if the step reads from it.
    """
    check_model(model, None)
    if not isinstance(times, int) or times < 2:
        raise OptionError(f"times= is how often the step is run, 2 or more; got {times!r}.")
    optimizers = [unwrap_optimizer(each) for each in list_optimizers(optimizer)]
    parts = (model, join_optimizers(optimizer), scheduler, scaler)
    guard = Guard(*parts, loader=loader)
    snapshot = Snapshot(roots_of(*parts, loader))
    snapshot.take(batch=args)
    guard.save(["trains"], batch=args)
    runs: list[list[_Mark]] = []
    try:
        with in_phase("intervention"), guard.protecting("replay check"):
            random = RandomStates()
            for _ in range(times):
                snapshot.go_back("A step that was run again")
                random.restore()
                runs.append(_run_again(step_fn, args, model, optimizers))
    finally:
        guard.release()
    return _compare(runs)


class _Mark(NamedTuple):
    """One result of a run: where it was made, and a digest of its bits."""

    operator: str
    place: OperatorPlace | None
    bits: bytes


@dataclass(frozen=True)
class Replay(ShownAsTable):
    """What came of running a step several times; true if all runs were equal."""

    times: int
    """How often the step was run."""
    compared: int
    """How many results of each run were compared."""
    equal: bool
    """Whether all runs had the same bits everywhere."""
    operator: str = ""
    """The first operator whose result differs; ``"weight 0.weight"`` of what the step leaves behind."""
    where: str = ""
    """Where it is: ``"forward of 'layers.3'"``."""
    source: str = ""
    """The line of code that called it."""
    number: int = -1
    """How many results before it were equal."""
    run: int = -1
    """The first run that differs from run 0."""

    def __bool__(self) -> bool:
        return self.equal

    def _table(self) -> Table:
        if self.equal:
            return Table(title=f"{self.times} runs of the step are equal, bit for bit, in {self.compared} results")
        article = "" if self.where == "outside of the model" else "in the "
        at = f", {article}{self.where}" if self.where else ""
        title = f"run {self.run} of {self.times} differs from run 0 first at {self.operator}{at}"
        foot = (f"{self.number} results before it are equal", *((f"at {self.source}",) if self.source else ()))
        return Table(title=title, foot=foot)


def _run_again(step_fn: Callable[..., Any], args: Any, model: nn.Module, optimizers: list[Any]) -> list[_Mark]:
    """Run the step eagerly; return its marks in the order of calls, then those of what it leaves behind."""
    recorder = _BitRecorder(model)
    with torch.compiler.set_stance("force_eager"), recorder:
        result = step_fn(*args)
    return [*recorder.marks, *_left_behind(result, model, optimizers)]


def _left_behind(result: Any, model: nn.Module, optimizers: list[Any]) -> list[_Mark]:
    """Return the digests of the result and of the run; random streams are those of the run, which are put back."""
    left = run_digest([model], [each for each in optimizers if isinstance(each, Optimizer)])
    marks = [_Mark(name, None, bits) for name, bits in left.items() if not name.startswith(("random stream", SWITCH))]
    return [_Mark("the result of the step", None, digest(result)), *marks]


def _compare(runs: list[list[_Mark]]) -> Replay:
    first = runs[0]
    found: tuple[int, int] | None = None
    for number, run in enumerate(runs[1:], 1):
        same = zip(first, run, strict=False)
        at = next((i for i, (a, b) in enumerate(same) if (a.operator, a.bits) != (b.operator, b.bits)), None)
        if at is None and len(run) != len(first):
            at = min(len(run), len(first))
        if at is not None and (found is None or at < found[0]):
            found = at, number
    if found is None:
        return Replay(len(runs), len(first), equal=True)
    at, number = found
    mark = (first if at < len(first) else runs[number])[at]
    place = mark.place
    where = "" if place is None else place.where + (f" of {place.module!r}" if place.module else "")
    source = "" if place is None else place.source
    return Replay(len(runs), len(first), False, mark.operator, where, source, at, number)


class _BitRecorder(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep a digest of every result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = OperatorPlaces(model, _run_again.__code__)
        self.marks: list[_Mark] = []

    def __enter__(self) -> Any:
        self._places.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._places.__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._places.of_operator(str(func))
        result = func(*args, **(kwargs or {}))
        if operator_name(func) not in UNFILLED:
            for tensor in result if isinstance(result, list | tuple) else (result,):
                if isinstance(tensor, Tensor):
                    self.marks.append(_Mark(str(func), place, digest(tensor)))
        return result
