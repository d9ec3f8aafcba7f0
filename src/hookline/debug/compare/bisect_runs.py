"""Find the guilty module by putting tensors of a right run into a wrong model, and seeing whether the end heals.

Users call `bisect`. It reads the right run by `values`, and measures how far the end is off by `measure` and `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from hookline.hook_types import Hook
from hookline.observe.capture.capture import Cache, capture
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.site_info import Site
from hookline.sites.targets import select
from hookline.tables import ShownAsTable, Table
from hookline.tree import leaves, map_tensors

__all__ = ["Bisection", "BisectionTrial", "bisect"]

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
    """One run of the wrong model with tensors of the right one put in."""

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
    """The guilty module; empty for the model's own code."""
    num_sites: int
    """Among how many it was looked for."""
    error: float
    """The relative error of the end, with nothing put in."""
    trials: list[BisectionTrial] = field(default_factory=list)
    call: int = 0
    """Which call of the module is guilty."""
    caller: str = ""
    """The module that makes this call."""
    is_sure: bool = False
    """Whether it is the module; False: it, or the code of the caller before it, since its right input is not known."""
    checks: list[BisectionTrial] = field(default_factory=list)
    """Runs with the right input of the site put in; a site that heals by it is innocent."""

    def _table(self) -> Table:
        rows = [_row(trial, "") for trial in self.trials] + [_row(check, "input of ") for check in self.checks]
        return Table(("outputs of A up to", "error of the end", "the end is"), rows, numbers=(1,), title=self._title())

    def _title(self) -> str:
        guilty = _shown(self.module, self.call) if self.module else "the code of the model itself"
        if not self.is_sure:
            guilty += f", or the code of {self.caller or 'the model itself'} before it"
        lines = [
            f"Guilty: {guilty}, found among {self.num_sites} sites by {len(self.trials) + len(self.checks)} runs; "
            f"without help the end is off by {self.error:.3g}."
        ]
        innocent = [_shown(check.site, check.call) for check in self.checks if check.is_healed]
        if innocent:
            lines.append(f"Given its right input, {innocent[-1]} is right: what is handed to it is wrong.")
        if not self.is_sure:
            lines.append(
                'Trace inputs too (kinds=("input", "output"), tensors=True), or give the right model, to know.'
            )
        return "\n".join(lines)


def _shown(site: str, call: int) -> str:
    return f"{site} (call {call + 1})" if call else site


