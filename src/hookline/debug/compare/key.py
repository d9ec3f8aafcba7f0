"""Define where a value was seen, the value itself, and a value of one run beside that of another.

A trace stores `Value`s, `values` reads every other source into them, `rules` pairs them by `ValueKey`; `measure`,
`judge` and `blame` fill in the `Pair`s, and `result` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from hookline.errors import TraceError
from hookline.tables import THE_MODEL

if TYPE_CHECKING:
    from torch import Tensor

KINDS: Final = ("output", "input", "output_grad", "input_grad", "parameter", "param_grad")
"""What a value is of: what a module returns or takes, gradients of these, a parameter, its gradient."""
PARAMETERS: Final = ("parameter", "param_grad")
"""The kinds that belong to a parameter: they have no rows of a batch."""
BACKWARD: Final = ("output_grad", "input_grad", "param_grad")

WITHIN: Final = "within rounding"
WRONG: Final = "wrong"
UNSURE: Final = "unsure"


class ValueKey(NamedTuple):
    """Where a value was seen; values of two runs that have one key are compared."""

    rank: int
    step: int
    kind: str
    """One of `KINDS`."""
    site: str
    """The name of the module or parameter, without the keys of wrappers; empty for the model itself."""
    leaf: str = ""
    """The path inside of an output or input (``"0"``, ``"logits"``, ``"kwargs.mask"``); empty if it is one tensor."""
    call: int = 0
    """Which call of the site within the step, from 0; of a gradient, the call it belongs to."""

    @property
    def slot(self) -> ValueKey:
        """The key without step and call: what a site has once in each call."""
        return self._replace(step=0, call=0)

    @property
    def of_call(self) -> ValueKey:
        """The key without kind and leaf: the call itself."""
        return self._replace(kind="", leaf="")

    @property
    def module(self) -> str:
        """The module it belongs to: of a parameter, the one that owns it."""
        return self.site.rpartition(".")[0] if self.kind in PARAMETERS else self.site

    @property
    def label(self) -> str:
        """All of it as one text."""
        kind = f"{self.kind} {self.leaf}" if self.leaf else self.kind
        rank = f", rank {self.rank}" if self.rank else ""
        return f"{self.site or THE_MODEL} ({kind}, step {self.step}, call {self.call}{rank})"


class _AtKey:
    """Gives what lies at a `ValueKey` the parts of its key."""

    __slots__ = ()
    key: ValueKey

    @property
    def site(self) -> str:
        """The name of the module or parameter; empty for the model itself."""
        return self.key.site

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.key.kind

    @property
    def leaf(self) -> str:
        """The path inside of an output or input."""
        return self.key.leaf

    @property
    def step(self) -> int:
        """The step."""
        return self.key.step

    @property
    def call(self) -> int:
        """Which call of the site within the step."""
        return self.key.call

    @property
    def rank(self) -> int:
        """The rank."""
        return self.key.rank

    @property
    def module(self) -> str:
        """The module it belongs to: of a parameter, the one that owns it."""
        return self.key.module

    @property
    def label(self) -> str:
        """Where it is, as one text."""
        return self.key.label


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A summary of one tensor; of a distributed one, of this rank's part.

    ``mean``, ``norm``, ``absmax`` and ``sketch`` are of the finite numbers: NaN and Inf count as 0 in them, and are
    counted apart. Sums are of float32 blocks, added up in float64: ``mean`` and ``norm`` are right to about 2e-6 of
    the norm (1e-12 for float64 tensors).
    """

    count: int
    """How many numbers the tensor has."""
    mean: float
    norm: float
    """The square root of the sum of squares."""
    absmax: float
    nan: int
    """How many NaN there are."""
    inf: int
    """How many infinities there are."""
    hash: int
    """64 bits that depend on the bits and positions of all numbers. Equal tensors of one dtype and shape have equal
    hashes; unequal ones differ but for 1 in 2^60."""
    sketch: tuple[float, ...] = ()
    """Sums of the numbers with random signs, in as many groups as it is long. The signs depend on
    ``count`` alone, so that sketches are linear: sketch(a) - sketch(b) = sketch(a - b)."""

    def distance(self, other: Fingerprint) -> float:
        """Return an estimate of the norm of the difference of both tensors, from their sketches alone.

        The estimate is unbiased in its square. With 16 groups the true norm lies within 0.6 to 1.6 of it in 95 of 100
        cases, and rounding of the sketches hides differences below about 1e-6 of the norm. NaN without sketches, or for
        other counts: compare hashes and norms there.
        """
        if self.count != other.count or not self.sketch or len(self.sketch) != len(other.sketch):
            return math.nan
        return math.hypot(*(one - two for one, two in zip(self.sketch, other.sketch, strict=True)))


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """How a distributed tensor (DTensor) lies on its mesh; the value's own shape is that of this rank's part."""

    placements: tuple[str, ...]
    """One for each dimension of the mesh: ``"Shard(0)"``, ``"Replicate()"``, ``"Partial(sum)"``, or
    ``"StridedShard(0, 2)"``: a shard of what later dimensions of the mesh have cut before, into 2 parts."""
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    """Where this rank is on the mesh; empty if it is not on it."""


