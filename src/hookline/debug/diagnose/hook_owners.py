"""List every hook on a model, whose it is, and where its code is.

`doctor` and the pytest fixture call `hooks_on_model` and `hooks_of_process`; they read torch's dictionaries and our own
tables, and change nothing.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hookline.sites import _torch
from hookline.sites.find import attached
from hookline.sites.handle import HookHandle
from hookline.sites.modules.module_hooks import Slot, existing_hooks
from hookline.sites.parameters import LeafHook, parameter_entries
from hookline.sites.signature import hook_name
from hookline.sites.wrappers import walk

__all__ = ["OURS", "UNKNOWN", "FoundHook", "HeldHandles", "hooks_by_module", "hooks_of_process", "hooks_on_model"]

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
