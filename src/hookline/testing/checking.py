"""Check whether a hook keeps the promises of hooks, by training with it, many times, on a small model.

Authors of hooks call `check_hook` in their tests and get a `HookCheck`. Every check is a run that must come out as
another run did: with the hook and without it, in one piece and saved in the middle, alone and among other hooks.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hookline import checkpoint_file
from hookline.errors import HookCheckError, HooklineError, HooksLeftError
from hookline.guard.digest import changed, digest
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.lifecycle.registry import HookRegistry, make_hook
from hookline.messages import type_name
from hookline.sites.find import assert_no_hooks
from hookline.testing import check_report as words
from hookline.testing.check_report import Finding, HookCheck
from hookline.testing.declared_checks import check_declaration, check_names
from hookline.testing.small_run import (
    DrawingHook,
    Outcome,
    ReplacingHook,
    SmallRun,
    StirringHook,
    Trial,
    kept_streams,
    small_experiment,
)
from hookline.training.experiment import Experiment
from hookline.when import HookPoint

__all__ = ["check_hook"]

LOOPS: Final = {"epoch": frozenset(HookPoint), "step": frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT})}
"""The points that each loop fires."""


def check_hook(
    hook: Any,
    *,
    make_experiment: Callable[[], Experiment] = small_experiment,
    num_steps: int = 24,
    raises: bool = True,
    **options: Any,
) -> HookCheck:
    """Check whether a hook keeps the promises of hooks.

    Recipe::

        def test_my_hook():
            hookline.testing.check_hook(MyHook, window=5)

    It is trained with, in both loops where it takes part, for a second or two. Asked is that the run is the same with
    the hook and without, to the last bit; that it has valid points and fires; that its metrics are the same when the
    run is saved in the middle and goes on elsewhere, when it is reset, when other hooks run before or after it, and
    when its tensors wait elsewhere; and that its metrics have good names, which ``describe_metrics`` explains.

    Args:
        hook: A class, an object (which is copied for every run), or a name of `HookRegistry`.
        make_experiment: What makes the experiment to train, always the same one: it has to seed random streams itself.
        num_steps: How many steps the runs have at least; more for a hook whose schedule begins late.
        raises: Whether findings are raised, all in one error, or just returned.
        options: Arguments of the hook.
    """
    make = _maker(hook, options)
    with kept_streams():
        checker = _Checker(make, make_experiment, num_steps)
        report = checker.report
        if check_declaration(checker.make(), report):
            for loop in LOOPS:
                checker.check_in(loop)
            checker.conclude()
    if raises:
        report.raise_if_any()
    return report


def _maker(hook: Any, options: dict[str, Any]) -> Callable[[], TrainingHook]:
    """Return what makes the hook anew for every run."""
    if isinstance(hook, str):
        hook = HookRegistry.get(hook)
    if isinstance(hook, type) and issubclass(hook, TrainingHook):
        return lambda: make_hook(hook, options)
    if isinstance(hook, TrainingHook) and not options:
        return lambda: copy.deepcopy(hook)
    raise HookCheckError(
        f"check_hook() takes a class derived from TrainingHook and its arguments, or an object; got {type_name(hook)}"
        f"{' and ' + ', '.join(options) if options else ''}."
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics that are not the same to the last bit."""
    first, second = ({name: digest(value) for name, value in metrics.items()} for metrics in (one, other))
    return changed(first, second)


