"""Find the modules of a model on which no hook would fire, and why.

`doctor` calls `silent_without_running`, which reads the source around modules, or `silent_in_a_run`, which calls the
model with sample inputs, takes everything back, and asks which modules were called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hookline.guard.guard import rollback
from hookline.sites.attach import attach
from hookline.sites.receipt import calls_child, cause_around, is_container
from hookline.sites.wrappers import clean_modules, unwrap

__all__ = ["SampleRun", "SilentSite", "notes_on", "silent_in_a_run", "silent_without_running"]


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
    calls: dict[str, int]
    """How often each module was called."""
    seconds: float
    """How long a second forward took, without hooks of the doctor."""
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
    error, seconds = "", 0.0

    def count(module: nn.Module, given: Any, *, site: Any) -> None:
        calls[site.name] = calls.get(site.name, 0) + 1

    with rollback(model), torch.no_grad():
        handle = attach(model, lambda name, module: name in calls, count, on="forward_pre", observe=True, name="doctor")
        try:
            model(*args, **kwargs)
            handle.remove(quiet=True)
            began = perf_counter()
            model(*args, **kwargs)
            seconds = perf_counter() - began
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
    return SampleRun([] if error else silent, calls, seconds, error)


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
