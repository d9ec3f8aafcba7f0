"""Measure and judge the pairs of two runs, and find the module in which they part.

`compare` calls `compare_pairs` with what `align_runs` found, then `find_blame` with the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from hookline.debug.compare.compared_value import Blame, ComparedValue
from hookline.debug.compare.error_thresholds import AllowedErrors
from hookline.debug.compare.judge_errors import BACKWARD, ErrorJudge, NoiseFloors
from hookline.debug.compare.match_calls import UnpairedValue, ValuePair
from hookline.debug.compare.part_errors import add_part_errors
from hookline.debug.compare.rounding import UNSURE, WITHIN
from hookline.debug.compare.sketch_errors import sketch_errors
from hookline.debug.compare.tensor_errors import TensorErrors, first_difference, tensor_errors
from hookline.errors import TraceError

__all__ = ["compare_pairs", "find_blame", "measure"]

_MAX_PLACES: Final = 60
"""For so many values, in the order of the calls, the first place that differs is looked for."""


def measure(
    pairs: Sequence[ValuePair],
    unpaired: list[UnpairedValue],
    problems: list[str],
    *,
    same_sketches: bool,
    exact_hashes: bool = True,
) -> list[tuple[ValuePair, TensorErrors]]:
    """Return the errors of each pair, from tensors or else fingerprints.

    What has neither is added to ``unpaired``, and tensors that cannot be read to ``problems``.
    """
    found, lost = [], []
    for given in pairs:
        pair = given
        try:
            tensors = _tensors(pair)
        except TraceError as error:
            lost.append(str(error))
            if pair.a.fingerprint is None or pair.b.fingerprint is None:
                unpaired.append(_unpaired(pair, str(error)))
                continue
            # From here on there are only fingerprints of it.
            pair, tensors = replace(pair, a=replace(pair.a, read=None), b=replace(pair.b, read=None)), None
        if tensors is not None:
            errors = tensor_errors(*tensors)
            found.append((pair, errors if pair.a.kind in BACKWARD else add_part_errors(errors, *tensors)))
        elif pair.a.fingerprint is not None and pair.b.fingerprint is not None:
            estimate = sketch_errors(
                pair.a.fingerprint,
                pair.b.fingerprint,
                same_sketches=same_sketches,
                same_dtype=pair.a.dtype == pair.b.dtype,
                exact_hashes=exact_hashes,
            )
            found.append((pair, estimate))
        else:
            unpaired.append(_unpaired(pair, _why_unreadable(pair)))
    if lost:
        problems.append(f"{len(lost)} tensors cannot be read; their fingerprints are compared. The first: {lost[0]}")
    return found


def _why_unreadable(pair: ValuePair) -> str:
    if pair.how:
        return f"{pair.how}, and for that its tensors have to be in both traces: trace with tensors="
    return "one run has only its fingerprint, the other only its tensor: trace both with tensors="


def _unpaired(pair: ValuePair, why: str) -> UnpairedValue:
    value = pair.a
    return UnpairedValue(value.site, value.kind, value.leaf, value.step, value.call, why)


def _tensors(pair: ValuePair) -> tuple[Tensor, Tensor] | None:
    if pair.a.read is None or pair.b.read is None:
        return None
    return pair.a.read(), pair.b.read()


def compare_pairs(
    measured: Sequence[tuple[ValuePair, TensorErrors]], allowed: AllowedErrors, noise: NoiseFloors
) -> list[ComparedValue]:
    """Return the verdict on each pair, in the order of the calls."""
    judge, found = ErrorJudge(measured, noise), []
    places = _MAX_PLACES
    for pair, errors in sorted(measured, key=lambda item: item[0].a.order):
        value = _compared(pair, errors)
        judge.judge(pair, value)
        if allowed.has_say(value.site):
            value.is_same = allowed.is_allowed(value.site, errors, lambda pair=pair: _tensors(pair))  # type: ignore[misc]
        else:
            value.is_same, value.is_unsure = value.verdict == WITHIN, value.verdict == UNSURE
        if not value.is_same and places and not errors.is_estimate:
            places -= 1
            value.where = _where(pair, value)
        found.append(value)
    return found


def _compared(pair: ValuePair, errors: TensorErrors) -> ComparedValue:
    a, b = pair.a, pair.b
    return ComparedValue(
        a.site, a.kind, a.leaf, a.step, a.call, max(a.rank, b.rank), a.order, a.shape, a.dtype, b.dtype, errors,
        how=pair.how, is_sure=pair.is_sure,
    )  # fmt: skip


def _where(pair: ValuePair, value: ComparedValue) -> str:
    """Return the first row or position that differs by more than rounding."""
    tensors = _tensors(pair)
    if tensors is None:
        return ""
    # A row or channel that is off is small beside the whole: the limit is then that of most of its own entries.
    limit = 8 * value.floor * value.errors.rms_a if not value.is_in_part else value.errors.max_abs / 16
    index = first_difference(*tensors, limit)
    if index is None:
        index = first_difference(*tensors, 0.0)
    if index is None:
        return ""
    if pair.keys:
        key = pair.keys[index[0]]
        return f"request {key.request}" + (f", position {key.position}" if key.position is not None else "")
    return f"[{', '.join(map(str, index))}]"


# -- the module to blame -----------------------------------------------------------------------------------------


def find_blame(values: Sequence[ComparedValue], unpaired: Sequence[UnpairedValue] = ()) -> list[Blame]:
    """Return the modules in which the runs part, and mark what follows from them.

    That is mostly one: whatever differs later follows from the first. Blamed by themselves are parameters that differ
    from the beginning, and modules that were given the same to the bit in the step of the first.
    """
    differing = [value for value in values if not value.is_same and value.is_sure and not value.is_unsure]
    if not differing:
        return []
    start = min(value.step for value in values)
    roots = [value for value in differing if value.kind == "parameter" and value.step == start]
    computed = [value for value in differing if value.kind != "parameter" or value.step != start]
    if not roots:
        roots = computed[:1]
    known = {root.module for root in roots}
    for value in _given_the_same(computed, values, unpaired):
        if value.module not in known:
            known.add(value.module)
            roots.append(value)
    blamed = _without_repeats([_blame(root, values) for root in roots])
    own = {blame.module for blame in blamed}
    chosen = {id(root) for root in roots}
    for value in differing:
        if id(value) not in chosen:
            value.follows = (value.module if value.module in own else blamed[0].module) or "(the model)"
    return blamed


def _given_the_same(
    computed: Sequence[ComparedValue], values: Sequence[ComparedValue], unpaired: Sequence[UnpairedValue]
) -> list[ComparedValue]:
    """Return the outputs that differ though all that their module was given is the same to the bit.

    Only those in the step and on the rank of the first difference: later a cache, and another rank, bring it along.
    A module with something in it that differs passes that on.
    """
    if not computed:
        return []
    step, rank = computed[0].step, computed[0].rank
    inside = {name for value in computed if (value.step, value.rank) == (step, rank) for name in _around(value)}
    given: dict[tuple[Any, ...], bool] = {}
    for value in values:
        if value.kind == "input":
            key = value.site, value.step, value.call, value.rank
            given[key] = given.get(key, True) and value.errors.is_equal
    not_compared = {(one.site, one.step, one.call) for one in unpaired if one.kind == "input"}
    return [
        value for value in computed
        if value.kind == "output" and (value.step, value.rank) == (step, rank) and value.site not in inside
        and given.get((value.site, value.step, value.call, value.rank), False)
        and (value.site, value.step, value.call) not in not_compared
    ]  # fmt: skip


def _around(value: ComparedValue) -> list[str]:
    """Return the names of the modules around the one of a value; the model's is empty."""
    if not value.site:
        return []
    parts = value.site.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def _without_repeats(found: Sequence[Blame]) -> list[Blame]:
    return list({blame.module: blame for blame in reversed(found)}.values())[::-1]


