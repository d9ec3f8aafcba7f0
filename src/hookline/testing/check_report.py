"""Hold what `check_hook` found out about a hook, and word it: what was asked, what was found, what to do next.

The checks fill a `HookCheck` with these sentences; the author of the hook gets it as a table or as an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import HookCheckError
from hookline.guard.digest import digest
from hookline.lifecycle.hook import InterventionHook, TrainingHook

if TYPE_CHECKING:
    from hookline.testing.small_run import SmallRun

__all__ = ["PASSED", "Finding", "HookCheck", "differs", "hooks_left", "never_fired", "not_inert", "raised", "unsteady"]

PASSED: Final = {
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


def raised(check: str, run: SmallRun, error: Exception, *, ours: bool) -> str:
    """Return the sentence for a check in which the hook raised."""
    found = f"{type(error).__name__}: {error}".rstrip(".")
    after = "" if ours else f" Next: {_NEXT[check]}."
    return f"{_ASKED[check]}; in the {run.loop} loop it raised {found}.{after}"


def differs(check: str, run: SmallRun, changed: Sequence[str], wanted: Sequence[Any], found: Sequence[Any]) -> str:
    """Return the sentence for metrics that are not those of the run that it is compared with."""
    pairs = [(one, other) for one, other in zip(wanted, found, strict=False) if digest(one) != digest(other)]
    if pairs:
        (*_, at, _, one), (*_, other) = pairs[0]
        values = f"{_first(changed)} at {run.loop} {at} is {_short(other)}, and should be {_short(one)}"
    else:
        values = f"{_first(changed)} came {len(found)} times, and should have come {len(wanted)} times"
    more = f" ({len(changed) - 1} more differ)" if len(changed) > 1 else ""
    return f"{_ASKED[check]}; in the {run.loop} loop {values}{more}. Next: {_NEXT[check]}."


def not_inert(hook: TrainingHook, run: SmallRun, changed: Sequence[str]) -> str:
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


def hooks_left(run: SmallRun, error: Exception) -> str:
    """Return the sentence for hooks that are still attached."""
    first = str(error).splitlines()[0].rstrip(".")
    return (
        f"When a run is over, the model is as it was; after the {run.loop} loop hooks are still on it ({first}). Next: "
        "keep the handles of start(), and remove them in finish()."
    )


def never_fired(steps: int) -> str:
    """Return the sentence for a hook that did not fire."""
    return (
        f"The hook is due at least once in a run of {steps} steps or more, and it was not. Next: pass arguments by "
        "which its schedule begins earlier, or check_hook(…, num_steps=…) for longer runs."
    )


def unsteady(names: Sequence[str]) -> str:
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
