"""Find the guilty module by putting tensors of a right run into a wrong model, and seeing whether the end heals.

Users call `bisect`. It reads the right run by `run_values`, edits outputs by hooks of `hookline.sites`, and undoes each
trial by the guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.debug.compare.rounding import WITHIN, RoundingModel, verdict_on
from hookline.debug.compare.run_values import RunSource, RunValue, read_run
from hookline.debug.compare.tensor_errors import tensor_errors
from hookline.errors import CompareError, OptionError
from hookline.guard.guard import rollback
from hookline.observe.capture.capture import capture
from hookline.observe.capture.stored_value import each_tensor
from hookline.sites.attach import attach
from hookline.sites.site_info import Site
from hookline.sites.targets import named_modules, select
from hookline.sites.tree import leaves
from hookline.tables import ShownAsTable, Table

__all__ = ["Bisection", "BisectionTrial", "bisect"]

_HEALED: Final = 0.02
"""The end is healed if no more than this part of its error is left, or what is left is rounding."""

_Calls: TypeAlias = dict[int, dict[str, RunValue]]
"""The outputs of one site: by call, then by leaf."""


@dataclass(frozen=True, slots=True)
class BisectionTrial:
    """One run of the wrong model with outputs of the right one put in."""

    site: str
    """The last site, in the order of the calls, whose output was put in; those before it were, too."""
    error: float
    """The relative error of the end."""
    is_healed: bool


@dataclass(slots=True, repr=False)
class Bisection(ShownAsTable):
    """What a bisection has found; prints as a table of its trials.

    Recipe: ``found = bisect(wrong, "trace_of_right", inputs)``, then ``found.module``.
    """

    module: str
    """The guilty module; empty for the model's own code."""
    num_sites: int
    """Among how many it was looked for."""
    error: float
    """The relative error of the end, with nothing put in."""
    trials: list[BisectionTrial] = field(default_factory=list)

    def _table(self) -> Table:
        rows = [(trial.site, f"{trial.error:.3g}", "healed" if trial.is_healed else "wrong") for trial in self.trials]
        title = (
            f"Guilty: {self.module or 'the code of the model itself'}, found among {self.num_sites} sites by "
            f"{len(self.trials)} runs; without help the end is off by {self.error:.3g}."
        )
        return Table(("outputs of A up to", "error of the end", "the end is"), rows, numbers=(1,), title=title)


def bisect(
    model: nn.Module,
    right: RunSource | nn.Module,
    inputs: Any,
    *,
    targets: Any = "*",
    tolerance: float | None = None,
) -> Bisection:
    """Find the module of ``model`` that makes its end differ from a right run.

    Recipe::

        found = hookline.debug.bisect(wrong_model, "trace_of_right", (ids,))
        found = hookline.debug.bisect(wrong_model, right_model, {"input_ids": ids})
        print(found)

    The outputs of the right run are put into ``model``, at all sites up to some place in the order of the calls. If the
    end heals, the guilty module is at or before that place; halving finds it in log2(sites) runs. It need not be where
    values first differ: errors that do not reach the end are passed over. Where several are guilty, the last is found.
    ``model`` is left as it was, random streams included.

    Args:
        model: The wrong model.
        right: A trace of the right run with tensors of outputs, a cache, or the right model, which is run once.
        inputs: What the right run was given: a tensor, a tuple of arguments, a dict of keyword arguments, or a function
            that runs the model that it is given and returns the end.
        targets: Among which modules to look.
        tolerance: The relative error up to which the end is right; rounding by default.

    Raises:
        CompareError: (a ValueError) there is nothing to put in, or the end does not differ.
    """
    run = _runner(inputs)
    values = read_run(_recorded(right, run) if isinstance(right, nn.Module) else right, "the right run").values
    sites, end = _sites_and_end(model, values, targets)
    trials = _Trials(model, run, sites, end, tolerance)
    found = Bisection("", len(sites), trials.error_with(0))
    if trials.is_right(found.error):
        raise CompareError(
            f"The end of the model does not differ from the right run (relative error {found.error:.3g}): there is "
            "nothing to find. Give tolerance= to hold it to less."
        )
    # With the first `low` sites the end is wrong, with `high` it is healed: with all of them it is the right run's own.
    low, high = 0, len(sites)
    while high - low > 1:
        middle = (low + high) // 2
        error = trials.error_with(middle)
        is_healed = trials.is_right(error) or (math.isfinite(error) and error <= _HEALED * found.error)
        found.trials.append(BisectionTrial(sites[middle - 1][0], error, is_healed))
        low, high = (low, middle) if is_healed else (middle, high)
    found.module = sites[high - 1][0]
    return found


