"""Say what is on a model: whose hooks, where none would fire, what was left behind.

Users and ``hookline doctor`` call `doctor`, which returns a `Diagnosis`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from hookline.debug.diagnose.hook_owners import OURS, UNKNOWN, FoundHook, hooks_of_process, hooks_on_model
from hookline.guard.guard import rollback
from hookline.sites.attach import attach
from hookline.sites.receipt import calls_child, cause_around, is_container
from hookline.sites.targets import check_model
from hookline.sites.wrappers import clean_modules, unwrap
from hookline.tables import Table

__all__ = ["Diagnosis", "SampleRun", "SilentSite", "doctor", "notes_on", "silent_in_a_run", "silent_without_running"]

_SHOWN: Final = 40
"""Rows of a table; all are in the attributes."""
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


def doctor(model: nn.Module, inputs: Any = None) -> Diagnosis:
    """Examine the hooks of a model, and where hooks would not fire.

    Recipe::

        print(hookline.doctor(model))
        print(hookline.doctor(model, (input_ids, mask)).problems)

    Without ``inputs`` nothing is called: modules that can never fire are found by the code around them. With ``inputs``
    the model is called once, without gradients, and put back to the bit; modules that were not called are listed too.

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


# -- sites that stay silent ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SilentSite:
    """A module on which a hook does not fire."""

    name: str
    type: str
    reason: str
    is_certain: bool
    """Whether no forward calls it; False: the sample forward did not."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """What one forward with sample inputs showed."""

    silent: list[SilentSite]
    error: str
    """What the forward raised; empty if nothing."""


def silent_without_running(model: nn.Module) -> list[SilentSite]:
    """Return the modules that the code around them never calls, as far as its source tells."""
    found = []
    root = unwrap(model)
    for name, module in clean_modules(model):
        reason = _scripted(module) or cause_around(root, name, module)
        # A parent that calls the module and reads its weights as well (a tied embedding) is no cause.
        if reason is not None and (is_container(module) or _scripted(module) or not calls_child(root, name)):
            found.append(SilentSite(name, type(module).__name__, reason, True))
    return found


def silent_in_a_run(model: nn.Module, inputs: Any) -> SampleRun:
    """Call the model with ``inputs`` and return which modules were not called; the model is as before, to the bit."""
    args, kwargs = _arguments(inputs)
    names = [name for name, module in clean_modules(model) if _scripted(module) is None]
    calls = dict.fromkeys(names, 0)
    error = ""

    def count(module: nn.Module, given: Any, *, site: Any) -> None:
        calls[site.name] = calls.get(site.name, 0) + 1

    with rollback(model), torch.no_grad():
        handle = attach(model, lambda name, module: name in calls, count, on="forward_pre", observe=True, name="doctor")
        try:
            model(*args, **kwargs)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            handle.remove(quiet=True)
    sure = {site.name: site for site in silent_without_running(model)}
    silent = [
        sure.get(name) or SilentSite(name, type(module).__name__, _reason(model, name, module), False)
        for name, module in clean_modules(model)
        if name in sure or not calls.get(name)
    ]
    return SampleRun([] if error else silent, error)


def _reason(model: nn.Module, name: str, module: nn.Module) -> str:
    return cause_around(unwrap(model), name, module) or "the sample forward did not call it"


def notes_on(model: nn.Module) -> list[str]:
    """Return what else is worth knowing before hooks are put on."""
    notes = []
    for name, module in clean_modules(model):
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            notes.append(
                f"{name or '(the model)'}: in eval mode without gradients it runs fused code; a hook on one of its "
                "children switches that off, and hooks that torch runs for every module do not see them"
            )
    if type(model).__name__ == "DistributedDataParallel":
        notes.append("(the model): DistributedDataParallel reduces gradients by hooks in C++, which no list has")
    return notes


def _scripted(module: nn.Module) -> str | None:
    """Return why a ScriptModule has no hooks; None for any other."""
    if not isinstance(module, torch.jit.ScriptModule):
        return None
    return "TorchScript does not run Python hooks; hook the module before it is scripted"


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: of a tuple, a mapping, or one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
