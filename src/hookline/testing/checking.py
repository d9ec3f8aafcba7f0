"""Check whether a hook keeps the promises of hooks, by training with it, many times, on a small model.

Authors of hooks call `check_hook` in their tests and get a `HookCheck`. Every check is a run that must come out as
another run did: with the hook and without it, in one piece and saved in the middle, alone and among other hooks.
"""

from __future__ import annotations

import copy
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hookline import checkpoint_file
from hookline.errors import HookCheckError, HooklineError, HooksLeftError
from hookline.guard.digest import changed, digest
from hookline.lifecycle.hook import InterventionHook, MetricInfo, TrainingHook
from hookline.lifecycle.registry import HookRegistry, make_hook
from hookline.lifecycle.registry import check_hook as check_registered
from hookline.messages import type_name
from hookline.sites.find import assert_no_hooks
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
from hookline.when import HookPoint, validate_points

__all__ = ["Finding", "HookCheck", "check_hook"]

_PASSED: Final = {
    "state": "saved in the middle and loaded elsewhere, it goes on with the same metrics",
    "reset": "used again for another run, it gives the same metrics",
    "order": "its metrics do not depend on other hooks",
    "offload": "its tensors may wait elsewhere between firings",
}
_ASKED: Final = {
    "state": "A run that is saved and goes on in another process gives the metrics of one that was not",
    "reset": "A second run with the same hook gives the metrics of the first",
    "order": "Metrics are the same whichever hooks run before and after",
    "offload": "Metrics are the same when state tensors wait elsewhere between firings, and come back as other objects",
    "runs": "The hook runs",
}
_NEXT: Final = {
    "state": "hand out in state_dict(), or get_state_tensors(), all that is kept between firings, and take it back",
    "reset": "forget in reset() whatever was kept",
    "order": "draw random numbers from a generator of its own, and keep nothing where other hooks can reach it",
    "offload": "read state tensors anew at every firing, and take back in set_state_tensors() all that was handed out",
    "runs": "let it work on the models and at the points that it declares, or return None where it cannot",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold one promise of hooks that a hook does not keep.

    Recipe: ``[finding.check for finding in report.findings]``.
    """

    check: str
    """Which check: ``"inert"``, ``"state"``, …"""
    text: str
    """What was asked, what was found, what to do next."""


@dataclass(repr=False)
class HookCheck:
    """Hold what came of checking a hook; prints as a table.

    Recipe: ``print(hookline.testing.check_hook(MyHook))``.
    """

    hook: str
    """Its name."""
    passed: dict[str, str] = field(default_factory=dict)
    """The checks that found nothing, and what they did."""
    findings: list[Finding] = field(default_factory=list)
    """What was found."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The checks that could not be made, and why."""
    notes: list[str] = field(default_factory=list)
    """What is no fault, but worth knowing."""
    metrics: tuple[str, ...] = ()
    """The metrics that it returned, without its name."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_if_any(self) -> None:
        """Raise all findings at once, as one error."""
        if self.findings:
            number = f"{len(self.findings)} finding" + ("s" if len(self.findings) > 1 else "")
            lines = [f"  {finding.check}: {finding.text}" for finding in self.findings]
            raise HookCheckError("\n".join([f"Hook {self.hook!r} has {number}.", *lines]))

    def __repr__(self) -> str:
        rows = [("ok", check, text) for check, text in self.passed.items()]
        rows += [("found", finding.check, finding.text) for finding in self.findings]
        rows += [("skipped", check, text) for check, text in self.skipped.items()]
        rows += [("note", "", text) for text in self.notes]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"{state.ljust(widths[0])}  {check.ljust(widths[1])}  {text}" for state, check, text in rows]
        return "\n".join([f"hook {self.hook!r}, metrics: {', '.join(self.metrics) or 'none'}", *lines])


# -- sentences -------------------------------------------------------------------------------------------------


def _say_raised(check: str, run: SmallRun, error: Exception, *, ours: bool) -> str:
    """Return the sentence for a check in which the hook raised."""
    found = f"{type(error).__name__}: {error}".rstrip(".")
    after = "" if ours else f" Next: {_NEXT[check]}."
    return f"{_ASKED[check]}; in the {run.loop} loop it raised {found}.{after}"


def _say_differs(check: str, run: SmallRun, changed: Sequence[str], wanted: Sequence[Any], found: Sequence[Any]) -> str:
    """Return the sentence for metrics that are not those of the run that it is compared with."""
    pairs = [(one, other) for one, other in zip(wanted, found, strict=False) if digest(one) != digest(other)]
    if pairs:
        (*_, at, _, one), (*_, other) = pairs[0]
        values = f"{_first(changed)} at {run.loop} {at} is {_short(other)}, and should be {_short(one)}"
    else:
        values = f"{_first(changed)} came {len(found)} times, and should have come {len(wanted)} times"
    more = f" ({len(changed) - 1} more differ)" if len(changed) > 1 else ""
    return f"{_ASKED[check]}; in the {run.loop} loop {values}{more}. Next: {_NEXT[check]}."


def _say_not_inert(hook: TrainingHook, run: SmallRun, changed: Sequence[str]) -> str:
    """Return the sentence for a run that is another one with the hook."""
    streams = all(name.startswith("random stream") for name in changed)
    if hook.pure and any(name.startswith("random stream") for name in changed):
        after = "it promises pure = True and draws random numbers: take that out, or draw from a generator of its own"
    elif all(name.startswith("mode of") for name in changed):
        after = "put the mode of the model back, or leave it alone"
    elif isinstance(hook, InterventionHook) or streams:
        after = "find out who else holds what it changes; interventions are undone, start() and finish() are not"
    else:
        after = "work on copies, or make it an InterventionHook: whatever that does is undone"
    return (
        f"The run is the same with the hook and without, to the last bit; after {run.length} in the {run.loop} loop "
        f"{_some(changed)} differ. Next: {after}."
    )


def _say_hooks_left(run: SmallRun, error: Exception) -> str:
    """Return the sentence for hooks that are still attached."""
    first = str(error).splitlines()[0].rstrip(".")
    return (
        f"When a run is over, the model is as it was; after the {run.loop} loop hooks are still on it ({first}). Next: "
        "keep the handles of start(), and remove them in finish()."
    )


def _say_never_fired(steps: int) -> str:
    """Return the sentence for a hook that did not fire."""
    return (
        f"The hook is due at least once in a run of {steps} steps or more, and it was not. Next: pass arguments by "
        "which its schedule begins earlier, or check_hook(…, num_steps=…) for longer runs."
    )


def _say_unsteady(names: Sequence[str]) -> str:
    """Return the note about metrics that differ between equal runs, which is no fault: times do."""
    return f"{_some(names)} differ from one run to the next that is the same (times? NumPy's random numbers?)."


def _first(names: Sequence[str]) -> str:
    return repr(names[0])


def _short(value: Any) -> str:
    text = repr(list(value)) if isinstance(value, list) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(repr, names[:4])) + more


# -- what a hook declares ---------------------------------------------------------------------------------------------

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def _check_declaration(hook: TrainingHook, report: HookCheck) -> bool:
    """Add what is wrong with a declaration to the report; return whether the hook can be run."""
    before = len(report.findings)
    try:
        check_registered(hook)
    except HooklineError as error:
        report.findings.append(Finding("signature", str(error)))
    report.findings += [Finding("signature", text) for text in _shadowed(hook)]
    if not isinstance(hook.name, str) or not hook.name or "/" in hook.name or hook.name != hook.name.strip():
        report.findings.append(
            Finding(
                "name",
                f"Metrics are reported as 'name/metric', and the name is {hook.name!r}. Next: give it a name without "
                "slashes and without blanks around it.",
            )
        )
    report.findings += [Finding("points", text) for text in _wrong_points(hook)]
    if len(report.findings) == before:
        report.passed["points"] = "it declares when it is due"
    return len(report.findings) == before


def _shadowed(hook: TrainingHook) -> list[str]:
    methods = [name for name, value in vars(TrainingHook).items() if callable(value) and not name.startswith("_")]
    return [
        f"{name!r} is a method of hooks, and here it is {getattr(hook, name)!r}. Next: call that something else."
        for name in methods
        if not callable(getattr(hook, name))
    ]


def _wrong_points(hook: TrainingHook) -> list[str]:
    by_loop: Any = hook.loop_points
    if by_loop is not None and not isinstance(by_loop, Mapping):
        return [f"loop_points is a dictionary with 'epoch' and 'step'; got {by_loop!r}. Next: make it one."]
    texts = [
        f"loop_points has an entry for {loop!r}, and the loops are 'epoch' and 'step'. Next: name it so."
        for loop in by_loop or ()
        if loop not in ("epoch", "step")
    ]
    for points in [hook.hook_points, *(by_loop or {}).values()]:
        try:
            validate_points(points or ())
        except (HooklineError, TypeError) as error:
            texts.append(f"{error} Next: take points of HookPoint.")
    if not texts and not any(map(bool, [hook.hook_points, *(by_loop or {}).values()])):
        texts.append("It has no point, so it never fires. Next: hook_points = {HookPoint.POST_EPOCH}, say.")
    return texts


def _check_names(hook: TrainingHook, metrics: Iterable[str], report: HookCheck) -> None:
    """Add what is wrong with the names and descriptions of metrics to the report."""
    texts = [text for name in metrics for text in _wrong(hook.name, name)]
    report.findings += [Finding("names", text) for text in texts]
    if not texts:
        report.passed["names"] = "metrics have plain names"
    described = _description(hook, list(metrics))
    report.findings += [Finding("described", text) for text in described]
    if not described:
        report.passed["described"] = "describe_metrics() tells what each metric means"


def _wrong(hook: str, name: str) -> list[str]:
    if name.startswith(f"{hook}/"):
        short = name.removeprefix(f"{hook}/") or "value"
        return [
            f"A metric is reported as 'hook/metric', and {name!r} would read {f'{hook}/{name}'!r}. Next: return it as "
            f"{short!r}."
        ]
    if name != name.strip() or not name.isprintable() or "//" in name or name.startswith("/") or name.endswith("/"):
        return [
            f"Names of metrics are words with single slashes between, and {name!r} is not. Next: leave blanks, "
            "control characters and empty parts out."
        ]
    return []


def _description(hook: TrainingHook, metrics: list[str]) -> list[str]:
    infos = list(hook.describe_metrics() or ())
    strangers = [info for info in infos if not isinstance(info, MetricInfo)]
    if strangers:
        return [f"describe_metrics() gives a list of MetricInfo, and {strangers[0]!r} is none. Next: make it one."]
    patterns = [_pattern(info.name) for info in infos]
    missing = [name for name in metrics if not any(pattern.fullmatch(name) for pattern in patterns)]
    if not missing:
        return []
    return [
        f"describe_metrics() tells what each metric means, and says nothing of {', '.join(map(repr, missing[:5]))}"
        f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}. Next: return [MetricInfo({missing[0]!r}, "
        "'what it measures'), …] there; 'norm/{layer}' stands for all of that kind."
    ]


def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for a name with places in braces."""
    return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))), re.DOTALL)


