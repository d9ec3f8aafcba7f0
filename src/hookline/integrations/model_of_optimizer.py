"""Find the model whose parameters an optimizer trains, among all modules that are alive.

The start of a followed script calls `find_model` at the first step of the script's optimizer; the callback for Fabric
looks for the optimizers of the models that were set up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from hookline.errors import NoMatchError
from hookline.sites.optimizers import unwrap_optimizer

__all__ = ["FoundModel", "find_model", "find_optimizers", "find_scaler"]


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
