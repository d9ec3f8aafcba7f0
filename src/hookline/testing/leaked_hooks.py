"""Compare the hooks of a process at two moments; the fixture ``no_leaked_hooks`` calls `HookLedger`."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

from torch import nn

from hookline.debug.diagnose.hook_owners import FoundHook, hooks_of_process, hooks_on_model
from hookline.errors import HooksLeftError

__all__ = ["HookLedger"]


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
        left = _hooks() - self._before
        self._models.clear()
        if left:
            lines = [f"{hook.name} ({hook.kind}) on {hook.place}, from {hook.where}" for _, hook in left]
            shown = "; ".join(lines[:8])
            raise HooksLeftError(
                f"{sum(left.values())} hooks are left: {shown}. Remove them, or attach in a with block."
            )


def _hooks() -> Counter[tuple[int, FoundHook]]:
    """Return every hook of the process, with the model it is on."""
    gc.collect()  # models that nobody holds any more are in cycles
    found = Counter((0, hook) for hook in hooks_of_process())
    for model in _models():
        found.update((id(model), hook) for hook in hooks_on_model(model))
    return found


def _models() -> Iterator[nn.Module]:
    """Return every module that is alive and not inside of another."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    yield from (module for module in modules if id(module) not in inner)
