"""Define what was found for one pair of values: errors, floor, verdict, and where it first differs.

`compare_values` makes these, `Comparison` holds them, and the table and the page show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookline.debug.compare.rounding import WITHIN
from hookline.debug.compare.tensor_errors import TensorErrors

__all__ = ["Blame", "ComparedValue"]


@dataclass(slots=True)
class ComparedValue:
    """One tensor of A beside the one of B that belongs to it."""

    site: str
    kind: str
    leaf: str
    step: int
    call: int
    rank: int
    order: int
    """Its place in the run: lower came first."""
    shape: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    errors: TensorErrors
    floor: float = 0.0
    """The relative error that rounding makes here."""
    ratio: float = 0.0
    """How many times the floor the error is."""
    verdict: str = WITHIN
    """``"within rounding"``, ``"worse than rounding by N×"``, ``"wrong"``, or ``"unsure"``."""
    doubt: str = ""
    """Why it is unsure."""
    is_in_part: bool = False
    """Whether the verdict is on one row or channel, which is lost in the norm of the whole."""
    is_unsure: bool = False
    """Whether it is not known if it counts as the same."""
    is_same: bool = True
    """Whether it counts as the same: by the user's thresholds, or, where there are none, within rounding."""
    where: str = ""
    """The first row or position that differs."""
    follows: str = ""
    """The module whose error this one follows from."""
    how: str = ""
    """How the two were paired, where it was not by name and call alone."""
    is_sure: bool = True
    """Whether it is known that the two belong together."""
    other_shape: str = ""
    """What the two shapes are, if they differ, so that nothing else could be compared."""

    @property
    def error(self) -> float:
        """The relative error: the norm of the difference over the norm of A."""
        return self.errors.rel_l2

    @property
    def module(self) -> str:
        """The module it belongs to: of a parameter, the one that owns it."""
        return self.site.rpartition(".")[0] if self.kind in ("parameter", "param_grad") else self.site

    @property
    def label(self) -> str:
        """Site, kind, leaf, step, call and rank, as one text."""
        parts = [self.kind if not self.leaf else f"{self.kind} {self.leaf}", f"step {self.step}", f"call {self.call}"]
        if self.rank:
            parts.append(f"rank {self.rank}")
        return f"{self.site or '(the model)'} ({', '.join(parts)})"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        errors = self.errors
        return {
            "site": self.site, "kind": self.kind, "leaf": self.leaf, "step": self.step, "call": self.call,
            "rank": self.rank, "order": self.order, "shape": list(self.shape), "dtypes": [self.dtype_a, self.dtype_b],
            "max_abs": errors.max_abs, "mean_abs": errors.mean_abs, "rel_l2": errors.rel_l2,
            "rel_diff": errors.rel_diff, "not_finite": [errors.bad_a, errors.bad_b], "equal": errors.is_equal,
            "estimate": errors.is_estimate, "floor": self.floor, "verdict": self.verdict, "same": self.is_same,
            "doubt": self.doubt, "part_rel": errors.part_rel,
            "where": self.where, "follows": self.follows, "how": self.how, "sure": self.is_sure,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blame:
    """The module in which two runs part."""

    module: str
    """Its name; empty for the model itself."""
    why: str
    """What was seen, in a sentence."""
    value: ComparedValue
    """The first value that differs."""
    outside: str = ""
    """What is to blame if it is no module: ``"the inputs"``, ``"the loss"``, ``"the optimizer"``, …"""

    @property
    def is_input(self) -> bool:
        """Whether the runs were given other inputs."""
        return self.outside == "the inputs"

    @property
    def name(self) -> str:
        """What is to blame, in words."""
        return self.outside or self.module or "the model"
