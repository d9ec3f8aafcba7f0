"""Tell rounding from a bug: what error each pair may have, by the user's word, by noise or by a model, and its verdict.

`compare` calls `judge` with all pairs that `measure` has measured, and makes an `AllowedErrors` of the user's options.
`bisect` asks the `RoundingModel` too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hookline.debug.compare.key import BACKWARD, UNSURE, WITHIN, WRONG, Pair, TensorErrors, ValueKey, names_around
from hookline.debug.compare.measure import exceeds_tolerance, first_difference, left_by_cancellation
from hookline.errors import OptionError
from hookline.messages import unknown_name_text
from hookline.sites.targets import name_matcher

# -- rounding ------------------------------------------------------------------------------------------------------

_UNITS: Final = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "complex64": 2.0**-24,
    "complex128": 2.0**-53, "complex32": 2.0**-11, "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
"""The largest relative error of rounding one number."""
_NARROW: Final = 2.0**-12
"""Dtypes with a unit above this are summed in float32, so that their errors grow less from operation to operation."""
ALLOWED: Final = 3.0
"""Up to this many times the floor is rounding: two runs each have their own, and the floor is of one."""
_TOO_MUCH: Final = 64.0
"""From this many times the floor on it is a bug."""
_LARGE: Final = 0.25
"""An error of a quarter of the values is a bug even where rounding is coarse, unless it is within rounding."""
_ESTIMATE: Final = 2e-6
"""Sketches are float32: below this part of the norm they say nothing."""


class RoundingModel:
    """Says how large rounding errors are at a place of a run, of the dtypes that came before and the depth.

    Give it the values in the order of the calls. Measured on GPT-2 and Llama of 12 layers (300 modules, weights of the
    usual size and five times larger) against float32: bfloat16 and float16 end 3 to 6 units apart, and float32 ends 7
    to 19 units from float64; gradients are up to 11 and 36.
    """

    def __init__(self) -> None:
        self._unit = 0.0
        self._place = 0
        self._inside: dict[str, float] = {}
        """The coarsest unit of what was seen of each module and of the modules in it."""

    def next_floor(
        self,
        dtype_a: str,
        dtype_b: str,
        *,
        site: str = "",
        kind: str = "output",
        is_equal: bool = False,
        has_inputs: bool = False,
    ) -> float:
        """Return the relative error that rounding has made by the next value; 0 for whole numbers.

        What is the same to the bit in both runs has brought no error to what comes after it, whatever its dtype. It
        counts only for the module that made it and for the code around it.
        """
        own = _unit_of(dtype_a, dtype_b)
        if not own:
            return 0.0
        if not is_equal:
            self._unit = max(self._unit, own)
        # Where its inputs were not compared, and for an input itself, the code around the module may be what rounds.
        around = site if kind == "output" and has_inputs else site.rpartition(".")[0]
        for name in {site, "", *names_around(site)}:
            self._inside[name] = max(self._inside.get(name, 0.0), own)
        unit = max(self._unit, own, self._inside.get(around, 0.0))
        self._place += 1
        growth = math.sqrt(self._place)
        return unit * (2 + growth / 4 if unit > _NARROW else 4 + growth)


def _unit_of(*dtypes: str) -> float:
    """Return the unit of the coarsest dtype; 0 for whole numbers."""
    return max((_UNITS.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def unseen_below(floor: float, *, is_estimate: bool = False) -> float:
    """Return the relative error up to which the verdict is that it is rounding."""
    return max(ALLOWED * floor, _ESTIMATE if is_estimate else 0.0)


def verdict_on(error: float, floor: float, *, is_estimate: bool = False) -> tuple[str, float]:
    """Return the verdict on a relative error, and how many times the floor it is."""
    if not error:
        return WITHIN, 0.0
    if is_estimate:
        floor = max(floor, _ESTIMATE / ALLOWED)
    ratio = error / floor if floor else math.inf
    if ratio <= ALLOWED:
        return WITHIN, ratio
    if not math.isfinite(ratio) or ratio > _TOO_MUCH or error > _LARGE:
        return WRONG, ratio
    return f"worse than rounding by {ratio:.0f}×", ratio


# -- noise ---------------------------------------------------------------------------------------------------------


class _Noise(NamedTuple):
    """What was measured at one place: the relative error, the largest of a row or channel, and the coarsest unit."""

    whole: float = 0.0
    part: float = 0.0
    unit: float = 0.0


NoiseFloors: TypeAlias = Mapping[ValueKey, _Noise]
"""The noise that was measured, by the key that A's value was recorded with."""