class _Checker:
    """Check one hook, run after run."""

    def __init__(self, make: Callable[[], TrainingHook], experiment: Callable[[], Experiment], steps: int) -> None:
        self._make = make
        self._experiment = experiment
        self._steps = steps
        self.report = HookCheck(self.make().name)
        self._seen: dict[str, list[Any]] = {}
        self._fired = False
        self._has_run = False

    def make(self) -> TrainingHook:
        """Return the hook, new; one that begins with random numbers begins with the same."""
        with kept_streams():  # of a run that is under way
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            return self._make()

    def _trial(self, **around: Any) -> Trial:
        hook = self.make()
        reference = None
        if hook.needs_reference_weights:
            with kept_streams():
                model = self._experiment().model
            reference = {name: value.detach() * 1.1 + 0.01 for name, value in model.named_parameters()}
        return Trial(hook, reference=reference, **around)

    def check_in(self, loop: str) -> None:
        """Make all checks in one of the loops."""
        trial = self._trial()
        trial.manager.plan.use_loop(loop)
        if not trial.manager.plan.points or trial.manager.plan.will_not_fire(LOOPS[loop]):
            self.report.skipped[f"{loop} loop"] = "it takes no part there"
            return
        run = SmallRun(loop, self._experiment, self._steps)
        alone = self._attempt("runs", run, lambda: run.whole(trial))
        if alone is None:
            return
        self._has_run = True
        self._fired = self._fired or trial.fired > 0
        self.report.notes += [text for text in alone.warned if text not in self.report.notes]
        self._seen = {**self._seen, **alone.metrics}
        self._check_inert(run, alone)
        steady = self._steady(run, alone)
        for check, act in self._variations(run, trial).items():
            self._compare(check, run, steady, act)
        # With the same object for both parts: a loader that is left and begun again may shuffle otherwise.
        parts = self._attempt("state", run, lambda: run.in_two(self._trial(), lambda first: first))
        if parts is not None:
            unbroken = {name: values for name, values in parts.metrics.items() if name in steady}
            self._compare("state", run, unbroken, lambda: run.in_two(self._trial(), self._resumed))

    def conclude(self) -> None:
        """Make the checks that need both loops, and drop what another loop found wrong from what passed."""
        if self._has_run and not self._fired:
            self._find("fires", words.never_fired(self._steps))
        self.report.metrics = tuple(self._seen)
        if self._seen:
            check_names(self.make(), self._seen, self.report)
        found = {finding.check for finding in self.report.findings}
        for check in found:
            self.report.passed.pop(check, None)

    # -- single checks ---------------------------------------------------------------------------------------

    def _check_inert(self, run: SmallRun, alone: Outcome) -> None:
        plain = run.whole(None)
        # Weights first: a name that every author knows, of all that differs at the end of a run.
        names = sorted(changed(plain.left, alone.left), key=lambda name: not name.startswith("weight "))
        if names:
            self._find("inert", words.not_inert(self.make(), run, names))
        else:
            self._pass("inert", run, "the run is the same without it")
        try:
            assert_no_hooks(alone.model, foreign=True)
        except HooksLeftError as error:
            self._find("inert", words.hooks_left(run, error))

    def _steady(self, run: SmallRun, alone: Outcome) -> dict[str, list[Any]]:
        """Return the metrics that the same run gives twice; others cannot be compared."""
        again = run.whole(self._trial()).metrics
        unsteady = _differing(alone.metrics, again)
        if unsteady:
            note = words.unsteady(unsteady)
            self.report.notes += [note] if note not in self.report.notes else []
        return {name: values for name, values in alone.metrics.items() if name not in unsteady}

    def _variations(self, run: SmallRun, used: Trial) -> dict[str, Callable[[], Outcome]]:
        """Return runs in which its metrics have to be the same."""
        neighbours: dict[str, list[TrainingHook]] = {"before": [StirringHook()]}
        if not isinstance(used.hook, InterventionHook):
            # What an intervention trains goes through dropout, which draws from the stream that all hooks share.
            neighbours = {"before": [StirringHook(), DrawingHook("before")], "after": [DrawingHook("after")]}
        return {
            "reset": lambda: self._used_again(run, used),
            "order": lambda: run.whole(self._trial(**neighbours)),
            "offload": lambda: run.whole(self._with_replaced_tensors()),
        }

    def _compare(self, check: str, run: SmallRun, wanted: dict[str, list[Any]], act: Callable[[], Outcome]) -> None:
        outcome = self._attempt(check, run, act)
        if outcome is None:
            return
        found = {name: values for name, values in outcome.metrics.items() if name in wanted}
        names = _differing(wanted, found)
        if names:
            self._find(check, words.differs(check, run, names, wanted[names[0]], found.get(names[0], [])))
        else:
            self._pass(check, run, words.PASSED[check])

    def _resumed(self, first: Trial) -> Trial:
        """Return the hook in another manager, from a file."""
        state = first.manager.state_dict()
        name = first.hook.name
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "hook.pt"
            checkpoint_file.write(path, {"hook": state["hooks"][name]})
            state["hooks"] = {name: checkpoint_file.read(path)["hook"]}
        second = self._trial()
        second.manager.load_state_dict(state)
        return second

    @staticmethod
    def _used_again(run: SmallRun, used: Trial) -> Outcome:
        used.forget()
        return run.whole(used)

    def _with_replaced_tensors(self) -> Trial:
        trial = self._trial(after=[ReplacingHook()])
        trial.manager.hooks[ReplacingHook.name].target = trial.hook  # type: ignore[attr-defined]
        return trial

    # -- the report ------------------------------------------------------------------------------------------

    def _attempt(self, check: str, run: SmallRun, act: Callable[[], Outcome]) -> Outcome | None:
        try:
            return act()
        except Exception as error:
            self._find(check, words.raised(check, run, error, ours=isinstance(error, HooklineError)))
            return None

    def _find(self, check: str, text: str) -> None:
        self.report.findings.append(Finding(check, text))

    def _pass(self, check: str, run: SmallRun, text: str) -> None:
        """Note a check that found nothing, in one loop or in both."""
        loops = "both loops" if check in self.report.passed else f"the {run.loop} loop"
        self.report.passed[check] = f"{text}, in {loops}"