def _row(trial: BisectionTrial, before: str) -> tuple[str, str, str]:
    state = "healed" if trial.is_healed else "wrong"
    return before + _shown(trial.site, trial.call), f"{trial.error:.3g}", state


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

    The outputs of the right run are put into ``model``, at all calls up to some place. If the end heals, the guilty
    call is at or before that place; halving finds it in log2(calls) runs. Then its right input is put in: if that heals
    the end, the module is innocent, and the one that calls it is tried. The guilty module need not be where values
    first differ: errors that do not reach the end are passed over. Where several are guilty, the last is found.
    ``model`` is left as it was, random streams included.

    Args:
        model: The wrong model.
        right: A trace of the right run with tensors of outputs, and of inputs to tell a module from the code that calls
            it; a cache, likewise; or the right model.
        inputs: What the right run was given: a tensor, a tuple of arguments, a dict of keyword arguments, or a function
            that runs the model that it is given and returns the end.
        targets: Among which modules to look.
        tolerance: The relative error up to which the end is right; rounding by default.

    Raises:
        CompareError: (a ValueError) there is nothing to put in, or the end does not differ.
    """
    run = _runner(inputs)
    source = _recorded(right, run) if isinstance(right, nn.Module) else right
    values = [*read_run(source, "the right run").values.values()]
    outputs, end = _outputs_and_end(model, values, targets)
    trials = _BisectTrials(model, run, end, tolerance)
    error = trials.run_alone()
    # The order is that of the wrong model's own calls: a cache keeps all calls of a shared module together.
    calls = [call for call in trials.ended if call in outputs]
    if not calls:
        raise CompareError("No output of the right run belongs to a module of this model, or targets= leaves none.")
    found = Bisection("", len({name for name, _ in calls} | {""}), error)
    if trials.is_right(error):
        raise CompareError(
            f"The end of the model does not differ from the right run (relative error {error:.3g}): there is "
            "nothing to find. Give tolerance= to hold it to less."
        )
    before, call = _halve(found, trials, calls, outputs)
    _blame(found, trials, before, call, _by_call(values, "input"))
    return found


def _halve(
    found: Bisection, trials: _BisectTrials, calls: list[_SiteCall], outputs: Mapping[_SiteCall, _CallLeaves]
) -> tuple[dict[_SiteCall, _CallLeaves], _SiteCall]:
    """Return the call whose right output heals the end, and the outputs before it, which do not."""
    # With the first `low` calls the end is wrong, with `high` it is healed: with all it is the right end.
    low, high = 0, len(calls) + 1
    while high - low > 1:
        middle = (low + high) // 2
        error = trials.error_with({call: outputs[call] for call in calls[:middle]})
        site, call = calls[middle - 1]
        found.trials.append(BisectionTrial(site, error, _is_healed(found, trials, error), call))
        low, high = (low, middle) if found.trials[-1].is_healed else (middle, high)
    return {call: outputs[call] for call in calls[:low]}, [*calls, _ROOT][low]


def _is_healed(found: Bisection, trials: _BisectTrials, error: float) -> bool:
    return trials.is_right(error) or (math.isfinite(error) and error <= _HEALED * found.error)


def _blame(
    found: Bisection,
    trials: _BisectTrials,
    before: Mapping[_SiteCall, _CallLeaves],
    call: _SiteCall,
    given: Mapping[_SiteCall, _CallLeaves],
) -> None:
    """Go from the call that was found to the innermost around it that its right input does not heal."""
    chain = [call]
    while chain[-1] != _ROOT:
        chain.append(trials.callers.get(chain[-1], _ROOT))
    for suspect, caller in zip(chain, [*chain[1:], _ROOT], strict=True):
        found.module, found.call = suspect
        found.caller, found.is_sure = caller[0], suspect == _ROOT
        if suspect == _ROOT or suspect not in given:
            return
        error, is_whole = trials.error_given(before, suspect, given[suspect])
        check = BisectionTrial(suspect[0], error, _is_healed(found, trials, error), suspect[1])
        found.checks.append(check)
        if not check.is_healed:
            found.is_sure = is_whole
            return


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
    with rollback(model), torch.no_grad(), capture(model, "*", clone=True, inputs=True, scope="process") as cache:
        run(model)
        cache.remove(quiet=True)
    return cache


def _by_call(values: Sequence[Value], kind: str) -> dict[_SiteCall, dict[str, Value]]:
    """Return the tensors of one kind at the first step: by site and call, then by leaf."""
    first = min(value.step for value in values)
    found: dict[_SiteCall, dict[str, Value]] = {}
    for value in values:
        if value.kind == kind and value.step == first and value.read is not None:
            found.setdefault((value.site, value.call), {})[value.leaf] = value
    return found


def _outputs_and_end(
    model: nn.Module, values: Sequence[Value], targets: Any
) -> tuple[dict[_SiteCall, dict[str, Value]], dict[str, Value]]:
    """Return the outputs that can be put in, and that of the model itself."""
    outputs = _by_call(values, "output")
    end = outputs.get(_ROOT)
    if end is None:
        raise CompareError(
            "The right run has no tensors of the output of the model itself, so that nobody knows when the end is "
            "healed. Trace all modules: trace(model, tensors=True)."
        )
    chosen = {name for name, _ in select(model, targets)} - {""}
    return {call: one for call, one in outputs.items() if call[0] in chosen}, end


# -- runs of the wrong model ---------------------------------------------------------------------------------------


class _BisectTrials:
    """Runs the wrong model with tensors of the right run put in."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module], Any],
        end: _CallLeaves,
        tolerance: float | None,
    ) -> None:
        self.model, self.run, self.end, self.tolerance = model, run, end, tolerance
        self.ended: list[_SiteCall] = []
        """All calls, in the order in which they end; `run_alone` fills it."""
        self.callers: dict[_SiteCall, _SiteCall] = {}
        """For each call the one during which it was made. The dotted name does not tell: modules may be shared."""
        self.floor = 0.0

    def run_alone(self) -> float:
        """Run the model with nothing put in, note its calls, and return the relative error of the end."""
        open_calls: list[_SiteCall] = []

        def begin(module: nn.Module, args: Any, *, site: Site) -> None:
            call = (site.name, site.call)
            self.callers.setdefault(call, open_calls[-1] if open_calls else _ROOT)
            open_calls.append(call)

        def finish(module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
            call = (site.name, site.call)
            self.ended.append(call)
            if call in open_calls:
                del open_calls[open_calls.index(call) :]

        with (
            self._attached("*", begin, on="forward_pre", observe=True),
            self._attached("*", finish, observe=True),
        ):
            error = self.error_with({})
        self.ended = list(dict.fromkeys(self.ended))
        self._set_floor()
        return error

    def _set_floor(self) -> None:
        rounding = RoundingModel()
        dtype = next(iter(self.end.values())).dtype
        own = next((str(one.dtype).removeprefix("torch.") for one in self.model.parameters()), dtype)
        self.floor = max(rounding.next_floor(dtype, own) for _ in [_ROOT, *self.ended])

    def is_right(self, error: float) -> bool:
        """Return whether an error of the end is within the tolerance, or rounding."""
        if self.tolerance is not None:
            return error <= self.tolerance
        return verdict_on(error, self.floor)[0] == WITHIN

    def error_with(self, outputs: Mapping[_SiteCall, _CallLeaves]) -> float:
        """Return the relative error of the end, with the outputs of some calls put in."""

        def swap(module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
            return _with_outputs(output, outputs.get((site.name, site.call), {}), site)

        with rollback(self.model), torch.no_grad(), self._attached([*dict.fromkeys(name for name, _ in outputs)], swap):
            return self._error(self.run(self.model))

    def error_given(
        self, outputs: Mapping[_SiteCall, _CallLeaves], call: _SiteCall, given: _CallLeaves
    ) -> tuple[float, bool]:
        """Return the error of the end with the input of ``call`` put in as well, and whether all of it had a place."""
        missing = set(given)

        def hand_over(module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> Any:
            if (site.name, site.call) != call:
                return None
            changed, placed = _with_inputs(args, kwargs, given)
            missing.difference_update(placed)
            return changed

        with self._attached(call[0], hand_over, on="forward_pre", with_kwargs=True):
            error = self.error_with(outputs)
        return error, not missing

    @contextmanager
    def _attached(self, names: str | list[str], hook: Hook, **options: Any) -> Iterator[None]:
        handle = attach(self.model, names, hook, name="bisect", **options) if names else HandleSet()
        try:
            yield
        finally:
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


def _with_inputs(args: Any, kwargs: Any, right: _CallLeaves) -> tuple[Any, set[str]]:
    """Return arguments with the tensors of the right run put in, and the leaves that need no place any more.

    Objects that are no plain containers (a KV cache) are left alone: the model goes on filling its own.
    """
    placed: set[str] = set()

    def change(path: str, tensor: Tensor) -> Tensor:
        # A trace writes keyword arguments as "kwargs.mask", a cache as "mask".
        leaf = next((leaf for leaf in (path, f"kwargs.{path}") if leaf in right), None)
        value = right[leaf] if leaf is not None else None
        if leaf is None or value is None or value.read is None:
            return tensor
        placed.add(leaf)
        found = value.read()
        is_float = found.is_floating_point() and tensor.is_floating_point()
        return found.to(device=tensor.device, dtype=tensor.dtype if is_float else found.dtype, copy=True)

    def put(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) or type(value) in (tuple, list, dict):
            return map_tensors(value, change, path=name)
        if value is not None:
            placed.update(leaf for leaf in right if leaf.removeprefix("kwargs.").partition(".")[0] == name)
        return value

    changed = tuple(put(str(place), value) for place, value in enumerate(args))
    return (changed, {name: put(name, value) for name, value in kwargs.items()}), placed
