"""Run a step several times from one state and compare the bits: does it repeat, and where does it first not?

Users call `replay_check`. Every run is inside of a `rollback` and leaves a digest of each result of its operators
(`OperatorRun`); their order is the order of calls, backward and optimizer included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from hookline.debug.first_bad.find_bad_operations import join_optimizers, list_optimizers, only_steps_of
from hookline.debug.first_bad.operator_run import UNFILLED, OperatorPlace, OperatorRun, operator_name, tensors_in
from hookline.errors import OptionError
from hookline.guard.digest import SWITCH, digest, run_digest
from hookline.guard.guard import rollback
from hookline.phases import in_phase
from hookline.sites.optimizers import unwrap_optimizer
from hookline.sites.targets import check_model
from hookline.tables import ShownAsTable, Table


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
    that nobody saved, uses operators that add up in any order, or runs on a machine that computes wrong. Compiled
    code is run eagerly.

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
    parts = (model, join_optimizers(optimizer), scheduler, scaler)
    optimizers = [unwrap_optimizer(each) for each in list_optimizers(optimizer)]
    runs: list[list[_Result]] = []
    with in_phase("intervention"), only_steps_of(list_optimizers(optimizer)):
        for _ in range(times):
            with rollback(*parts, loader=loader, batch=args):
                runs.append(_run(step_fn, args, model, optimizers))
    return _compare(runs)


class _Result(NamedTuple):
    """One result of a run: what made it and where, and a digest of its bits."""

    made_by: str
    place: OperatorPlace
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
        article = "" if self.where.startswith("outside") else "in the "
        at = f", {article}{self.where}" if self.where else ""
        title = f"run {self.run} of {self.times} differs from run 0 first at {self.operator}{at}"
        foot = (f"{self.number} results before it are equal", *((f"at {self.source}",) if self.source else ()))
        return Table(title=title, foot=foot)


def _run(step_fn: Callable[..., Any], args: Any, model: nn.Module, optimizers: list[Any]) -> list[_Result]:
    """Run the step eagerly; return its results in the order of calls, then what it leaves behind."""
    run = _ResultRun(model, _run.__code__)
    with torch.compiler.set_stance("force_eager"), run:
        returned = step_fn(*args)
    left = {"the result of the step": digest(returned), **run_digest([model], optimizers)}
    # The streams and switches are those of the run, which gets them back.
    kept = {name: bits for name, bits in left.items() if not name.startswith(("random stream", SWITCH))}
    return [*run.results, *(_Result(name, OperatorPlace("", None), bits) for name, bits in kept.items())]


class _ResultRun(OperatorRun):  # type: ignore[no-untyped-call]
    """Keep a digest of every result."""

    def __init__(self, model: nn.Module, run_by: Any) -> None:
        super().__init__(model, run_by)
        self.results: list[_Result] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._place_of(str(func))
        result = func(*args, **(kwargs or {}))
        if operator_name(func) not in UNFILLED:
            self.results += [_Result(str(func), place, digest(tensor)) for tensor in tensors_in(result)]
        return result

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:  # a forward may have begun in another thread before
            self._running.pop()


def _compare(runs: list[list[_Result]]) -> Replay:
    """Return where a run first differs from the first one; of several, the one that differs earliest."""
    first, found = runs[0], []
    for number, run in enumerate(runs[1:], 1):
        for at, (one, other) in enumerate(zip_longest(first, run)):
            if one is None or other is None or (one.made_by, one.bits) != (other.made_by, other.bits):
                found.append((at, number, one or other))
                break
    if not found:
        return Replay(len(runs), len(first), equal=True)
    at, number, result = min(found, key=lambda each: each[:2])
    place = result.place
    where = place.where + (f" of {place.module!r}" if place.module else "")
    return Replay(len(runs), len(first), False, result.made_by, where, place.source, at, number)
