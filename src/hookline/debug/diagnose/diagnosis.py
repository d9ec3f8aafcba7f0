"""Say what is on a model: whose hooks, where none would fire, what was left behind, what it costs.

Users and ``hookline doctor`` call `doctor`, which returns a `Diagnosis`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn

from hookline.debug.diagnose.hook_owners import OURS, UNKNOWN, FoundHook, hooks_of_process, hooks_on_model
from hookline.debug.diagnose.silent_sites import (
    SampleRun,
    SilentSite,
    notes_on,
    silent_in_a_run,
    silent_without_running,
)
from hookline.sites.attach import attach
from hookline.sites.targets import check_model
from hookline.tables import Table

__all__ = ["Diagnosis", "doctor"]

_SHOWN: Final = 40
"""Rows of a table; all are in the attributes."""
_CALLS: Final = 200
_ROUNDS: Final = 5
_FORWARD_KINDS: Final = ("forward", "forward_pre", "forward_post")


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found; prints as text, ``to_dict()`` for programs."""

    model: str
    """The class of the model."""
    hooks: list[FoundHook]
    """Every hook on it, and those of the whole process."""
    silent: list[SilentSite]
    """Modules on which a hook does not fire, and why."""
    leaks: list[FoundHook]
    """Hooks of yours that nothing can take off any more: no handle is left."""
    duplicates: list[tuple[FoundHook, int]]
    """The same hook at the same place several times, and how often."""
    unheard: list[tuple[FoundHook, str]]
    """Hooks that sit where none fires, and why."""
    notes: list[str]
    """What else is worth knowing."""
    cost_us: float
    """Microseconds that calling these hooks adds to one forward, at least: what they do themselves comes on top."""
    forward_us: float | None
    """Microseconds of the sample forward; None without one."""
    error: str
    """What the sample forward raised; empty if nothing."""

    @property
    def problems(self) -> list[str]:
        """What should be looked at, a sentence each."""
        found = [f"{hook.name} ({hook.kind}) on {hook.place} will not fire: {why}" for hook, why in self.unheard]
        found += [f"{hook.name} ({hook.kind}) is on {hook.place} {count} times" for hook, count in self.duplicates]
        found += [
            f"{hook.name} ({hook.kind}) on {hook.place} has no handle left; hookline.attached(model) gives one"
            for hook in dict.fromkeys(self.leaks)
            if hook.owner == OURS
        ]
        return found + ([f"the sample forward raised {self.error}"] if self.error else [])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        plain["duplicates"] = [{**dataclasses.asdict(hook), "count": count} for hook, count in self.duplicates]
        plain["unheard"] = [{**dataclasses.asdict(hook), "reason": reason} for hook, reason in self.unheard]
        return {**plain, "problems": self.problems}

    def __str__(self) -> str:
        return "\n\n".join(table.text() for table in self._tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "\n".join(table.html() for table in self._tables())

    def _tables(self) -> list[Table]:
        parts = [Table(title=self._headline())]
        if self.hooks:
            rows = [(h.place, h.kind, h.name, h.owner, h.where) for h in self.hooks]
            parts.append(Table(("site", "hook", "name", "whose", "where"), rows, most=_SHOWN))
        if self.silent:
            sites = [(site.name or "(the model)", site.type, site.reason) for site in self.silent]
            parts.append(Table(("no hook fires on", "type", "why"), sites, most=_SHOWN))
        for title, lines in (("Problems:", self.problems), ("Notes:", self.notes)):
            if lines:
                parts.append(Table(title=title, foot=[f"- {line}" for line in lines]))
        return parts

    def _headline(self) -> str:
        whose = Counter(hook.owner for hook in self.hooks)
        count = f"{len(self.hooks)} hook{'s' * (len(self.hooks) != 1)}"
        by = f" ({', '.join(f'{n} {owner}' for owner, n in whose.most_common())})" if whose else ""
        state = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}" if self.problems else "no problems"
        return f"{self.model}: {count}{by}; {state}"

    def cost_text(self) -> str:
        """Return the estimate of the cost in words; it is measured, so it is not part of what is printed."""
        if not self.cost_us:
            return "no hook is called in a forward"
        share = f", {self.cost_us / self.forward_us:.1%} of the sample forward" if self.forward_us else ""
        return f"calling the hooks adds about {self.cost_us:.0f} µs to a forward{share}; what they do comes on top"


