"""Say what is on a model: every hook, whose it is and where its code is, where none would fire, what was left behind.

Users and ``hookline doctor`` call `doctor`, which returns a `Diagnosis`; the pytest fixture calls `hooks_on_model` and
`hooks_of_process`. They read torch's dictionaries and our own tables, and change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hookline.guard.guard import rollback
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.find import attached
from hookline.sites.handle import HookHandle
from hookline.sites.modules.module_hooks import Slot, existing_hooks
from hookline.sites.parameters import LeafHook, parameter_entries
from hookline.sites.receipt import cause_around
from hookline.sites.signature import hook_name
from hookline.sites.targets import check_model
from hookline.sites.wrappers import clean_modules, unwrap, walk
from hookline.tables import Table

__all__ = [
    "OURS", "UNKNOWN", "Diagnosis", "FoundHook", "HeldHandles", "SampleRun", "SilentSite", "doctor", "hooks_by_module",
    "hooks_of_process", "hooks_on_model", "notes_on", "silent_in_a_run", "silent_without_running",
]  # fmt: skip

OURS: Final = "hookline"
UNKNOWN: Final = "unknown"
_TORCH_PARTS: Final = {
    "torch.nn.utils.prune": "torch (pruning)",
    "torch.nn.utils.weight_norm": "torch (weight norm)",
    "torch.nn.utils.spectral_norm": "torch (spectral norm)",
    "torch.distributed.fsdp": "torch (FSDP)",
    "torch.distributed": "torch (distributed)",
    "torch.": "torch",
}
# Beside torch too: an environment may take its packages from another one.
_PACKAGES: Final = (
    *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
    str(Path(inspect.getfile(torch)).parent.parent),
)


@dataclass(frozen=True, slots=True)
class FoundHook:
    """A hook, and where it sits."""

    site: str
    """The module's name; empty: the model itself; ``(every module)`` for one of the whole process."""
    kind: str
    """``forward``, ``forward_pre``, …; ``forward replaced`` for an instance with a forward of its own."""
    name: str
    """The name of the function or class."""
    owner: str
    """``hookline``, ``torch (pruning)``, the package it comes from, or ``unknown``."""
    where: str
    """File and line of its code, as far as they are known."""
    has_handle: bool
    """Whether something still holds a handle by which it comes off."""

    @property
    def place(self) -> str:
        """The site, in words."""
        return self.site or "(the model)"


def hooks_on_model(model: nn.Module) -> list[FoundHook]:
    """Return every hook on the modules and parameters of a model, parents first."""
    held = HeldHandles()
    return [hook for _, hooks in hooks_by_module(model, held) for hook in hooks]