def noise_floors(runs: Iterable[Sequence[Pair]]) -> NoiseFloors:
    """Return the largest errors at each place of several runs that differ from A by rounding alone."""
    found: dict[ValueKey, _Noise] = {}
    for pair in itertools.chain(*runs):
        errors = pair.errors
        # A run that is A to the bit at this place, as one that was repeated on a CPU, measures no rounding.
        if pair.is_measured and not errors.mismatched and not errors.is_equal and math.isfinite(errors.rel_l2):
            a, b = pair.both
            here = _Noise(errors.rel_l2, errors.part_rel, _unit_of(a.dtype, b.dtype))
            found[a.key] = _Noise(*map(max, here, found.get(a.key, _Noise())))
    return found


# -- what users allow ----------------------------------------------------------------------------------------------

_MEASURES: Final = {"rel": "rel_l2", "rel_l2": "rel_l2", "rel_diff": "rel_diff", "max_abs": "max_abs",
                    "mean_abs": "mean_abs"}  # fmt: skip
"""What a bound may be on: the name that users write, and the field of `TensorErrors`."""


class AllowedErrors:
    """The errors that count as the same.

    Recipe: ``AllowedErrors(atol=1e-5, thresholds={"layers.#.mlp": 1e-3, "lm_head": {"max_abs": 0.1}})``.
    """

    def __init__(
        self,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        thresholds: Mapping[str, float | Mapping[str, float]] | None = None,
    ) -> None:
        self._atol = _checked_bound(atol, "atol")
        self._rtol = _checked_bound(rtol, "rtol")
        self._bounds = [_bounds_of(pattern, given) for pattern, given in (thresholds or {}).items()]
        self._used: set[str] = set()

    def allows(self, pair: Pair) -> bool | None:
        """Return whether the user allows the errors of a pair; None if no option speaks of it: noise decides."""
        bounds = self._bounds_for(pair.site)
        if bounds is None and self._atol is None and self._rtol is None:
            return None
        errors = pair.errors
        if errors.mismatched:  # no bound allows NaN or infinity in one run alone, not even an infinite one
            return False
        if bounds is not None:
            return all(getattr(errors, field) <= limit for field, limit in bounds.items())
        atol, rtol = self._atol or 0.0, self._rtol or 0.0
        if errors.max_abs <= atol:
            return True
        a, b = pair.both
        return bool(rtol) and pair.has_tensors and not exceeds_tolerance(a.tensor(), b.tensor(), atol, rtol)

    def _bounds_for(self, site: str) -> Mapping[str, float] | None:
        """Return the bounds of the first pattern that matches ``site``; None if none does."""
        for pattern, matches, bounds in self._bounds:
            if matches(site):
                self._used.add(pattern)
                return bounds
        return None

    def to_json(self) -> dict[str, Any]:
        """Return what was given: tolerances, or None, and bounds by pattern and measure."""
        return {
            "atol": self._atol,
            "rtol": self._rtol,
            "thresholds": {one: dict(given) for one, _, given in self._bounds},
        }

    def unused_patterns(self) -> list[str]:
        """Return the patterns that have matched nothing so far."""
        return [pattern for pattern, _, _ in self._bounds if pattern not in self._used]


def _bounds_of(pattern: str, given: Any) -> tuple[str, Callable[[str], Any], dict[str, float]]:
    wanted = given if isinstance(given, Mapping) else {"rel": given}
    for name in wanted:
        if name not in _MEASURES:
            raise OptionError(f"The threshold of {pattern!r} has {name!r}.{unknown_name_text(str(name), [*_MEASURES])}")
    bounds = {_MEASURES[name]: _checked_bound(limit, pattern) or 0.0 for name, limit in wanted.items()}
    return pattern, name_matcher(pattern), bounds


