"""Measure and judge the pairs of two runs.

`compare` calls `measure` with what `align_runs` found, and `compare_pairs` with the result; `blame_modules` comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from hookline.debug.compare.compared_value import ComparedValue
from hookline.debug.compare.error_thresholds import AllowedErrors
from hookline.debug.compare.judge_errors import BACKWARD, ErrorJudge, NoiseFloors
from hookline.debug.compare.match_calls import UnpairedValue, ValuePair
from hookline.debug.compare.part_errors import add_part_errors
from hookline.debug.compare.rounding import UNSURE, WITHIN
from hookline.debug.compare.sketch_errors import sketch_errors
from hookline.debug.compare.tensor_errors import TensorErrors, first_difference, tensor_errors
from hookline.errors import TraceError

__all__ = ["compare_pairs", "measure"]

_MAX_PLACES: Final = 60
"""For so many values, in the order of the calls, the first place that differs is looked for."""


def measure(
    pairs: Sequence[ValuePair], unpaired: list[UnpairedValue], problems: list[str]
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
            same_dtype = pair.a.dtype == pair.b.dtype
            found.append((pair, sketch_errors(pair.a.fingerprint, pair.b.fingerprint, same_dtype=same_dtype)))
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
    return UnpairedValue(value.site, value.kind, value.leaf, value.step, value.call, why, value.order, value.rank)


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
    _doubt_lone_dtypes(found, allowed)
    return found


def _doubt_lone_dtypes(values: Sequence[ComparedValue], allowed: AllowedErrors) -> None:
    """Doubt what has another dtype in B, if that is so in one part of the model alone: a run in bfloat16 is meant.

    What is coarser hides a bug, and a lone module in another dtype may be one itself.
    """
    changed = [value for value in values if value.dtype_a != value.dtype_b]
    part = _common_module([value.module for value in changed])
    if not part or 2 * sum(_is_within(value.module, part) for value in values) > len(values):
        return
    for value in changed:
        if value.verdict == WITHIN and not allowed.has_say(value.site):
            value.verdict, value.is_same, value.is_unsure = UNSURE, False, True
            value.doubt = f"only {part} is {value.dtype_b} in B where A has {value.dtype_a}; give both one dtype"


def _common_module(names: Sequence[str]) -> str:
    """Return the innermost module that all the names are of, or inside of; empty if that is the model."""
    if not names:
        return ""
    parts = [name.split(".") for name in names]
    first, last = min(parts), max(parts)
    same = [one for one, other in zip(first, last, strict=False) if one == other]
    depth = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(same))
    return ".".join(first[:depth])


def _is_within(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


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
