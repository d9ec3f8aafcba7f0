"""Find the guilty module by putting tensors of a right run into a wrong model, and seeing whether the end heals.

Users call `bisect`. It reads the right run by `run_values`, and runs the wrong model by `bisect_trials`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.debug.bisect_trials import ROOT, BisectTrials, CallLeaves, SiteCall
from hookline.debug.compare.run_values import RunSource, RunValue, read_run
from hookline.errors import CompareError, OptionError
from hookline.guard.guard import rollback
from hookline.observe.capture.capture import capture
from hookline.sites.targets import named_modules, select
from hookline.tables import ShownAsTable, Table

__all__ = ["Bisection", "BisectionTrial", "bisect"]

_HEALED: Final = 0.02
"""The end is healed if no more than this part of its error is left, or what is left is rounding."""

_Inputs: TypeAlias = Callable[[Sequence[SiteCall]], dict[SiteCall, dict[str, RunValue]]]
"""Returns what some calls were given in the right run."""


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
            it; a cache, likewise; or the right model, which is run twice.
        inputs: What the right run was given: a tensor, a tuple of arguments, a dict of keyword arguments, or a function
            that runs the model that it is given and returns the end.
        targets: Among which modules to look.
        tolerance: The relative error up to which the end is right; rounding by default.

    Raises:
        CompareError: (a ValueError) there is nothing to put in, or the end does not differ.
    """
    run = _runner(inputs)
    values = read_run(_recorded(right, run) if isinstance(right, nn.Module) else right, "the right run").values
    outputs, end = _outputs_and_end(model, values, targets)
    trials = BisectTrials(model, run, end, tolerance)
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
    given = _inputs_of_model(right, run) if isinstance(right, nn.Module) else _inputs_of_run(values)
    _blame(found, trials, before, call, given)
    return found


def _halve(
    found: Bisection, trials: BisectTrials, calls: list[SiteCall], outputs: Mapping[SiteCall, CallLeaves]
) -> tuple[dict[SiteCall, CallLeaves], SiteCall]:
    """Return the call whose right output heals the end, and the outputs before it, which do not."""
    # With the first `low` calls the end is wrong, with `high` it is healed: with all it is the right end.
    low, high = 0, len(calls) + 1
    while high - low > 1:
        middle = (low + high) // 2
        error = trials.error_with({call: outputs[call] for call in calls[:middle]})
        site, call = calls[middle - 1]
        found.trials.append(BisectionTrial(site, error, _is_healed(found, trials, error), call))
        low, high = (low, middle) if found.trials[-1].is_healed else (middle, high)
    return {call: outputs[call] for call in calls[:low]}, [*calls, ROOT][low]


def _is_healed(found: Bisection, trials: BisectTrials, error: float) -> bool:
    return trials.is_right(error) or (math.isfinite(error) and error <= _HEALED * found.error)


def _blame(
    found: Bisection, trials: BisectTrials, before: Mapping[SiteCall, CallLeaves], call: SiteCall, given: _Inputs
) -> None:
    """Go from the call that was found to the innermost around it that its right input does not heal."""
    chain = [call]
    while chain[-1] != ROOT:
        chain.append(trials.callers.get(chain[-1], ROOT))
    right = given(chain)
    for suspect, caller in zip(chain, [*chain[1:], ROOT], strict=True):
        found.module, found.call = suspect
        found.caller, found.is_sure = caller[0], suspect == ROOT
        if suspect == ROOT or not right.get(suspect):
            return
        error, is_whole = trials.error_given(before, suspect, right[suspect])
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


def _recorded(model: nn.Module, run: Callable[[nn.Module], Any], targets: Any = "*", *, inputs: bool = False) -> Any:
    """Return what flows through the right model."""
    with (
        rollback(model),
        torch.no_grad(),
        capture(model, targets, clone=True, inputs=inputs, scope="process") as cache,
    ):
        run(model)
        cache.remove(quiet=True)
    return cache


def _inputs_of_model(model: nn.Module, run: Callable[[nn.Module], Any]) -> _Inputs:
    """Run the right model once more for the inputs of a few calls: those of all would take twice the memory."""

    def given(calls: Sequence[SiteCall]) -> dict[SiteCall, dict[str, RunValue]]:
        known = {name for name, _ in named_modules(model)}
        names = list(dict.fromkeys(name for name, _ in calls if name in known and name))
        if not names:
            return {}
        return _inputs_of_run(read_run(_recorded(model, run, names, inputs=True), "the right run").values)(calls)

    return given


def _inputs_of_run(values: Sequence[RunValue]) -> _Inputs:
    found = _by_call(values, "input")
    return lambda calls: {call: found[call] for call in calls if call in found}


def _by_call(values: Sequence[RunValue], kind: str) -> dict[SiteCall, dict[str, RunValue]]:
    """Return the tensors of one kind at the first step: by site and call, then by leaf."""
    first = min(value.step for value in values)
    found: dict[SiteCall, dict[str, RunValue]] = {}
    for value in values:
        if value.kind == kind and value.step == first and value.read is not None:
            found.setdefault((value.site, value.call), {})[value.leaf] = value
    return found


def _outputs_and_end(
    model: nn.Module, values: Sequence[RunValue], targets: Any
) -> tuple[dict[SiteCall, dict[str, RunValue]], dict[str, RunValue]]:
    """Return the outputs that can be put in, and that of the model itself."""
    outputs = _by_call(values, "output")
    end = outputs.get(ROOT)
    if end is None:
        raise CompareError(
            "The right run has no tensors of the output of the model itself, so that nobody knows when the end is "
            "healed. Trace all modules: trace(model, tensors=True)."
        )
    chosen = {name for name, _ in select(model, targets)} - {""}
    return {call: one for call, one in outputs.items() if call[0] in chosen}, end