class RowKey(NamedTuple):
    """Whose a row of a tensor is: a request or sample, and the position of the token in its sequence."""

    request: str
    position: int | None
    """None if the row is of the request as a whole."""

    @property
    def label(self) -> str:
        """Both as one text."""
        return f"request {self.request}" + ("" if self.position is None else f", position {self.position}")


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys of all rows of a tensor: of its first ``dims`` dimensions, flattened to one."""

    dims: int
    keys: tuple[RowKey | None, ...]
    """None for padding."""
    columns: tuple[tuple[int, int], ...] = ()
    """Of rows that have a column for each token, as attention weights do: where the real ones begin, and how many."""


@dataclass(frozen=True, slots=True)
class Value(_AtKey):
    """One tensor of a run: where it was seen, its fingerprint, and how to read it."""

    key: ValueKey
    order: int
    """A running number: the values of one rank come in this order."""
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without ``torch.``: ``"bfloat16"``."""
    read: Callable[[], Tensor] | None = None
    """Returns the tensor; None if there is only the fingerprint."""
    fingerprint: Fingerprint | None = None
    """None if there is only the tensor."""
    rows: RowKeys | None = None
    """Whose its rows are; None if nobody has said, or it has no such rows."""
    placements: MeshPlacement | None = None
    """How a distributed tensor lies on its mesh; None for a plain one."""
    note: str = ""
    """How it was put together, where it is not as it was recorded."""

    def tensor(self) -> Tensor:
        """Return the tensor, mapped from its file; `TraceError` if there is none, or it cannot be read."""
        if self.read is None:
            raise TraceError(
                f"No tensor is stored for {self.label}, only its fingerprint. Trace again with tensors= naming it."
            )
        return self.read()


Values: TypeAlias = Mapping[ValueKey, Value]
"""The values of a run, by the keys under which they are compared; each keeps the key it was recorded with."""


@dataclass(frozen=True, slots=True)
class TensorErrors:
    """How far tensor ``b`` is from tensor ``a``, which is the reference."""

    count: int
    """How many entries were compared."""
    max_abs: float = 0.0
    mean_abs: float = 0.0
    rel_l2: float = 0.0
    """The norm of the difference over the norm of ``a``."""
    rel_diff: float = 0.0
    """One minus 2·Σab / Σ(a²+b²): 0 for equal tensors, 1 for orthogonal ones, 2 for opposite ones."""
    norm_a: float = 0.0
    norm_b: float = 0.0
    bad_a: int = 0
    """How many entries of ``a`` are NaN or infinite."""
    bad_b: int = 0
    mismatched: int = 0
    """How many entries are NaN or infinite in one tensor, and something else in the other."""
    is_equal: bool = False
    """Whether the two are the same to the last bit."""
    is_estimate: bool = False
    """Whether the figures come from fingerprints, not from the tensors."""
    is_blind: bool = False
    """Whether fingerprints cannot say if it is the same: NaN or infinity is in both, and the hashes differ."""
    part_rel: float = 0.0
    """The largest relative error of one row or channel; 0 where it was not measured."""
    part_abs: float = 0.0
    """The largest norm of the difference in one row or channel."""

    @property
    def rms_a(self) -> float:
        """The root of the mean square of ``a``."""
        return self.norm_a / math.sqrt(self.count) if self.count else 0.0


_UNMEASURED: Final = TensorErrors(0)


@dataclass(slots=True)
class Pair(_AtKey):
    """A value of A beside the one of B that belongs to it, and what was found; one of them may be missing."""

    key: ValueKey
    a: Value | None
    """None if only B has it."""
    b: Value | None
    how: str = ""
    """How the two were paired, where it was not by name and call alone."""
    is_by_rows: bool = False
    """Whether they were put together of rows, which lie in other places in B than in A."""
    why: str = ""
    """Why the two cannot be compared."""
    is_sure: bool = True
    """Whether it is known that the two belong together, so that a difference may be blamed on the site."""
    errors: TensorErrors = _UNMEASURED
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
    is_same: bool = True
    """Whether it counts as the same: by the user's thresholds, or, where there are none, within rounding."""
    is_unsure: bool = False
    """Whether it is not known if it counts as the same."""
    where: str = ""
    """The first row or position that differs."""
    follows: str = ""
    """What the error of this one follows from."""

    @property
    def is_measured(self) -> bool:
        """Whether the two were compared."""
        return self.errors is not _UNMEASURED

    @property
    def has_tensors(self) -> bool:
        """Whether both can be read, not only estimated."""
        return all(value is not None and value.read is not None for value in (self.a, self.b))

    @property
    def both(self) -> tuple[Value, Value]:
        """The two values; asked for only where both are there."""
        assert self.a is not None
        assert self.b is not None
        return self.a, self.b

    @property
    def order(self) -> int:
        """Its place in A: lower came first; -1 if A does not have it."""
        return -1 if self.a is None else self.a.order

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in A."""
        return () if self.a is None else self.a.shape

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes of both, such as ``"float32"``."""
        a, b = self.both
        return a.dtype, b.dtype

    @property
    def other_shape(self) -> str:
        """What the two shapes are, if they differ, so that nothing else could be compared."""
        is_both = self.a is not None and self.b is not None
        return self.why if is_both and self.both[0].shape != self.both[1].shape else ""

    @property
    def error(self) -> float:
        """The relative error: the norm of the difference over the norm of A."""
        return self.errors.rel_l2

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        errors = self.errors
        return {
            "site": self.site, "kind": self.kind, "leaf": self.leaf, "step": self.step, "call": self.call,
            "rank": self.rank, "order": self.order, "shape": list(self.shape), "dtypes": list(self.dtypes),
            "max_abs": errors.max_abs, "mean_abs": errors.mean_abs, "rel_l2": errors.rel_l2,
            "rel_diff": errors.rel_diff, "not_finite": [errors.bad_a, errors.bad_b], "equal": errors.is_equal,
            "estimate": errors.is_estimate, "floor": self.floor, "verdict": self.verdict, "same": self.is_same,
            "doubt": self.doubt, "part_rel": errors.part_rel,
            "where": self.where, "follows": self.follows, "how": self.how, "sure": self.is_sure,
        }  # fmt: skip


def names_around(site: str) -> list[str]:
    """Return the names of the modules around a site; the model's is empty."""
    parts = site.split(".") if site else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]
