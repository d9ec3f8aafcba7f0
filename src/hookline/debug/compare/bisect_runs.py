"""Find the guilty module by putting tensors of a right run into a wrong model, and seeing whether the end heals.

Users call `bisect`. It reads the right run by `values`, and measures how far the end is off by `measure` and `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.debug.compare.judge import RoundingModel, verdict_on
from hookline.debug.compare.key import WITHIN, Value
from hookline.debug.compare.measure import tensor_errors
from hookline.debug.compare.values import RunSource, read_run
from hookline.errors import CompareError, OptionError
from hookline.guard.guard import rollback
from hookline.observe.capturing import Cache, capture
from hookline.sites.attach import attach
from hookline.sites.hook_at_site import Site
from hookline.tables import ShownAsTable, Table
from hookline.tree import leaves, map_tensors

_HEALED: Final = 0.02
"""The end is healed if no more than this part of its error is left, or what is left is rounding."""

_SiteCall: TypeAlias = tuple[str, int]
"""A site, and which of its calls."""

_CallLeaves: TypeAlias = Mapping[str, Value]
"""The tensors of the right run at one call, by leaf."""

_ROOT: Final[_SiteCall] = ("", 0)
"""The call of the model itself."""


@dataclass(frozen=True, slots=True)
class BisectionTrial:
    """One run of the wrong model with outputs of the right one put in."""

    site: str
    """The last site, in the order of the calls, whose output was put in; those before it were, too."""
    error: float
    """The relative error of the end."""
    is_healed: bool
    call: int = 0
    """Which call of the site."""


@dataclass(slots=True, repr=False)
class Bisection(ShownAsTable):
    """What a bisection has found; prints as a table of its trials.

    Recipe: ``found = bisect(wrong, "trace_of_right", inputs)``, then ``found.module``.
    """

    module: str
    """The guilty module; empty for the model's own code. Or the code that calls it is guilty, between the call before
    and this one."""
    num_sites: int
    """Among how many it was looked for."""
    error: float
    """The relative error of the end, with nothing put in."""
    trials: list[BisectionTrial] = field(default_factory=list)
    call: int = 0
    """Which call of the module is guilty."""

    def _table(self) -> Table:
        rows = [
            (_shown(trial.site, trial.call), f"{trial.error:.3g}", "healed" if trial.is_healed else "wrong")
            for trial in self.trials
        ]
        guilty = "the code of the model itself"
        if self.module:
            guilty = f"{_shown(self.module, self.call)}, or the code that calls it just before"
        title = (
            f"Guilty: {guilty}; found among {self.num_sites} sites by {len(self.trials)} runs. "
            f"Without help the end is off by {self.error:.3g}."
        )
        return Table(("outputs of A up to", "error of the end", "the end is"), rows, numbers=(1,), title=title)


def _shown(site: str, call: int) -> str:
    return f"{site} (call {call + 1})" if call else site


def bisect(model: nn.Module, right: RunSource | nn.Module, inputs: Any, *, tolerance: float | None = None) -> Bisection:
    """Find the module of ``model`` that makes its end differ from a right run.

    Recipe::

        found = hookline.debug.bisect(wrong_model, "trace_of_right", (ids,))
        found = hookline.debug.bisect(wrong_model, right_model, {"input_ids": ids})
        print(found)

    The end is what the model returns. The outputs of the right run are put into ``model``, at all calls up to some
    place. If the end heals, the guilty call is at or before that place; halving finds it in log2(calls) runs. The
    guilty module need not be where values first differ: errors that do not reach the end are passed over. Where several
    are guilty, the last is found. ``model`` is left as it was, random streams included.

    Args:
        model: The wrong model.
        right: A trace of the right run with tensors of outputs; a cache, likewise; or the right model.
        inputs: What the right run was given: a tensor, a tuple of arguments, a dict of keyword arguments, or a function
            that runs the model that it is given and returns the end.
        tolerance: The relative error up to which the end is right; rounding by default.

    Raises:
        CompareError: (a ValueError) there is nothing to put in, or the end does not differ.
    """
    run = _runner(inputs)
    source = _recorded(right, run) if isinstance(right, nn.Module) else right
    outputs = _outputs(read_run(source, "the right run").values.values())
    if _ROOT not in outputs:
        raise CompareError(
            "The right run has no tensors of the output of the model itself, so it is unknown when the end is "
            "healed. Trace all modules: trace(model, tensors=True)."
        )
    trials = _Trials(model, run, outputs.pop(_ROOT), tolerance)
    error = trials.run_alone()
    # The order is that of the wrong model's own calls: a cache keeps all calls of a shared module together.
    calls = [call for call in trials.ended if call in outputs]
    if not calls:
        raise CompareError("No output of the right run belongs to a module of this model.")
    if trials.is_right(error):
        raise CompareError(
            f"The end of the model does not differ from the right run (relative error {error:.3g}): there is "
            "nothing to find. Give tolerance= to hold it to less."
        )
    found = Bisection("", len({name for name, _ in calls} | {""}), error)
    # With the first `low` calls the end is wrong, with `high` it is healed: with all it is the right end.
    low, high = 0, len(calls) + 1
    while high - low > 1:
        middle = (low + high) // 2
        left = trials.error_with({call: outputs[call] for call in calls[:middle]})
        is_healed = trials.is_right(left) or (math.isfinite(left) and left <= _HEALED * error)
        site, call = calls[middle - 1]
        found.trials.append(BisectionTrial(site, left, is_healed, call))
        low, high = (low, middle) if is_healed else (middle, high)
    found.module, found.call = [*calls, _ROOT][low]
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


def _recorded(model: nn.Module, run: Callable[[nn.Module], Any]) -> Cache:
    """Return what flows through the right model."""
    with rollback(model), torch.no_grad(), capture(model, "*", clone=True, scope="process") as cache:
        run(model)
        cache.remove(quiet=True)
    return cache


def _outputs(values: Any) -> dict[_SiteCall, dict[str, Value]]:
    """Return the outputs of the first step whose tensors are there: by site and call, then by leaf."""
    held = [value for value in values if value.kind == "output" and value.read is not None]
    first = min((value.step for value in held), default=0)
    found: dict[_SiteCall, dict[str, Value]] = {}
    for value in held:
        if value.step == first:
            found.setdefault((value.site, value.call), {})[value.leaf] = value
    return found


class _Trials:
    """Runs of the wrong model with outputs of the right run put in."""

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module], Any], end: _CallLeaves, tolerance: float | None
    ) -> None:
        self.model, self.run, self.end, self.tolerance = model, run, end, tolerance
        self.ended: list[_SiteCall] = []
        """All calls of modules, in the order in which they end; `run_alone` fills it."""
        self._floor = 0.0

    def run_alone(self) -> float:
        """Run the model with nothing put in, note its calls, and return the relative error of the end."""

        def finish(module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
            self.ended.append((site.name, site.call))

        with attach(self.model, "*", finish, observe=True, name="bisect"):
            error = self.error_with({})
        self.ended = list(dict.fromkeys(self.ended))
        rounding, dtype = RoundingModel(), next(iter(self.end.values())).dtype
        own = next((str(one.dtype).removeprefix("torch.") for one in self.model.parameters()), dtype)
        self._floor = max(rounding.next_floor(dtype, own) for _ in [_ROOT, *self.ended])
        return error

    def is_right(self, error: float) -> bool:
        """Return whether an error of the end is within the tolerance, or rounding."""
        if self.tolerance is not None:
            return error <= self.tolerance
        return verdict_on(error, self._floor)[0] == WITHIN

    def error_with(self, outputs: Mapping[_SiteCall, _CallLeaves]) -> float:
        """Return the relative error of the end, with the outputs of some calls put in."""

        def swap(module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
            return _with_outputs(output, outputs.get((site.name, site.call), {}), site)

        names = [*dict.fromkeys(name for name, _ in outputs)]
        with rollback(self.model), torch.no_grad():
            handle = attach(self.model, names, swap, name="bisect") if names else None
            try:
                return self._error(self.run(self.model))
            finally:
                if handle is not None:
                    handle.remove(quiet=True)

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


def _with_outputs(output: Any, right: _CallLeaves, site: Site) -> Any:
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

    return map_tensors(output, change)
