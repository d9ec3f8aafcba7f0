"""Wait for the first step of an optimizer in this process, and find the model that it trains.

``sitecustomize`` of ``script_start`` and the callback for Fabric use it, where nobody says what is trained: the first
optimizer that makes a step tells; the model is found among all modules that are alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hookline.errors import NoMatchError
from hookline.integrations.loop_events import BackwardLosses, LoaderPass, follow_passes
from hookline.phases import phase
from hookline.sites.optimizers import unwrap_optimizer

_MOST_LOSSES: Final = 1000
"""How many are kept until the first step: in a process that makes none, they would be kept for ever."""


class FirstStep:
    """Call a function at the first step of an optimizer, before it changes any weight.

    Recipe::

        def begin(optimizer, first):
            first.hand_over(hookline.follow(model, optimizer, ["norms"], loader=first.loader))
            return True  # False: wait for another optimizer; this one is not asked about again


        FirstStep(begin)

    Args:
        begin: Called with the optimizer and this object; returns whether the wait is over.
        at_batch: Called with this object when a ``DataLoader`` gives a batch, before the loop gets it, for those who
            can tell the optimizer before it makes a step; returns whether the wait is over.
    """

    def __init__(
        self,
        begin: Callable[[Any, FirstStep], bool],
        at_batch: Callable[[FirstStep], bool] = lambda first: False,
    ) -> None:
        self._begin = begin
        self._at_batch = at_batch
        self._is_over = False
        self._latest: LoaderPass | None = None
        self._others: WeakSet[Any] = WeakSet()  # looking for the model of one takes longer than most steps
        self._handle = register_optimizer_step_pre_hook(self._take_step)
        self._stop_passes = follow_passes(DataLoader, self)
        self._losses = BackwardLosses(most=_MOST_LOSSES)

    @property
    def loader(self) -> Any:
        """The ``DataLoader`` whose batch was taken last, in a pass that is not over; None if there is none."""
        return None if self._latest is None or self._latest.is_over else self._latest.loader

    def hand_over(self, run: Any) -> None:
        """Give a `Follow` what was noted: the losses, and the pass over its loader that is under way."""
        run.take_over(self._latest, self._losses)

    def remove(self) -> None:
        """Wait no more; may be called again."""
        self._is_over = True
        self._handle.remove()
        self._stop_noting()

    def _stop_noting(self) -> None:
        self._stop_passes()
        self._losses.remove()
        self._latest = None

    def take_batch(self, each: LoaderPass) -> None:
        """Remember the pass, and ask whether the wait is over."""
        if self._is_over:
            return
        self._latest = each
        if phase() != "intervention" and self._at_batch(self):
            self.remove()
            each.listener.take_batch(each)  # the one who has begun gets this batch

    def end_pass(self, each: LoaderPass) -> None:
        """Wait on: the pass knows that it is over."""

    def _take_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over or phase() == "intervention":
            return
        if optimizer not in self._others:
            self._is_over = self._begin(optimizer, self)
        if self._is_over:  # the hook stays until `remove`: torch, which goes through such hooks now, fails if one goes
            self._stop_noting()
        else:
            self._others.add(optimizer)
            self._losses.forget()  # those were its own


# -- what it trains -----------------------------------------------------------------------------------------


class FoundModel(NamedTuple):
    """A model, and how many of the optimizer's parameters it has."""

    model: nn.Module
    owned: int
    of: int


def find_model(optimizer: Any, modules: Iterable[nn.Module] | None = None) -> FoundModel:
    """Return the module that has the parameters of ``optimizer``.

    Recipe: ``find_model(optimizer).model``.

    Of the modules that have all of them, those with the fewest trained parameters are left, so that a module which
    holds two networks does not stand for one of them; of these the outermost is taken, which may be a wrapper. If none
    has all, the one that has the most counts, if that is more than half.

    Args:
        optimizer: Its parameters are looked for.
        modules: Where; every module that the garbage collector knows, if left out.

    Raises:
        NoMatchError: if no module has more than half of the parameters; the text says what was found.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    candidates = [_candidate(module, wanted) for module in (_live_modules() if modules is None else modules)]
    most = max((owned for _, owned, _ in candidates), default=0)
    if 2 * most <= len(wanted):
        raise NoMatchError(
            f"No module has the parameters of this {type(optimizer).__name__}: of {len(wanted)}, the best of "
            f"{len(candidates)} modules has {most}. Next: call hookline.follow(model, optimizer) in the script."
        )
    fewest = min(trained for _, owned, trained in candidates if owned == most)
    equal = [module for module, owned, trained in candidates if owned == most and trained == fewest]
    return FoundModel(_outermost(equal), most, len(wanted))


def find_optimizers(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the optimizers that are alive and train one of ``modules``, without wrappers."""
    from torch.optim import Optimizer

    found: dict[int, Any] = {}
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer) and "param_groups" in vars(one):
            optimizer = unwrap_optimizer(one)
            with suppress(NoMatchError):
                find_model(optimizer, modules)
                found[id(optimizer)] = optimizer
    return list(found.values())


def find_scaler() -> Any:
    """Return the one ``GradScaler`` that is alive and switched on; None if there is none, or more than one."""
    from torch.amp import GradScaler

    scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler) and one.is_enabled()]
    return scalers[0] if len(scalers) == 1 else None


def _live_modules() -> list[nn.Module]:
    # By type, not isinstance(), which asks proxies for their __class__ and so may load what they stand for.
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_parameters" in vars(one)]


def _candidate(module: nn.Module, wanted: set[int]) -> tuple[nn.Module, int, int]:
    """Return a module, how many of the `wanted` parameters it has, and how many that require gradients."""
    parameters = list(module.parameters())
    owned = sum(id(parameter) in wanted for parameter in parameters)
    return module, owned, sum(parameter.requires_grad for parameter in parameters)


def _outermost(modules: list[nn.Module]) -> nn.Module:
    """Return the module that contains the most of the others; of equal ones, the first."""
    among = {id(module) for module in modules}
    return max(modules, key=lambda module: sum(id(inner) in among for inner in module.modules()))