def hooks_by_module(model: nn.Module, held: HeldHandles) -> Iterator[tuple[nn.Module, list[FoundHook]]]:
    """Return each module of a model with its hooks, parents first; a shared one once."""
    seen: set[int] = set()
    for name, module, *_ in walk(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield module, [*_own(name, module, held), *_foreign(name, module, held), *_replaced(name, module)]


def hooks_of_process() -> list[FoundHook]:
    """Return the hooks that are on no model in particular: of functions, operators, every module, every optimizer."""
    held = HeldHandles()
    found = [
        FoundHook("(every module)", kind.removesuffix("_hooks"), hook_name(hook), owner_of(hook), where_of(hook), True)
        for kind, hook in _torch.global_hooks()
        if not _is_ours(hook)
    ]
    for handle in attached():
        hook = handle._attachment.hook
        kind = handle._attachment.kind.value
        found.append(
            FoundHook("(the process)", kind, handle.name, _our_owner(hook), where_of(hook), held.has_ours(handle))
        )
    return found


def owner_of(hook: Any) -> str:
    """Return whose code a hook is."""
    home = _home_of(hook)
    if _is_ours(hook):
        return OURS
    for prefix, owner in _TORCH_PARTS.items():
        if home.startswith(prefix):
            return owner
    code = _code_of(hook)
    if code is not None and code.co_filename.startswith(_PACKAGES):
        return home.partition(".")[0]
    return UNKNOWN


def where_of(hook: Any) -> str:
    """Return file and line of the code of a hook; of one that has none, the module of its class."""
    code = _code_of(hook)
    if code is None:
        return _home_of(hook)
    path = Path(code.co_filename)
    above = next((folder for folder in (*map(Path, _PACKAGES), Path.cwd()) if path.is_relative_to(folder)), None)
    return f"{path if above is None else path.relative_to(above)}:{code.co_firstlineno}"


def _own(name: str, module: nn.Module, held: HeldHandles) -> Iterator[FoundHook]:
    """Return the hooks of ours on a module: one that sits on several of its parameters once."""
    table = existing_hooks(module)
    entries = [] if table is None else list(table.entries())
    if table is not None and table.around is not None:
        entries += table.around.entries()
    entries += parameter_entries(module)
    for attachment in dict.fromkeys(entry.attachment for entry in entries):
        hook = attachment.hook
        has_handle = held.has_ours(HookHandle(attachment))
        yield FoundHook(name, attachment.kind.value, attachment.name, _our_owner(hook), where_of(hook), has_handle)


def _our_owner(hook: Any) -> str:
    """Return whose hook it is that was attached by hookline: a product of ours, or somebody's own function."""
    return OURS if _is_ours(hook) else f"{OURS}, for {owner_of(hook)}" if owner_of(hook) != UNKNOWN else OURS


def _foreign(name: str, module: nn.Module, held: HeldHandles) -> Iterator[FoundHook]:
    for attribute, hook_id, hook in _torch.hooks_of(module):
        if not isinstance(hook, Slot) and not _is_ours(hook):
            kind = attribute.strip("_").removesuffix("_hooks")
            has_handle = held.has_torchs(getattr(module, attribute), hook_id)
            yield FoundHook(name, kind, hook_name(hook), owner_of(hook), where_of(hook), has_handle)
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        hooks = [("param_grad", hook) for hook in _torch.leaf_hooks_of(parameter) if not isinstance(hook, LeafHook)]
        hooks += [("tensor", hook) for hook in _torch.tensor_hooks_of(parameter)]
        site = f"{name}.{key}" if name else key
        for kind, hook in hooks:
            if not _is_ours(hook):
                yield FoundHook(site, kind, hook_name(hook), owner_of(hook), where_of(hook), True)


def _replaced(name: str, module: nn.Module) -> Iterator[FoundHook]:
    """Return what stands in for a method of the module, and its parametrizations: no hooks, but they act like one."""
    own = vars(module).get("forward")
    # With compiled code about, our hooks put the module's own forward there, for torch's guards to see.
    if own is not None and not _is_ours(own) and getattr(own, "__func__", None) is not type(module).forward:
        hook = getattr(module, "_hf_hook", None)  # accelerate keeps its hook there, and replaces forward
        owner = "accelerate" if hook is not None else owner_of(own)
        yield FoundHook(name, "forward replaced", hook_name(hook or own), owner, where_of(hook or own), True)
    if parametrize.is_parametrized(module):
        for key in getattr(module, "parametrizations", {}):
            yield FoundHook(name, "parametrization", key, "torch (parametrization)", "torch.nn.utils.parametrize", True)


class HeldHandles:
    """The handles that are alive, found by walking all objects once (0.1 s for a million)."""

    def __init__(self) -> None:
        handles = [each for each in gc.get_objects() if issubclass(type(each), RemovableHandle)]
        self._ours = {id(each._attachment) for each in handles if isinstance(each, HookHandle)}
        torchs = [each for each in handles if not isinstance(each, HookHandle) and hasattr(each, "hooks_dict_ref")]
        self._torchs = {(id(each.hooks_dict_ref()), each.id) for each in torchs}

    def has_ours(self, handle: HookHandle) -> bool:
        return id(handle._attachment) in self._ours

    def has_torchs(self, hooks: Any, hook_id: int) -> bool:
        return (id(hooks), hook_id) in self._torchs


def _is_ours(hook: Any) -> bool:
    return _home_of(hook).partition(".")[0] == OURS


def _home_of(hook: Any) -> str:
    """Return the module of the code of a hook."""
    inner = _unpacked(hook)
    home = getattr(inner, "__module__", None)
    return str(home or type(inner).__module__)


def _code_of(hook: Any) -> CodeType | None:
    inner = _unpacked(hook)
    method: Any = type(inner).__call__ if callable(inner) else None
    code = getattr(inner, "__code__", None) or getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _unpacked(hook: Any) -> Any:
    """Return the function inside of partials, methods and decorators."""
    for _ in range(16):
        inner = getattr(hook, "func", None) if isinstance(hook, functools.partial) else getattr(hook, "__func__", None)
        inner = getattr(hook, "__wrapped__", None) if inner is None else inner
        if inner is None:
            return hook
        hook = inner
    return hook


# -- the diagnosis ----------------------------------------------------------------------------------------------------

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
    """Return the modules that what is around them never calls."""
    found = []
    root = unwrap(model)
    for name, module in clean_modules(model):
        reason = _scripted(module) or cause_around(root, name, module)
        if reason is not None:
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
