"""Estimate how far two tensors are apart from their fingerprints, where the tensors themselves were not kept.

`compare_values` calls `sketch_errors`; what it returns says that it is an estimate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from hookline.debug.compare.tensor_errors import TensorErrors

if TYPE_CHECKING:
    from hookline.debug.trace.trace_record import Fingerprint

__all__ = ["sketch_errors"]

_MEAN_OF_NORMAL: Final = math.sqrt(2 / math.pi)
"""The mean of |x| of normal numbers whose mean square is one."""


def sketch_errors(a: Fingerprint, b: Fingerprint, *, same_dtype: bool) -> TensorErrors:
    """Return estimates: the norm of the difference from sketches; ``max_abs`` is no more than a lower bound.

    Hashes are of bits, and so can be compared if both have the ``same_dtype``.
    """
    mismatched = abs(a.nan - b.nan) + abs(a.inf - b.inf)
    if same_dtype and a.hash == b.hash and not mismatched:
        bad = a.nan + a.inf
        return TensorErrors(
            a.count, norm_a=a.norm, norm_b=b.norm, bad_a=bad, bad_b=bad, is_equal=True, is_estimate=True
        )
    distance = a.distance(b)
    is_unknown = math.isnan(distance)  # sums were too large for a sketch: norms alone say that something differs
    if is_unknown:
        distance = math.hypot(a.norm - b.norm, (a.mean - b.mean) * math.sqrt(a.count))
    squares = a.norm**2 + b.norm**2
    scale = distance / math.sqrt(a.count) if a.count else 0.0
    found = TensorErrors(
        a.count,
        max_abs=max(abs(a.absmax - b.absmax), scale),
        mean_abs=_MEAN_OF_NORMAL * scale,
        rel_l2=distance / a.norm if a.norm else (math.inf if distance else 0.0),
        rel_diff=distance**2 / squares if squares else 0.0,
        norm_a=a.norm,
        norm_b=b.norm,
        bad_a=a.nan + a.inf,
        bad_b=b.nan + b.inf,
        mismatched=mismatched,
        is_estimate=True,
        is_blind=is_unknown or (same_dtype and a.nan + a.inf > 0),
    )
    return found
