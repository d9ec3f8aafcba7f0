"""Know all optimizers of a run: join those that were given, and notice the steps of others.

`find_bad_operations` and `replay_check` save and put back what they are given. An optimizer that nobody gave would keep
what a second run does to it, so `OtherOptimizers` tells when there is one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from hookline.errors import OptionError
from hookline.guard.snapshot import first_names
from hookline.phases import phase
from hookline.sites.modules.attach_everywhere import attach_everywhere
from hookline.sites.optimizers import unwrap_optimizer

__all__ = ["JoinedOptimizers", "OtherOptimizers", "join_optimizers", "list_optimizers"]

logger = logging.getLogger("hookline.debug.first_bad")

_NEXT: Final = "Next: give all optimizers of the step, optimizer=[first, second]"


class JoinedOptimizers:
    """Hold several optimizers as one object, which a guard looks through."""

    def __init__(self, given: list[Any]) -> None:
        self.optimizers = [unwrap_optimizer(each) for each in given]
        # Wrappers that are no optimizers themselves are saved by their attributes.
        self.wrappers = [vars(each) for each in given if not isinstance(each, Optimizer) and hasattr(each, "__dict__")]


def list_optimizers(optimizer: Any) -> list[Any]:
    """Return what was given for ``optimizer=`` as a list; refuse a list with nothing in it, or with None."""
    if not isinstance(optimizer, list | tuple):
        return [] if optimizer is None else [optimizer]
    if not optimizer or any(not hasattr(each, "__dict__") for each in optimizer):
        raise OptionError(f"optimizer= is an optimizer, or a list of all that the step uses; got {optimizer!r}.")
    return list(optimizer)


def join_optimizers(optimizer: Any) -> Any:
    """Return one object for what was given: an optimizer as it is, several as `JoinedOptimizers`."""
    found = list_optimizers(optimizer)
    return JoinedOptimizers(found) if len(found) > 1 else found[0] if found else None


class OtherOptimizers:
    """Notice when an optimizer that was not given trains the model; a hook on all optimizers of the process."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._given = [inner for each in list_optimizers(optimizer) for inner in _inside(each)]
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(self._given)
        self.note = ""
        """Which parameters another optimizer trains, and what to do; empty while there is none."""
        self._handle = attach_everywhere(self._see_step, on="step_post", name="first bad operation")

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove(quiet=True)

    def _see_step(self, optimizer: Any, *args: Any) -> None:
        if optimizer in self._known or phase() == "intervention":
            return
        self._known.add(optimizer)
        owned = {id(parameter) for each in self._given for parameter in _parameters(each)}
        others = [id(parameter) for parameter in _parameters(optimizer) if id(parameter) not in owned]
        names = [self._names[each] for each in others if each in self._names]
        if names and not self.note:
            self.note = (
                f"{type(optimizer).__name__} trains {first_names(names)} and was not given: a second run would change "
                f"its state for good. {_NEXT}"
            )
            logger.warning("Bad steps are found, but not run again: %s", self.note)


def _inside(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer without wrappers, and those that an object of the user's own holds, also in a list."""
    inner = unwrap_optimizer(optimizer)
    if isinstance(inner, Optimizer):
        yield inner
    for value in vars(inner).values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (each for each in held if isinstance(each, Optimizer))


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]
