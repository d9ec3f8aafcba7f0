"""Define what a trace holds: one `TraceRecord` for each tensor that passed a site, with its `Fingerprint`.

The writer (`trace_files`) stores these, `read_trace` gives them back, and the comparison of traces reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["KINDS", "Fingerprint", "MeshPlacement", "RowKey", "RowKeys", "RowTable", "TraceRecord", "layer_of"]

KINDS: Final = ("output", "input", "output_grad", "input_grad", "parameter", "param_grad")
"""What a record is of: what a module returns or takes, gradients of these, a parameter, its gradient."""


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

    @property
    def rms(self) -> float:
        """Return the root mean square; 0 without numbers."""
        return self.norm / math.sqrt(self.count) if self.count else 0.0

    @property
    def is_finite(self) -> bool:
        """Return whether there is neither NaN nor Inf."""
        return not (self.nan or self.inf)

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
    """How a distributed tensor (DTensor) lies on its mesh; the record's own shape is that of this rank's part."""

    placements: tuple[str, ...]
    """One for each dimension of the mesh: ``"Shard(0)"``, ``"Replicate()"``, ``"Partial(sum)"``, or
    ``"StridedShard(0, 2)"``: a shard of what later dimensions of the mesh have cut before, into 2 parts."""
    mesh_names: tuple[str, ...]
    """Names of these dimensions; empty if they have none."""
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    """Where this rank is on the mesh; empty if it is not on it."""
    full_shape: tuple[int, ...]
    """The shape of the whole tensor."""


class RowKey(NamedTuple):
    """Whose a row of a tensor is: a request or sample, and the position of the token in its sequence."""

    request: str
    position: int | None
    """None if the row is of the request as a whole."""


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys of all rows of a tensor: of its first ``dims`` dimensions, flattened to one."""

    dims: int
    keys: tuple[RowKey | None, ...]
    """None for padding."""
    columns: tuple[tuple[int, int], ...] = ()
    """Of rows that have a column for each token, as attention weights do: where the real ones begin, and how many."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """Whose tokens are in one forward; the records of that forward share it.

    ``layout`` is ``"padded"``: tensors are (batch, sequence, …), real tokens of row b begin at column ``starts[b]``;
    ``"packed"``: tensors are (tokens, …), one request after the other; ``"samples"``: tensors are (batch, …), and
    nothing is known of tokens.
    """

    layout: str
    requests: tuple[str, ...]
    starts: tuple[int, ...] = ()
    """Of ``"padded"``: the first real column of each row."""
    lengths: tuple[int, ...] = ()
    """How many tokens each request has in this forward."""
    positions: tuple[int, ...] = ()
    """The position of the first of them in its sequence, from 0."""

    def keys_for(self, shape: tuple[int, ...]) -> RowKeys | None:
        """Return the keys of the rows of a tensor of that shape; None if it has no row for each request or token."""
        batch = len(self.requests)
        if not shape or not batch:
            return None
        if self.layout == "packed":
            return self._packed_keys(shape, sum(self.lengths))
        if self.layout == "padded":
            width = max(start + length for start, length in zip(self.starts, self.lengths, strict=True))
            return self._padded_keys(shape, batch, width)
        return self._by_request(shape)

    def _packed_keys(self, shape: tuple[int, ...], tokens: int) -> RowKeys | None:
        if shape[0] == tokens:
            return RowKeys(1, self._packed())
        if shape[:2] == (1, tokens):  # a batch of one, as transformers has it
            return RowKeys(2, self._packed())
        return self._by_request(shape)

    def _padded_keys(self, shape: tuple[int, ...], batch: int, width: int) -> RowKeys | None:
        if shape[:2] == (batch, width):
            return RowKeys(2, self._padded(width))
        if len(shape) == 2 and shape[0] == batch * width:
            return RowKeys(1, self._padded(width))
        is_alike = all(len(set(each)) == 1 for each in (self.starts, self.lengths, self.positions))
        if shape[:2] == (1, width) and is_alike:  # one row for all requests, as rotary embeddings and positions have
            return RowKeys(2, self._padded(width)[:width])
        found = self._by_request(shape)
        if found is not None and width > 1 and width in shape[1:]:
            return RowKeys(1, found.keys, tuple(zip(self.starts, self.lengths, strict=True)))
        return found

    def _by_request(self, shape: tuple[int, ...]) -> RowKeys | None:
        if shape[0] != len(self.requests):
            return None
        return RowKeys(1, tuple(RowKey(request, None) for request in self.requests))

    def _packed(self) -> tuple[RowKey | None, ...]:
        return tuple(
            RowKey(request, first + place)
            for request, first, length in zip(self.requests, self.positions, self.lengths, strict=True)
            for place in range(length)
        )

    def _padded(self, width: int) -> tuple[RowKey | None, ...]:
        found: list[RowKey | None] = []
        for request, start, first, length in zip(self.requests, self.starts, self.positions, self.lengths, strict=True):
            real = [RowKey(request, first + place) for place in range(length)]
            found += [None] * start + real + [None] * (width - start - length)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One tensor that passed a site."""

    site: str
    """The name of the module or parameter, without the keys of wrappers; empty for the model itself."""
    kind: str
    """One of `KINDS`."""
    leaf: str
    """The path inside of an output or input (``"0"``, ``"logits"``, ``"kwargs.mask"``); empty if it is one tensor."""
    step: int
    call: int
    """Which call of the site within the step, from 0; of a gradient, the call it belongs to. Recomputed calls have the
    number of the call they repeat."""
    order: int
    """A running number of all records of this rank."""
    rank: int
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without ``torch.``: ``"bfloat16"``."""
    fingerprint: Fingerprint
    recompute: bool = False
    """Whether activation checkpointing repeated a forward; such a record is extra, not another call."""
    micro_batch: int = 0
    """Which forward of the model within the step."""
    layer: int | None = None
    """The first number in the name of the site."""
    dims: str | None = None
    """What the user has said of the dimensions, such as ``"b s h[tp] d"``."""
    placements: MeshPlacement | None = None
    """How a distributed tensor lies on its mesh; None for a plain one."""
    rows: int | None = None
    """The number of the table that says whose rows these are; `TraceFolder.row_keys` reads it."""
    tensor: str | None = None
    """The key of the stored tensor; None if only the fingerprint is there."""

    @property
    def label(self) -> str:
        """Return site, kind, leaf and call as one short text."""
        site = self.site or "(model)"
        return f"{site} {self.kind}{f' {self.leaf}' if self.leaf else ''}, step {self.step}, call {self.call}"


def layer_of(site: str) -> int | None:
    """Return the first number in a dotted name; None if there is none."""
    return next((int(part) for part in site.split(".") if part.isdecimal()), None)
