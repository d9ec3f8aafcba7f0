"""Say what is on a model: every hook, whose it is and where its code is, and where none would fire.

Users and ``hookline doctor`` call `doctor`, which returns a `Diagnosis`; the pytest fixture calls `hooks_by_module` and
`hooks_of_process`. They read torch's dictionaries and our own tables, and change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrize

from hookline.sites import _torch
from hookline.sites.find import attached, own_entries, places_in
from hookline.sites.hook_at_site import Attachment
from hookline.sites.module_hooks import Slot
from hookline.sites.parameters import LeafHook
from hookline.sites.receipt import cause_around
from hookline.sites.signature import hook_name
from hookline.sites.targets import check_model
from hookline.sites.wrappers import clean_modules, unwrap
from hookline.tables import Table

OURS: Final = "hookline"
UNKNOWN: Final = "unknown"
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
    """``hookline``, the package its code comes from (``torch``, ``accelerate``), or ``unknown``: your own."""
    where: str
    """File and line of its code, as far as they are known."""

    @property
    def place(self) -> str:
        """The site, in words."""
        return self.site or "(the model)"


def hooks_by_module(model: nn.Module) -> Iterator[tuple[nn.Module, list[FoundHook]]]:
    """Return each module of a model, and each part of attention, with its hooks, parents first; a shared one once."""
    for name, module in places_in(model):
        yield module, [*_own(name, module), *_foreign(name, module), *_replaced(name, module)]


def hooks_of_process() -> list[FoundHook]:
    """Return the hooks that are on no model in particular: of functions, operators, every module, every optimizer."""
    everywhere = [(kind.removesuffix("_hooks"), hook) for kind, hook in _torch.global_hooks() if not _is_ours(hook)]
    found = [_found("(every module)", kind, hook) for kind, hook in everywhere]
    attachments = [handle._attachment for handle in attached()]
    return found + [_of_ours("(the process)", attachment) for attachment in attachments]


def _found(site: str, kind: str, hook: Any) -> FoundHook:
    return FoundHook(site, kind, hook_name(hook), owner_of(hook), where_of(hook))


def _of_ours(site: str, attachment: Attachment) -> FoundHook:
    return FoundHook(site, attachment.kind.value, attachment.name, OURS, where_of(attachment.hook))


def owner_of(hook: Any) -> str:
    """Return whose code a hook is."""
    package = _home_of(hook).partition(".")[0]
    code = _code_of(hook)
    is_of_package = package in (OURS, "torch") or (code is not None and code.co_filename.startswith(_PACKAGES))
    return package if is_of_package else UNKNOWN


def where_of(hook: Any) -> str:
    """Return file and line of the code of a hook; of one that has none, the module of its class."""
    code = _code_of(hook)
    if code is None:
        return _home_of(hook)
    path = Path(code.co_filename)
    above = next((folder for folder in (*map(Path, _PACKAGES), Path.cwd()) if path.is_relative_to(folder)), None)
    return f"{path if above is None else path.relative_to(above)}:{code.co_firstlineno}"


def _own(name: str, module: nn.Module) -> Iterator[FoundHook]:
    """Return the hooks of ours on a module: one that sits on several of its parameters once."""
    for attachment in dict.fromkeys(entry.attachment for entry in own_entries(module)):
        yield _of_ours(name, attachment)


def _foreign(name: str, module: nn.Module) -> Iterator[FoundHook]:
    found = [
        (name, attribute.strip("_").removesuffix("_hooks"), hook)
        for attribute, _, hook in _torch.hooks_of(module)
        if not isinstance(hook, Slot)
    ]
    for key, parameter in module._parameters.items():
        if parameter is not None:
            site = f"{name}.{key}" if name else key
            leaf_hooks = [hook for hook in _torch.leaf_hooks_of(parameter) if not isinstance(hook, LeafHook)]
            found += [(site, "param_grad", hook) for hook in leaf_hooks]
            found += [(site, "tensor", hook) for hook in _torch.tensor_hooks_of(parameter)]
    for site, kind, hook in found:
        if not _is_ours(hook):
            yield _found(site, kind, hook)


def _replaced(name: str, module: nn.Module) -> Iterator[FoundHook]:
    """Return what stands in for a method of the module, and its parametrizations: no hooks, but they act like one."""
    own = vars(module).get("forward")
    # With compiled code about, our hooks put the module's own forward there, for torch's guards to see.
    if own is not None and not _is_ours(own) and getattr(own, "__func__", None) is not type(module).forward:
        yield _found(name, "forward replaced", getattr(module, "_hf_hook", own))  # where accelerate keeps its hook
    if parametrize.is_parametrized(module):
        for key in getattr(module, "parametrizations", {}):
            yield FoundHook(name, "parametrization", key, "torch", "torch.nn.utils.parametrize")


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
_CALL_KINDS: Final = ("forward", "forward_pre", "forward_post", "backward", "backward_pre", "full_backward")


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found; prints as text, ``to_dict()`` for programs."""

    model: str
    """The class of the model."""
    hooks: list[FoundHook]
    """Every hook on it, and those of the whole process."""
    silent: list[SilentSite]
    """Modules on which a hook does not fire, and why."""
    duplicates: list[tuple[FoundHook, int]]
    """The same hook at the same place several times, and how often."""
    unheard: list[tuple[FoundHook, str]]
    """Hooks that sit where none fires, and why."""

    @property
    def problems(self) -> list[str]:
        """What should be looked at, a sentence each."""
        found = [f"{hook.name} ({hook.kind}) on {hook.place} will not fire: {why}" for hook, why in self.unheard]
        found += [f"{hook.name} ({hook.kind}) is on {hook.place} {count} times" for hook, count in self.duplicates]
        return found

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
        if self.problems:
            parts.append(Table(title="Problems:", foot=[f"- {line}" for line in self.problems]))
        return parts

    def _headline(self) -> str:
        whose = Counter(hook.owner for hook in self.hooks)
        count = f"{len(self.hooks)} hook{'s' * (len(self.hooks) != 1)}"
        by = f" ({', '.join(f'{n} {owner}' for owner, n in whose.most_common())})" if whose else ""
        state = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}" if self.problems else "no problems"
        return f"{self.model}: {count}{by}; {state}"


