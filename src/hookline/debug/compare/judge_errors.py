"""Judge the errors of a comparison one by one: the floor of each, and whether an error may be amplified rounding.

`compare_pairs` makes an `ErrorJudge` and gives it the values in the order of the calls.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from hookline.debug.compare.cancellation import left_by_cancellation
from hookline.debug.compare.compared_value import ComparedValue
from hookline.debug.compare.match_calls import ValuePair
from hookline.debug.compare.rounding import (
    NARROW,
    UNSURE,
    WITHIN,
    WRONG,
    RoundingModel,
    names_around,
    unit_of,
    verdict_on,
)
from hookline.debug.compare.tensor_errors import TensorErrors

__all__ = ["BACKWARD", "ErrorJudge", "MeasuredNoise", "NoiseFloors", "noise_floors"]

MeasuredNoise: TypeAlias = Mapping[str, tuple[float, float]]
"""By the dtype of the noise run: the relative error, and the largest of a row or channel."""
NoiseFloors: TypeAlias = Mapping[tuple[Any, ...], MeasuredNoise]
"""The noise that was measured, by `_place_in_a`."""

BACKWARD: Final = ("output_grad", "input_grad", "param_grad")
_NEAR_ZERO: Final = 1e-3
"""A gradient this much smaller than others of its kind may be nothing but rounding, as that of the bias of keys."""
_STEADY: Final = 4.0
"""An error of up to so many times the largest so far has grown little by little, as rounding in deep networks does."""
_AMPLIFIED: Final = 8.0
"""An output may have so many times the error of the input, beyond what cancellation in the input explains."""
_PASSED_ON: Final = 2.0
"""An absolute error of up to this many times that of the input was passed on: what is less than the input cancelled."""
_PARTS: Final = 8.0
"""One row or channel of many may have so many times the rounding error of the whole."""
_LARGE_PART: Final = 0.5
"""From here on a row is a bug, if it is beyond rounding."""
_WRONG_PART: Final = 64.0

_BY_INPUT: Final = "rounding of its input is amplified here, or there is a small bug; measure it with noise="
_BY_DEPTH: Final = "the error grows little by little, as rounding does in a deep network; measure it with noise="
_BY_PART: Final = "one row or channel is further off than the others; measure it with noise="
_BY_TIE: Final = (
    "whole numbers chosen by rounded ones differ in a few places (a near tie of top-k, argmax or round), and so does "
    "what follows; give both runs the same choice, or measure it with noise="
)
_FEW: Final = 0.25
"""Below this share, entries of whole numbers may have flipped by rounding."""
_BY_ONE_OPERATION: Final = (
    "it is given the same to the bit, and one operation rounds less than that; measure it with noise="
)
_ONE_OPERATION: Final = 3.0
"""So many units of a 16-bit dtype one module may be off that is given the same; two times as many in one channel."""
_BY_HASH: Final = (
    "fingerprints do not tell it: there is NaN or infinity in both, or sums were too large; trace with tensors="
)


def _place_in_a(pair: ValuePair) -> tuple[Any, ...]:
    """Return what tells a value of A from the others, whatever names and steps it was given to fit another run."""
    return pair.a.rank, pair.a.order, pair.a.kind, pair.a.leaf


class _History:
    """The largest errors so far that count as rounding, of the forward or of the backward."""

    def __init__(self) -> None:
        self.rel = 0.0
        self.part_rel = 0.0
        self.part_abs = 0.0

    def add(self, errors: TensorErrors) -> None:
        """Take in one more."""
        self.rel = max(self.rel, errors.rel_l2)
        self.part_rel = max(self.part_rel, errors.part_rel)
        self.part_abs = max(self.part_abs, errors.part_abs)

    def explains_part(self, errors: TensorErrors) -> bool:
        """Return whether the error of a row was there before, next to larger numbers or to smaller ones."""
        return errors.part_abs <= _STEADY * self.part_abs or errors.part_rel <= _STEADY * self.part_rel


class ErrorJudge:
    """Says of each value whether its error is rounding.

    Recipe: ``ErrorJudge(measured, noise).judge(pair, value)``, in the order of the calls.
    """

    def __init__(self, measured: Sequence[tuple[ValuePair, TensorErrors]], noise: NoiseFloors) -> None:
        self._noise = noise
        self._model = RoundingModel()
        self._usual = _usual_sizes([(pair.a.kind, errors) for pair, errors in measured])
        self._inputs: dict[tuple[Any, ...], list[tuple[ValuePair, TensorErrors]]] = defaultdict(list)
        for pair, errors in measured:
            if pair.a.kind == "input":
                self._inputs[_call_of(pair)].append((pair, errors))
        self._with_modules = {name for pair, _ in measured for name in names_around(pair.a.site)}
        self._history = {False: _History(), True: _History()}
        self._has_tie = False
        """Whether a whole number has flipped by rounding: rows that follow from it differ by any amount."""
        self._is_apart = False
        """Whether a value was beyond doubt not rounding: what comes after it is given other values."""

    def judge(self, pair: ValuePair, value: ComparedValue) -> None:
        """Set the floor, the verdict, and why it is unsure if it is."""
        errors = value.errors
        has_inputs = _call_of(pair) in self._inputs
        modelled = self._model.next_floor(
            value.dtype_a, value.dtype_b, site=value.site, kind=value.kind, is_equal=errors.is_equal,
            has_inputs=has_inputs,
        )  # fmt: skip
        value.floor, noise_of_parts = self._floor(pair, value, modelled)
        if errors.mismatched:
            value.verdict, value.ratio, self._is_apart = WRONG, math.inf, True
            return
        error = self._error(value)
        value.verdict, value.ratio = verdict_on(error, value.floor, is_estimate=errors.is_estimate)
        history = self._history[value.kind in BACKWARD]
        if value.verdict != WITHIN and noise_of_parts is None and not self._is_apart:
            self._has_tie = self._has_tie or self._is_tie(pair, errors)
            value.doubt = _BY_TIE if self._has_tie else self._why_doubted(pair, error, errors.norm_a, history)
            value.verdict = UNSURE if value.doubt else value.verdict
        if value.verdict not in (WRONG, UNSURE):
            self._judge_parts(value, noise_of_parts, history)
            if self._has_tie and value.verdict != WITHIN:
                value.verdict, value.doubt = UNSURE, _BY_TIE
        if value.verdict == WITHIN and errors.is_blind:
            value.verdict, value.doubt = UNSURE, _BY_HASH
        if value.verdict == WITHIN and noise_of_parts is None and self._is_more_than_one_operation(pair, errors):
            value.verdict, value.doubt = UNSURE, _BY_ONE_OPERATION
        if value.verdict in (WITHIN, UNSURE) and error == errors.rel_l2 and math.isfinite(error):
            history.add(errors)
        self._is_apart = self._is_apart or value.verdict not in (WITHIN, UNSURE)

    def _is_more_than_one_operation(self, pair: ValuePair, errors: TensorErrors) -> bool:
        """Return whether a 16-bit output is off by more than one operation rounds, of inputs that are the same.

        The depth of the model does not matter then. Modules that call others are more than one operation.
        """
        unit, given = unit_of(pair.a.dtype), self._inputs.get(_call_of(pair), ())
        if pair.a.kind != "output" or pair.a.dtype != pair.b.dtype or unit <= NARROW or not given:
            return False
        is_more = errors.rel_l2 > _ONE_OPERATION * unit or errors.part_rel > 2 * _ONE_OPERATION * unit
        return is_more and pair.a.site not in self._with_modules and all(each.is_equal for _, each in given)

    def _floor(self, pair: ValuePair, value: ComparedValue, modelled: float) -> tuple[float, float | None]:
        """Return the floor, and the noise of rows and channels if noise was measured."""
        measured = self._noise.get(_place_in_a(pair))
        if not measured:
            return modelled, None
        unit = unit_of(value.dtype_a, value.dtype_b)
        if value.dtype_b in measured and value.dtype_b != value.dtype_a:
            whole, parts = measured[value.dtype_b]
            return max(whole, unit), parts
        whole, parts = (max(of) for of in zip(*measured.values(), strict=True))
        # Noise is that of A: where B has a coarser dtype than any noise run, its rounding has to be modelled.
        if unit_of(value.dtype_b) > unit_of(value.dtype_a):
            return max(whole, modelled), None
        return max(whole, unit), parts

    def _error(self, value: ComparedValue) -> float:
        """Return the relative error; of gradients that are nearly zero, beside the usual ones."""
        errors, usual = value.errors, self._usual.get(value.kind, 0.0)
        if value.kind not in BACKWARD or errors.rms_a >= _NEAR_ZERO * usual:
            return errors.rel_l2
        lost = errors.rms_a * errors.rel_l2 if errors.norm_a else errors.norm_b / math.sqrt(max(errors.count, 1))
        return lost / usual

    def _why_doubted(self, pair: ValuePair, error: float, norm: float, history: _History) -> str:
        """Return why an error beyond the modelled rounding may be rounding all the same; nothing if it is not."""
        if not math.isfinite(error):
            return ""
        if error <= _STEADY * history.rel:
            return _BY_DEPTH
        if pair.a.kind != "output":
            return ""
        given = self._inputs.get(_call_of(pair), ())
        for one, errors in given:
            if errors.is_equal or not errors.rel_l2 or not math.isfinite(errors.rel_l2):
                continue
            is_passed_on = error * norm <= _PASSED_ON * errors.rel_l2 * errors.norm_a
            if is_passed_on or error * left_by_cancellation(one) <= _AMPLIFIED * errors.rel_l2:
                return _BY_INPUT
        return ""

    def _is_tie(self, pair: ValuePair, errors: TensorErrors) -> bool:
        """Return whether whole numbers differ in a few places, and were chosen by numbers that differ by rounding."""
        if unit_of(pair.a.dtype, pair.b.dtype) or not self._history[False].rel:
            return False
        given = [each.is_equal for one, each in self._inputs.get(_call_of(pair), ()) if unit_of(one.a.dtype)]
        if pair.a.kind == "output" and given and all(given):
            return False
        if pair.a.read is None or pair.b.read is None:
            return True  # fingerprints do not say how many
        return float((pair.a.read() != pair.b.read()).float().mean()) < _FEW

    def _judge_parts(self, value: ComparedValue, noise: float | None, history: _History) -> None:
        errors = value.errors
        floor = max(_PARTS * value.floor, noise or 0.0)
        if not value.floor or not errors.part_rel or (noise is None and history.explains_part(errors)):
            return
        verdict, ratio = verdict_on(errors.part_rel, floor)
        if verdict == WITHIN:
            return
        is_wrong = ratio > _WRONG_PART or errors.part_rel > _LARGE_PART
        if not is_wrong and value.verdict != WITHIN:
            return
        value.ratio = ratio
        value.verdict = WRONG if is_wrong else UNSURE
        value.doubt = "" if is_wrong else _BY_PART
        value.is_in_part = True


def _call_of(pair: ValuePair) -> tuple[Any, ...]:
    return pair.a.site, pair.a.step, pair.a.call, max(pair.a.rank, pair.b.rank)


def _usual_sizes(measured: Sequence[tuple[str, TensorErrors]]) -> dict[str, float]:
    """Return the median root mean square of each kind."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for kind, errors in measured:
        sizes[kind].append(errors.rms_a)
    return {kind: statistics.median(of_kind) for kind, of_kind in sizes.items()}


def noise_floors(measured: Sequence[Sequence[tuple[ValuePair, TensorErrors]]]) -> NoiseFloors:
    """Return the largest errors at each place of several runs that differ from A by rounding alone, by their dtype."""
    found: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for of_run in measured:
        for pair, errors in of_run:
            # A run that is A to the bit at this place, as one that was repeated on a CPU, measures no rounding.
            if not errors.mismatched and not errors.is_equal and math.isfinite(errors.rel_l2):
                of_place = found[_place_in_a(pair)]
                whole, parts = of_place.get(pair.b.dtype, (0.0, 0.0))
                of_place[pair.b.dtype] = max(whole, errors.rel_l2), max(parts, errors.part_rel)
    return dict(found)
