"""Say what was wrong with a step: which operator made the first NaN or infinity, from what, and where.

`find_bad_operations` returns `BadStep` objects; `OperatorRun` makes the `BadOperation` and its `TensorSummary` objects.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.messages import short_repr
from hookline.observe.watch.row import Layout, reduce
from hookline.tables import ShownAsTable, Table
from hookline.training.experiment import MicroBatches

_LAYOUT = Layout.of(["mean", "min", "max", "nan", "inf"])


@dataclass(frozen=True)
class TensorSummary:
    """The numbers of one tensor, in a few figures."""

    name: str
    """The name of the operator's argument; ``"output"`` for a result."""
    shape: tuple[int, ...]
    dtype: str
    """``"float16"`` …"""
    nan: int
    """How many NaN."""
    inf: int
    """How many infinities."""
    low: float | None
    """The smallest finite number; None if there is none."""
    high: float | None
    """The largest finite number."""
    mean: float | None
    """The mean; None unless all numbers are finite."""

    def cells(self) -> list[str]:
        """Return one row of a table."""
        numbers = ("" if value is None else f"{value:.4g}" for value in (self.low, self.high, self.mean))
        return [self.name, f"{self.dtype}{list(self.shape)}", *numbers, str(self.nan), str(self.inf)]


def stored_numbers(tensor: Tensor) -> Tensor:
    """Return the numbers that a tensor stores: all of them, or those of a sparse one that are there."""
    if tensor.layout is torch.strided:
        return tensor
    stored: Tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    return stored


def summarize_tensor(name: str, tensor: Tensor) -> TensorSummary:
    """Return the figures of a tensor; reads all of it, and waits for its device."""
    row = reduce(stored_numbers(tensor.detach()).cpu(), _LAYOUT)
    found = dict(zip(_LAYOUT.names, row, strict=True))
    low, high = -found["-finite_min"], found["finite_max"]
    is_clean = found["count"] > 0 and not found["bad"]
    has_finite = low <= high
    return TensorSummary(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        int(found["nan"]),
        int(found["inf"]),
        low if has_finite else None,
        high if has_finite else None,
        found["sum"] / found["count"] if is_clean else None,
    )


@dataclass(frozen=True)
class BadOperation(ShownAsTable):
    """One operator whose result was not finite although its inputs were."""

    operator: str
    """As torch dispatches it: ``"aten.sqrt.default"``."""
    what: str
    """``"NaN"``, ``"Inf"``, or ``"overflow of float16"``: in float64 the result would have been finite."""
    where: str
    """``"forward"``, ``"backward"``, ``"optimizer"`` or ``"outside of the model"``."""
    module: str | None
    """Dotted name of the innermost module; of a backward operator, of the module whose forward it belongs to. Empty for
    the model itself, None outside of it."""
    node: str
    """In the backward, the node of the graph: ``"SqrtBackward0"``."""
    forward_operator: str
    """In the backward, the operator that made that node."""
    source: str
    """The line that called it: ``"model.py:42, in forward: return x.sqrt()"``; in the backward, of the forward."""
    number: int
    """How many operators the step had run before it."""
    inputs: tuple[TensorSummary, ...] = ()
    outputs: tuple[TensorSummary, ...] = ()
    given: str = ""
    """Where the number came from, if no operator of the step made it: a parameter, the batch, an argument."""

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.module is None:
            return self.where
        name = repr(self.module) if self.module else "the model itself"
        return f"{self.where} of {name}"

    @property
    def _in_place(self) -> str:
        return f" {self.place}" if self.place == "outside of the model" else f" in the {self.place}"

    def headline(self) -> str:
        """Return one line: what, which operator, where."""
        if self.given:
            return f"{self.what} was given: {self.given}; first seen by {self.operator}{self._in_place}"
        by = f", {self.node}" if self.node else ""
        return f"{self.what} made by {self.operator}{by},{self._in_place}"

    def _table(self) -> Table:
        rows = [each.cells() for each in (*self.inputs, *self.outputs)]
        foot = [f"at {self.source}"] if self.source else []
        if self.forward_operator:
            foot.append(f"the gradient of {self.forward_operator}")
        header = ("", "tensor", "min", "max", "mean", "NaN", "Inf")
        return Table(header, rows, numbers=(2, 3, 4, 5, 6), title=self.headline(), foot=foot, rule=False)