def doctor(model: nn.Module, inputs: Any = None) -> Diagnosis:
    """Examine the hooks of a model, and where hooks would not fire.

    Recipe::

        print(hookline.doctor(model))
        print(hookline.doctor(model, (input_ids, mask)).problems)

    Without ``inputs`` nothing is called: modules that can never fire are found by the code around them. With ``inputs``
    the model is called twice, without gradients, and put back to the bit; modules that were not called are listed too.

    Args:
        model: The model.
        inputs: Sample arguments: a tensor, a tuple of positional or a dict of keyword arguments.
    """
    check_model(model)
    hooks = [*hooks_on_model(model), *hooks_of_process()]
    run = None if inputs is None else silent_in_a_run(model, inputs)
    silent = silent_without_running(model) if run is None or run.error else run.silent
    reasons = {site.name: site.reason for site in silent}
    return Diagnosis(
        model=type(model).__name__,
        hooks=hooks,
        silent=silent,
        leaks=[hook for hook in hooks if not hook.has_handle and _is_yours(hook)],
        duplicates=[(hook, count) for hook, count in Counter(hooks).items() if count > 1],
        unheard=[(hook, reasons[hook.site]) for hook in hooks if hook.site in reasons and _is_forward(hook)],
        notes=[*notes_on(model), *_notes_on(hooks)],
        cost_us=_cost(hooks, run),
        forward_us=None if run is None or run.error else run.seconds * 1e6,
        error="" if run is None else run.error,
    )


def _is_yours(hook: FoundHook) -> bool:
    """Return whether somebody is expected to hold the handle: torch and other packages throw theirs away."""
    return hook.owner in (OURS, UNKNOWN)


def _notes_on(hooks: list[FoundHook]) -> list[str]:
    """Return what a model may do on purpose: it hooks itself when it is made, and keeps no handle."""
    kept = dict.fromkeys(hook for hook in hooks if not hook.has_handle and hook.owner == UNKNOWN)
    return [f"{hook.name} ({hook.kind}) on {hook.place}: nothing holds its handle; see {hook.where}" for hook in kept]


def _is_forward(hook: FoundHook) -> bool:
    return hook.kind in (*_FORWARD_KINDS, "backward", "backward_pre", "full_backward")


def _cost(hooks: list[FoundHook], run: SampleRun | None) -> float:
    """Return the microseconds of calling the hooks in one forward: what one costs here, times its calls."""
    called = [hook for hook in hooks if hook.kind in _FORWARD_KINDS]
    if not called:
        return 0.0
    calls = {hook.site: 1 if run is None else run.calls.get(hook.site, 0) for hook in called}
    own, foreign = _microseconds(ours=True), _microseconds(ours=False)
    return sum(calls[hook.site] * (own if hook.owner.startswith(OURS) else foreign) for hook in called)


def _microseconds(*, ours: bool) -> float:
    """Return what one hook that does nothing adds to a call, the least of five measurements."""

    def nothing(module: nn.Module, args: Any, output: Any) -> None:
        pass

    probe, x = nn.Identity(), torch.ones(())
    plain = _least(probe, x)
    handle = attach(probe, nothing) if ours else probe.register_forward_hook(nothing)
    with handle:
        return max(0.0, _least(probe, x) - plain)


def _least(probe: nn.Module, x: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = perf_counter()
        for _ in range(_CALLS):
            probe(x)
        best = min(best, (perf_counter() - began) / _CALLS * 1e6)
    return best
