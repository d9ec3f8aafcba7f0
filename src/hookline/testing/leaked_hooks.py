"""Compare the hooks of a process at two moments; the fixture ``no_leaked_hooks`` calls `HookLedger`."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from hookline.debug.diagnose.doctor import FoundHook, hooks_by_module, hooks_of_process
from hookline.errors import HooksLeftError
from hookline.messages import counted


class HookLedger:
    """The hooks that there were when it was made; `check` raises for those that came since."""

    def __init__(self) -> None:
        self._before = _hooks()
        self._models: list[nn.Module] = []

    def look_at(self, model: nn.Module) -> nn.Module:
        """Keep a model alive until `check`, and return it: one that a test drops takes its hooks with it."""
        self._models.append(model)
        return model

    def check(self) -> None:
        """Raise `HooksLeftError` for hooks that were not there before, with their places and their code."""
        now = _hooks()
        self._models.clear()
        left = [found for key, hooks in now.items() for found in hooks[len(self._before.get(key, ())) :]]
        if left:
            shown = "; ".join(f"{hook.name} ({hook.kind}) on {hook.place}, from {hook.where}" for hook in left[:8])
            more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
            are = f"{counted(len(left), 'hook')} {'is' if len(left) == 1 else 'are'}"
            remedy = "Call .remove() of its handle, or attach in a with block"
            raise HooksLeftError(f"{are} left: {shown}{more}. {remedy}.")


def _hooks() -> dict[tuple[object, ...], list[FoundHook]]:
    """Return every hook of the process, by the module it is on: what the module is part of may change."""
    gc.collect()  # models that nobody holds any more are in cycles
    found: dict[tuple[object, ...], list[FoundHook]] = defaultdict(list)
    for hook in hooks_of_process():
        found[0, hook.site, hook.kind, hook.name, hook.where].append(hook)
    seen: set[int] = set()
    for model in _models():
        for module, hooks in hooks_by_module(model):
            for hook in () if id(module) in seen else hooks:
                found[id(module), hook.kind, hook.name, hook.where].append(hook)
            seen.add(id(module))
    return found


def _models() -> Iterator[nn.Module]:
    """Return every module that is alive and not inside of another."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    yield from (module for module in modules if id(module) not in inner)