@dataclass(frozen=True)
class BadStep(ShownAsTable):
    """One step in which something was not finite, and what the second run of it found."""

    step: int
    """Its number, from 0."""
    places: tuple[str, ...]
    """Where the check saw it, by the first bad call, the first first: ``"layers.3/forward"``."""
    verdict: str
    """``"found"``, ``"given"`` (the number came from outside), ``"did not repeat"``, ``"not repeated"`` (the steps
    before it could not be, so nothing is blamed), or ``"not run again"``."""
    operation: BadOperation | None = None
    batch: str = ""
    """The batch: its ids, its place in the run, or the shapes of its tensors."""
    notes: tuple[str, ...] = ()
    """What a reader should know: that compiled code ran eagerly, what was missing to run the step again."""

    def headline(self) -> str:
        """Return one line."""
        told = _TOLD.get(self.verdict, self.verdict) if self.operation is None else self.operation.headline()
        return f"step {self.step}: {told}"

    def _table(self) -> Table:
        table = Table() if self.operation is None else self.operation._table()
        more = len(self.places) - 1
        seen = f"seen at {self.places[0]}" + (f" and {more} more place{'s' * (more > 1)}" if more else "")
        foot = (*table.foot, seen, *([f"batch {self.batch}"] if self.batch else []), *self.notes)
        return Table(table.header, table.rows, table.numbers, self.headline(), foot, rule=False)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)


_UNRESTORED = (
    "Parameters, buffers, optimizer and random streams were put back; globals of Python, counters and what the step "
    "reads by itself were not. Next: hookline.debug.replay_check says what of a step does not repeat"
)
_TOLD = {
    "did not repeat": f"did not repeat: the step was run again from the same state and was finite. {_UNRESTORED}",
    "not repeated": "the steps could not be repeated: something outside was changed",
}


# -- a batch in words -------------------------------------------------------------------------------------------------


def describe_batch(batch: Any, index: int | None = None, epoch: int | None = None) -> str:
    """Return a batch in words: its ids if they are known, else its place in the run, else the shapes of its tensors."""
    ids = _find_ids(batch)
    if ids is not None:
        return f"ids {short_repr(ids.tolist() if isinstance(ids, Tensor) else ids, 120)}"
    if index is not None:
        is_several = isinstance(batch, MicroBatches) and len(batch) > 1
        return f"{index}{f' to {index + len(batch) - 1}' if is_several else ''} of epoch {epoch}"
    return "" if batch is None else f"of {_shapes(batch)}"


def _find_ids(batch: Any) -> Any:
    """Return what names the samples of a batch: the entry ``ids``, ``id``, ``indices``, ``index`` or ``idx``."""
    if isinstance(batch, MicroBatches):
        found = [ids.tolist() if isinstance(ids, Tensor) else ids for ids in map(_find_ids, batch)]
        return None if None in found else found
    if isinstance(batch, dict):
        return next((batch[name] for name in ("ids", "id", "indices", "index", "idx") if name in batch), None)
    return None


def _shapes(batch: Any, depth: int = 2) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if depth and isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {_shapes(value, depth - 1)}" for key, value in list(batch.items())[:6]) + "}"
    if depth and isinstance(batch, list | tuple):
        return "(" + ", ".join(_shapes(value, depth - 1) for value in batch[:6]) + ")"
    return short_repr(batch, 40)


def as_float64(value: Any) -> Any:
    """Return ``value`` with every floating-point tensor in it as float64; containers are copied."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(map(as_float64, value))
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
