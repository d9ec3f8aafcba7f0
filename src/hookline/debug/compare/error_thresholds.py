"""Say which errors a user allows where: tolerances for all sites, bounds for those that a pattern matches.

`compare` and ``hookline compare`` make an `AllowedErrors` of their options; `compare_values` asks it about each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.debug.compare.tensor_errors import TensorErrors, exceeds_tolerance
from hookline.errors import OptionError
from hookline.messages import unknown_name_text
from hookline.sites.targets import name_matcher

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AllowedErrors", "parse_thresholds"]

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

    def is_allowed(self, site: str, errors: TensorErrors, tensors: Callable[[], tuple[Tensor, Tensor] | None]) -> bool:
        """Return whether the user allows these errors at ``site``; raise nothing where no option speaks of it."""
        bounds = self.bounds_for(site)
        if errors.mismatched:  # no bound allows NaN or infinity in one run alone, not even an infinite one
            return False
        if bounds is not None:
            return all(getattr(errors, field) <= limit for field, limit in bounds.items())
        atol, rtol = self._atol or 0.0, self._rtol or 0.0
        if errors.max_abs <= atol:
            return True
        pair = tensors() if rtol else None
        return pair is not None and not exceeds_tolerance(*pair, atol, rtol)

    def has_say(self, site: str) -> bool:
        """Return whether an option of the user decides about ``site``; if not, the noise does."""
        return self._atol is not None or self._rtol is not None or self.bounds_for(site) is not None

    def bounds_for(self, site: str) -> Mapping[str, float] | None:
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
        if not sign or not pattern:
            raise OptionError(f"--threshold {text!r}: write PATTERN=BOUND, such as 'layers.#.mlp=1e-3'.")
        found[pattern] = _parsed(text, bounds)
    return found


def _parsed(text: str, bounds: str) -> float | dict[str, float]:
    try:
        if ":" not in bounds:
            return float(bounds)
        parts = (part.split(":", 1) for part in bounds.split(","))
        return {name.strip(): float(limit) for name, limit in parts}
    except ValueError:
        raise OptionError(
            f"--threshold {text!r}: {bounds!r} is neither a number nor MEASURE:NUMBER[,MEASURE:NUMBER]; "
            f"measures: {', '.join(_MEASURES)}."
        ) from None