def _runner(inputs: Any) -> Callable[[nn.Module], Any]:
    if isinstance(inputs, Tensor):
        return lambda model: model(inputs)
    if isinstance(inputs, Mapping):
        return lambda model: model(**inputs)
    if isinstance(inputs, tuple | list):
        return lambda model: model(*inputs)
    if callable(inputs):
        return inputs  # type: ignore[no-any-return]
    raise OptionError("bisect() takes inputs as a tensor, a tuple of arguments, a dict, or a function of the model.")


def _recorded(model: nn.Module, run: Callable[[nn.Module], Any]) -> Any:
    """Return what flows through the right model."""
    with rollback(model), torch.no_grad(), capture(model, "*", clone=True, scope="process") as cache:
        run(model)
        cache.remove(quiet=True)
    return cache


def _sites_and_end(
    model: nn.Module, values: Sequence[RunValue], targets: Any
) -> tuple[list[tuple[str, _Calls]], dict[str, RunValue]]:
    """Return the sites whose outputs can be put in, in the order of the calls, the model last; and its output."""
    first = min(value.step for value in values)
    known = {name for name, _ in named_modules(model)}
    found: dict[str, _Calls] = {}
    order: dict[str, int] = {}
    for value in values:
        if value.kind == "output" and value.step == first and value.read is not None and value.site in known:
            found.setdefault(value.site, {}).setdefault(value.call, {})[value.leaf] = value
            order[value.site] = max(order.get(value.site, 0), value.order)
    if "" not in found:
        raise CompareError(
            "The right run has no tensors of the output of the model itself, so that nobody knows when the end is "
            "healed. Trace all modules: trace(model, tensors=True)."
        )
    end = found.pop("")[0]
    chosen = {name for name, _ in select(model, targets)}
    sites = [(name, found[name]) for name in sorted(found, key=order.__getitem__) if name in chosen]
    if not sites:
        raise CompareError("No output of the right run belongs to a module of this model, or targets= leaves none.")
    return [*sites, ("", {0: end})], end


class _Trials:
    """Runs the wrong model with outputs of the right one put in."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module], Any],
        sites: list[tuple[str, _Calls]],
        end: dict[str, RunValue],
        tolerance: float | None,
    ) -> None:
        self.model, self.run, self.sites, self.end = model, run, sites, end
        self.tolerance = tolerance
        rounding = RoundingModel()
        dtype = next(iter(end.values())).dtype
        own = next((str(one.dtype).removeprefix("torch.") for one in model.parameters()), dtype)
        self.floor = max(rounding.next_floor(dtype, own) for _ in sites)

    def is_right(self, error: float) -> bool:
        """Return whether an error of the end is within the tolerance, or rounding."""
        if self.tolerance is not None:
            return error <= self.tolerance
        return verdict_on(error, self.floor)[0] == WITHIN

    def error_with(self, count: int) -> float:
        """Return the relative error of the end, with the outputs of the first ``count`` sites put in."""
        put_in = dict(self.sites[:count])
        with rollback(self.model), torch.no_grad():
            if not put_in:
                return self._error(self.run(self.model))

            def swap(module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
                calls = put_in[site.name]
                return _with_tensors(output, calls.get(site.call, {}), site)

            with attach(self.model, list(put_in), swap, name="bisect") as handle:
                end = self.run(self.model)
                handle.remove(quiet=True)
            return self._error(end)

    def _error(self, end: Any) -> float:
        errors = []
        for path, tensor in leaves(end):
            value = self.end.get(str(path))
            if isinstance(tensor, Tensor) and value is not None and value.shape == tuple(tensor.shape):
                assert value.read is not None
                errors.append(tensor_errors(value.read().to(tensor.device), tensor).rel_l2)
        if not errors:
            raise CompareError("The end of the model has no tensor of the shape that the right run ends with.")
        return max(errors)


def _with_tensors(output: Any, right: Mapping[str, RunValue], site: Site) -> Any:
    """Return an output with the tensors of the right run in place of its own."""

    def change(path: str, tensor: Tensor) -> Tensor:
        value = right.get(str(path)) or (next(iter(right.values())) if len(right) == 1 else None)
        if value is None or value.read is None:
            return tensor
        if value.shape != tuple(tensor.shape):
            raise CompareError(
                f"The output of {site.name!r} has shape {tuple(tensor.shape)}, and {value.shape} in the right run: run "
                "both with the same inputs."
            )
        return value.read().to(device=tensor.device, dtype=tensor.dtype, copy=True)

    return each_tensor(output, change)