# -- the runs ---------------------------------------------------------------------------------------------------------

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
        if _check_declaration(checker.make(), report):
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
            self._find("fires", _say_never_fired(self._steps))
        self.report.metrics = tuple(self._seen)
        if self._seen:
            _check_names(self.make(), self._seen, self.report)
        found = {finding.check for finding in self.report.findings}
        for check in found:
            self.report.passed.pop(check, None)

    # -- single checks ---------------------------------------------------------------------------------------

    def _check_inert(self, run: SmallRun, alone: Outcome) -> None:
        plain = run.whole(None)
        # Weights first: a name that every author knows, of all that differs at the end of a run.
        names = sorted(changed(plain.left, alone.left), key=lambda name: not name.startswith("weight "))
        if names:
            self._find("inert", _say_not_inert(self.make(), run, names))
        else:
            self._pass("inert", run, "the run is the same without it")
        try:
            assert_no_hooks(alone.model, foreign=True)
        except HooksLeftError as error:
            self._find("inert", _say_hooks_left(run, error))

    def _steady(self, run: SmallRun, alone: Outcome) -> dict[str, list[Any]]:
        """Return the metrics that the same run gives twice; others cannot be compared."""
        again = run.whole(self._trial()).metrics
        unsteady = _differing(alone.metrics, again)
        if unsteady:
            note = _say_unsteady(unsteady)
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
            self._find(check, _say_differs(check, run, names, wanted[names[0]], found.get(names[0], [])))
        else:
            self._pass(check, run, _PASSED[check])

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
            self._find(check, _say_raised(check, run, error, ours=isinstance(error, HooklineError)))
            return None

    def _find(self, check: str, text: str) -> None:
        self.report.findings.append(Finding(check, text))

    def _pass(self, check: str, run: SmallRun, text: str) -> None:
        """Note a check that found nothing, in one loop or in both."""
        loops = "both loops" if check in self.report.passed else f"the {run.loop} loop"
        self.report.passed[check] = f"{text}, in {loops}"
