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


def sketch_errors(
    a: Fingerprint,
    b: Fingerprint,
    *,
    same_sketches: bool,
    same_dtype: bool,
    same_hashes: bool = True,
    exact_hashes: bool = True,
) -> TensorErrors:
    """Return estimates: the norm of the difference from sketches, or, without, no less than the norms differ.

    ``same_sketches`` says whether both were made with the same seed, ``same_hashes`` and ``same_dtype`` whether hashes
    can be compared, too, and ``exact_hashes`` whether hashes are of all bits, not of rounded numbers.
    ``max_abs`` is no more than a lower bound.
    """
    mismatched = abs(a.nan - b.nan) + abs(a.inf - b.inf)
    can_hash = same_sketches and same_hashes and same_dtype
    if can_hash and a.hash == b.hash and not mismatched:
        bad = a.nan + a.inf
        return TensorErrors(
            a.count, norm_a=a.norm, norm_b=b.norm, bad_a=bad, bad_b=bad, is_equal=exact_hashes, is_estimate=True
        )
    distance = a.distance(b) if same_sketches else math.nan
    if math.isnan(distance):
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
        is_blind=(can_hash and a.nan + a.inf > 0) or not same_sketches,
    )
    return found