def doctor(model: nn.Module) -> Diagnosis:
    """Examine the hooks of a model, and where hooks would not fire.

    Recipe: ``print(hookline.doctor(model))``.

    Nothing is called: modules that can never fire are found by the code around them.
    """
    check_model(model)
    on_model = [hook for _, hooks in hooks_by_module(model) for hook in hooks]
    hooks = [*on_model, *hooks_of_process()]
    silent = _silent_sites(model)
    reasons = {site.name: site.reason for site in silent}
    return Diagnosis(
        model=type(model).__name__,
        hooks=hooks,
        silent=silent,
        duplicates=[(hook, count) for hook, count in Counter(hooks).items() if count > 1],
        unheard=[(hook, reasons[hook.site]) for hook in hooks if hook.site in reasons and hook.kind in _CALL_KINDS],
    )


# -- sites that stay silent ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SilentSite:
    """A module that no forward calls, so that a hook on it does not fire."""

    name: str
    type: str
    reason: str


def _silent_sites(model: nn.Module) -> list[SilentSite]:
    """Return the modules that what is around them never calls."""
    root = unwrap(model)
    found = []
    for name, module in clean_modules(model):
        reason = _scripted(module) or cause_around(root, name, module)
        if reason is not None:
            found.append(SilentSite(name, type(module).__name__, reason))
    return found


def _scripted(module: nn.Module) -> str | None:
    """Return why a ScriptModule has no hooks; None for any other."""
    if not isinstance(module, torch.jit.ScriptModule):
        return None
    return "TorchScript does not run Python hooks; hook the module before it is scripted"