def _checked_bound(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise OptionError(f"The bound of {name!r} has to be a number of at least 0, such as 1e-3; got {value!r}.")
    return float(value)


def parse_thresholds(texts: Iterable[str]) -> dict[str, float | Mapping[str, float]]:
    """Return the thresholds that a command line gives: ``PATTERN=1e-3`` or ``PATTERN=max_abs:0.1,rel:1e-3``."""
    found: dict[str, float | Mapping[str, float]] = {}
    for text in texts:
        pattern, sign, bounds = text.rpartition("=")
        parts = [part.split(":", 1) for part in bounds.split(",")]
        try:
            found[pattern] = float(bounds) if ":" not in bounds else {name.strip(): float(at) for name, at in parts}
        except ValueError:
            sign = ""
        if not sign or not pattern:
            raise OptionError(
                f"--threshold {text!r}: write PATTERN=BOUND, such as 'layers.#.mlp=1e-3', or "
                f"PATTERN=MEASURE:BOUND[,MEASURE:BOUND]; measures: {', '.join(_MEASURES)}."
            )
    return found


# -- verdicts ------------------------------------------------------------------------------------------------------

_MAX_PLACES: Final = 60
"""For so many values, in the order of the calls, the first place that differs is looked for."""
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
_FEW: Final = 0.25
"""Below this share, entries of whole numbers may have flipped by rounding."""
_ONE_OPERATION: Final = 3.0
"""So many units of a 16-bit dtype one module may be off that is given the same; two times as many in one channel."""

_GROWN: Final = "rounding of what it was given may have grown to this; measure it with noise="
_FEW_ENTRIES: Final = (
    "few of its entries are off, or it is given the same and is off by more than one operation rounds, or a near tie "
    "of whole numbers (top-k, argmax, round) came out otherwise; measure it with noise=, or choose alike in both"
)
_UNTOLD: Final = (
    "fingerprints do not tell it: there is NaN or infinity in both, or sums were too large; trace with tensors="
)


def judge(pairs: Sequence[Pair], allowed: AllowedErrors, noise: NoiseFloors) -> None:
    """Set the verdict on each pair; they are measured, and come in the order of the calls."""
    found = _Judge(pairs, noise)
    places = _MAX_PLACES
    for pair in pairs:
        found.judge(pair)
        says = allowed.allows(pair)
        pair.is_same = pair.verdict == WITHIN if says is None else says
        pair.is_unsure = says is None and pair.verdict == UNSURE
        if not pair.is_same and places and not pair.errors.is_estimate:
            places -= 1
            pair.where = _where(pair)


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


class _Judge:
    """Says of each pair whether its error is rounding, may be amplified rounding, or is a bug."""

    def __init__(self, pairs: Sequence[Pair], noise: NoiseFloors) -> None:
        self._noise = noise
        self._model = RoundingModel()
        self._inputs: dict[ValueKey, list[Pair]] = defaultdict(list)
        sizes: dict[str, list[float]] = defaultdict(list)
        for pair in pairs:
            sizes[pair.kind].append(pair.errors.rms_a)
            if pair.kind == "input":
                self._inputs[pair.key.of_call].append(pair)
        self._usual = {kind: statistics.median(of_kind) for kind, of_kind in sizes.items()}
        """The median root mean square of each kind."""
        self._with_modules = {"", *(name for pair in pairs for name in names_around(pair.site))}
        self._history = {False: _History(), True: _History()}
        self._has_tie = False
        """Whether a whole number has flipped by rounding: rows that follow from it differ by any amount."""
        self._is_apart = False
        """Whether a value was beyond doubt not rounding: what comes after it is given other values."""

    def judge(self, pair: Pair) -> None:
        """Set the floor, the verdict, and why it is unsure if it is."""
        errors = pair.errors
        modelled = self._model.next_floor(
            *pair.dtypes, site=pair.site, kind=pair.kind, is_equal=errors.is_equal,
            has_inputs=pair.key.of_call in self._inputs,
        )  # fmt: skip
        pair.floor, noise_of_parts = self._floor(pair, modelled)
        if errors.mismatched:
            pair.verdict, pair.ratio, self._is_apart = WRONG, math.inf, True
            return
        error = self._error(pair)
        pair.verdict, pair.ratio = verdict_on(error, pair.floor, is_estimate=errors.is_estimate)
        history = self._history[pair.kind in BACKWARD]
        if pair.verdict != WITHIN and noise_of_parts is None and not self._is_apart:
            _doubt(pair, self._why_rounding(pair, error, history))
        if pair.verdict not in (WRONG, UNSURE):
            self._judge_parts(pair, noise_of_parts, history)
        if pair.verdict == WITHIN and errors.is_blind:
            _doubt(pair, _UNTOLD)
        if pair.verdict == WITHIN and noise_of_parts is None and self._is_more_than_one_operation(pair):
            _doubt(pair, _FEW_ENTRIES)
        if pair.verdict in (WITHIN, UNSURE) and error == errors.rel_l2 and math.isfinite(error):
            history.add(errors)
        self._is_apart = self._is_apart or pair.verdict not in (WITHIN, UNSURE)

    def _floor(self, pair: Pair, modelled: float) -> tuple[float, float | None]:
        """Return the floor, and the noise of rows and channels if noise was measured."""
        a, b = pair.both
        measured = self._noise.get(a.key)
        if measured is None:
            return modelled, None
        unit = _unit_of(a.dtype, b.dtype)
        if unit > measured.unit:  # B has a coarser dtype than any noise run: its rounding has to be modelled
            return max(measured.whole, modelled), None
        return max(measured.whole, unit), measured.part

    def _error(self, pair: Pair) -> float:
        """Return the relative error; of gradients that are nearly zero, beside the usual ones."""
        errors, usual = pair.errors, self._usual.get(pair.kind, 0.0)
        if pair.kind not in BACKWARD or errors.rms_a >= _NEAR_ZERO * usual:
            return errors.rel_l2
        lost = errors.rms_a * errors.rel_l2 if errors.norm_a else errors.norm_b / math.sqrt(max(errors.count, 1))
        return lost / usual

    def _why_rounding(self, pair: Pair, error: float, history: _History) -> str:
        """Return why an error beyond the modelled rounding may be rounding all the same; nothing if it is not."""
        self._has_tie = self._has_tie or self._is_tie(pair)
        if self._has_tie:
            return _FEW_ENTRIES
        if not math.isfinite(error):
            return ""
        if error <= _STEADY * history.rel:
            return _GROWN
        if pair.kind != "output":
            return ""
        for given in self._inputs.get(pair.key.of_call, ()):
            errors = given.errors
            if errors.is_equal or not errors.rel_l2 or not math.isfinite(errors.rel_l2):
                continue
            is_passed_on = error * pair.errors.norm_a <= _PASSED_ON * errors.rel_l2 * errors.norm_a
            if is_passed_on or error * left_by_cancellation(given.both[0]) <= _AMPLIFIED * errors.rel_l2:
                return _GROWN
        return ""

    def _is_tie(self, pair: Pair) -> bool:
        """Return whether whole numbers differ in a few places, and were chosen by numbers that differ by rounding."""
        if _unit_of(*pair.dtypes) or not self._history[False].rel:
            return False
        given = [one.errors.is_equal for one in self._inputs.get(pair.key.of_call, ()) if _unit_of(one.dtypes[0])]
        if pair.kind == "output" and given and all(given):
            return False
        if not pair.has_tensors:
            return True  # fingerprints do not say how many
        a, b = pair.both
        return float((a.tensor() != b.tensor()).float().mean()) < _FEW

    def _judge_parts(self, pair: Pair, noise: float | None, history: _History) -> None:
        """Judge the row or channel that is off most, which the norm of a large tensor hides."""
        errors = pair.errors
        if not pair.floor or not errors.part_rel or (noise is None and history.explains_part(errors)):
            return
        verdict, ratio = verdict_on(errors.part_rel, max(_PARTS * pair.floor, noise or 0.0))
        is_wrong = (ratio > _TOO_MUCH or errors.part_rel > _LARGE_PART) and not self._has_tie
        if verdict == WITHIN or (not is_wrong and pair.verdict != WITHIN):
            return
        pair.ratio, pair.is_in_part = ratio, True
        if is_wrong:
            pair.verdict = WRONG
        else:
            _doubt(pair, _FEW_ENTRIES)

    def _is_more_than_one_operation(self, pair: Pair) -> bool:
        """Return whether a 16-bit output is off by more than one operation rounds, of inputs that are the same.

        The depth of the model does not matter then. Modules that call others are more than one operation.
        """
        (dtype_a, dtype_b), given = pair.dtypes, self._inputs.get(pair.key.of_call, ())
        unit, errors = _unit_of(dtype_a), pair.errors
        if pair.kind != "output" or dtype_a != dtype_b or unit <= _NARROW or not given:
            return False
        is_more = errors.rel_l2 > _ONE_OPERATION * unit or errors.part_rel > 2 * _ONE_OPERATION * unit
        return is_more and pair.site not in self._with_modules and all(one.errors.is_equal for one in given)


def _doubt(pair: Pair, why: str) -> None:
    """Call a pair unsure, if there is a reason."""
    if why:
        pair.verdict, pair.doubt = UNSURE, why


def _where(pair: Pair) -> str:
    """Return the first row or position that differs by more than rounding."""
    a, b = pair.both
    tensors = a.tensor(), b.tensor()
    # A row or channel that is off is small beside the whole: the limit is then that of most of its own entries.
    limit = 8 * pair.floor * pair.errors.rms_a if not pair.is_in_part else pair.errors.max_abs / 16
    index = first_difference(*tensors, limit) or first_difference(*tensors, 0.0)
    if index is None:
        return ""
    row = a.rows.keys[index[0]] if pair.is_by_rows and a.rows is not None else None
    return f"[{', '.join(map(str, index))}]" if row is None else row.label
