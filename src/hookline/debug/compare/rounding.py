"""Tell rounding from a bug: the noise that each site may have, and the verdict on an error beside it.

`compare_values` asks `RoundingModel` for a floor where no noise was measured, and `verdict_on` for the words.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = [
    "ALLOWED", "NARROW", "UNSURE", "WITHIN", "WRONG", "RoundingModel", "names_around", "unit_of", "unseen_below",
    "verdict_on",
]  # fmt: skip

WITHIN: Final = "within rounding"
WRONG: Final = "wrong"
UNSURE: Final = "unsure"

_UNITS: Final = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "complex64": 2.0**-24,
    "complex128": 2.0**-53, "complex32": 2.0**-11, "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
"""The largest relative error of rounding one number."""
NARROW: Final = 2.0**-12
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
        units = [_UNITS[dtype] for dtype in (dtype_a, dtype_b) if dtype in _UNITS]
        if not units:
            return 0.0
        own = max(units)
        if not is_equal:
            self._unit = max(self._unit, own)
        # Where its inputs were not compared, and for an input itself, the code around the module may be what rounds.
        around = site if kind == "output" and has_inputs else site.rpartition(".")[0]
        for name in (site, *names_around(site)):
            self._inside[name] = max(self._inside.get(name, 0.0), own)
        unit = max(self._unit, own, self._inside.get(around, 0.0))
        self._place += 1
        growth = math.sqrt(self._place)
        return unit * (2 + growth / 4 if unit > NARROW else 4 + growth)


def names_around(site: str) -> list[str]:
    """Return the names of the modules around a site; the model's is empty."""
    parts = site.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def unit_of(*dtypes: str) -> float:
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