def _blame(first: ComparedValue, values: Sequence[ComparedValue]) -> Blame:
    """Return the module that made ``first``, of what else of it was traced."""
    seen = {value.site for value in values if value.kind in ("output", "input_grad")}
    if first.kind in ("parameter", "param_grad"):
        what = "holds another parameter" if first.kind == "parameter" else "gets another gradient"
        return Blame(first.module, f"{first.module} {what}: {first.site}.", first)
    if first.kind in ("input", "output_grad"):
        return _blame_caller(first, seen)
    takes = "input" if first.kind == "output" else "output_grad"
    inner = any(site.startswith(f"{first.site}.") for site in seen) if first.site else len(seen) > 1
    name = first.site or "The model"
    if inner:
        return Blame(
            first.site, f"All that the modules inside of {name} make is the same; its own code differs.", first
        )
    given = [value for value in values if value.site == first.site and value.kind == takes]
    if given:
        here = [value.errors for value in given if (value.step, value.call) == (first.step, first.call)]
        how = "to the bit" if here and all(errors.is_equal for errors in here) else "up to rounding"
        what = f"is given the same {how} and returns something else"
        return Blame(first.site, f"{name} {what if first.kind == 'output' else 'hands on another gradient'}.", first)
    caller = _caller(first.site, seen)
    return Blame(
        first.site,
        f"{name} is the first that returns something else. What it was given was not compared: with inputs in both "
        f"traces, the code of {caller or 'the model'} around it could be told apart.",
        first,
    )


def _blame_caller(first: ComparedValue, seen: set[str]) -> Blame:
    """Blame the module whose own code made an input, or a gradient of an output."""
    if not first.site:
        return Blame("", "The model was given other inputs.", first, is_input=True)
    caller = _caller(first.site, seen)
    what = "hands other values to" if first.kind == "input" else "gives another gradient to"
    text = f"The code of {caller or 'the model'} {what} {first.site}; all that was compared before it is the same."
    return Blame(caller, text, first)


def _caller(site: str, seen: set[str]) -> str:
    """Return the nearest module around ``site`` that is called: a list of modules is not."""
    while site:
        site = site.rpartition(".")[0]
        if site in seen:
            return site
    return ""
