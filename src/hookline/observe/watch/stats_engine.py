"""The engine of streaming statistics: places to watch, and the state their numbers are added up in.

Takes tensors, or vectors that compiled code has made of them, and hands out metrics, after one transfer per device.
Which way a tensor is reduced depends on where it is: `reduce` on the CPU; on a GPU `kernel`, for many at a time, which
`pending` collects; `vector` elsewhere, and where there is no Triton.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel, type_name
from hookline.observe.watch.cpu_stats import add, measure
from hookline.observe.watch.pending_tensors import Note, Pending
from hookline.observe.watch.stat_kernel import Item, Kernel, Parts, is_available, readable
from hookline.observe.watch.stat_metrics import as_metrics
from hookline.observe.watch.stat_rows import Row, State
from hookline.observe.watch.stat_vector import add_up, as_columns, as_numbers, summarize
from hookline.observe.watch.unit_stats import Bins, Units, read_all
from hookline.sites import _torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.observe.watch.columns import Layout

__all__ = ["Engine", "Watched"]

_CPU: Final = torch.device("cpu")


class Watched:
    """One place that is watched, and one kind of what goes through it."""

    __slots__ = ("at_once", "beside", "deferred", "kind", "name", "rows", "silent", "unread")

    def __init__(self, name: str, kind: str, beside: tuple[Units | Bins, ...] = ()) -> None:
        self.name = name
        """Dotted name in the model."""
        self.kind = kind
        """``"forward"``, ``"backward"``, ``"param"``, ``"param_grad"``, or nothing for a value of the user's own."""
        self.at_once = kind in _AT_ONCE
        """Whether it is changed by the next step, and so reduced before."""
        self.deferred: Pending | None = None
        """Where tensors may be noted for later, once it is known that they stay as they are."""
        self.rows: dict[torch.device, Row] = {}
        self.beside = beside
        """What is kept per unit."""
        self.silent = ""
        """Why something was not measured here, if that is so."""
        self.unread = ""
        """Why what came by first had no numbers; of no account once something had."""

    @property
    def prefix(self) -> str:
        """What its metrics begin with."""
        return "".join(f"{part}/" for part in (self.name, self.kind) if part)

    @property
    def label(self) -> str:
        """What it is called in reports."""
        return self.prefix.rstrip("/")

    def forget_beside(self) -> None:
        """Nothing is kept per unit any more."""
        for kept in self.beside:
            kept.kept = None


class Engine:
    """Streaming statistics of any number of places."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.states: dict[torch.device, State] = {}
        self.places: dict[tuple[str, str], Watched] = {}
        self.limit: int | None = None
        """How many bytes of tensors on a GPU may be held until they are reduced; None for a share of its memory."""
        self._kernels: dict[torch.device, Kernel | None] = {}
        self._pending: dict[torch.device, Pending] = {}
        self.lock = threading.RLock()
        """Held while rows and places are handed out, and while what is kept per unit changes."""

    def place(self, name: str, kind: str) -> Watched:
        """The place of that name; a new one, the first time."""
        found = self.places.get((name, kind))
        if found is None:
            beside = tuple(_BESIDE[each]() for each in self.layout.by_unit)
            found = self.places.setdefault((name, kind), Watched(name, kind, beside))
        return found

    def row(self, place: Watched, device: torch.device) -> Row:
        """The row of a place on a device."""
        row = place.rows.get(device)
        return self._new_row(place, device) if row is None else row

    def _new_row(self, place: Watched, device: torch.device) -> Row:
        with self.lock:
            row = place.rows.get(device)  # another thread may have been here meanwhile
            if row is None:
                if device not in self.states:
                    self.states[device] = State(self.layout, device)
                row = place.rows[device] = self.states[device].new_row()
            return row

    def take(self, place: Watched, tensor: Tensor, scale: Any = None) -> None:
        """Add the statistics of a tensor; its numbers are divided by ``scale`` first, which may be a tensor."""
        deferred = place.deferred
        if deferred is not None and deferred.note(place, tensor, scale):
            return
        local = _numbers_of(tensor)
        if local is None:
            place.unread = f"{type_name(tensor)} on {tensor.device} has no numbers to look at"
            return
        device = local.device
        if device.type in _READ_ON_HOST:
            measure(local.cpu(), self.layout, self.row(place, _CPU), _factor(scale))
        elif self._kernel(device) is None:
            with torch.no_grad():
                self.take_vector(place, summarize(local, self.layout), scale)
        elif place.at_once:
            self._take_notes(device, [Note(place, local, scale)])
        else:
            self._pending_on(device).take(place, local, scale)

    def _pending_on(self, device: torch.device) -> Pending:
        found = self._pending.get(device)
        if found is None:
            made = Pending(partial(self._take_notes, device), device, limit=self.limit)
            # In one step: what another thread notes in one that is replaced here would never be asked for.
            found = self._pending.setdefault(device, made)
        return found

    def take_all(self, tensors: Iterable[tuple[Watched, Tensor, Any]]) -> None:
        """As `take`, for several that are there now; those on a GPU in one go."""
        notes: dict[torch.device, list[Note]] = {}
        for place, tensor, scale in tensors:
            local = _numbers_of(tensor)
            if local is not None and local.device.type != "cpu" and self._kernel(local.device) is not None:
                notes.setdefault(local.device, []).append(Note(place, local, scale))
            else:
                self.take(place, tensor, scale)
        for device, some in notes.items():
            self._take_notes(device, some)

    def flush(self) -> None:
        """See to it that all that was taken is in the state: a forward or a backward pass is over, or a step."""
        for pending in self._pending.values():
            pending.flush()

    def _take_notes(self, device: torch.device, notes: Sequence[Note]) -> None:
        kernel = self._kernel(device)
        if kernel is not None:
            items = [Item(readable(note.tensor), self.row(note.place, device), note.scale) for note in notes]
            try:
                kernel.take(items)
                return
            except Exception as error:  # no compiler for C, for instance
                self._give_up_kernel(device, error)
        with torch.no_grad():
            for note in notes:
                self.take_vector(note.place, summarize(note.tensor, self.layout), note.scale)

    def _kernel(self, device: torch.device) -> Kernel | None:
        if device not in self._kernels:
            self._kernels[device] = Kernel(self.layout, device) if is_available(device) else None
            if device.type == "cuda" and self._kernels[device] is None:
                self._give_up_kernel(device, "Triton is not installed; pip install triton brings it")
        return self._kernels[device]

    def _give_up_kernel(self, device: torch.device, why: Exception | str) -> None:
        self._kernels[device] = None
        reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        warnings.warn(
            f"Statistics on {device} are taken by operations of torch, which is several times slower: the Triton "
            f"kernel does not work here ({reason}).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )

    def take_found(self, items: Iterable[tuple[Watched, list[Tensor], int, Any]]) -> None:
        """Add what compiled code has found, as `find_in` gives it: a vector, the tensor itself, or rows of it."""
        by_row: dict[torch.device, list[tuple[Watched, Parts]]] = {}
        for place, found, each, scale in items:
            device = found[0].device
            if each == 1:
                self._take_notes(device, [Note(place, found[0], scale)])
            elif each == 0:
                self.take_vector(place, found[0], scale)
            else:
                parts = Parts(found, each, self.row(place, device), scale)
                by_row.setdefault(device, []).append((place, parts))
        for device, some in by_row.items():
            self._take_parts(device, some)

    def _take_parts(self, device: torch.device, items: Sequence[tuple[Watched, Parts]]) -> None:
        kernel = self._kernel(device)
        if kernel is not None:
            try:
                kernel.take_parts([parts for _, parts in items])
                return
            except Exception as error:
                self._give_up_kernel(device, error)
        with torch.no_grad():
            for place, (found, each, _, scale) in items:
                self.take_vector(place, add_up(found, each, self.layout), scale)

    def take_vector(self, place: Watched, vector: Tensor, scale: Any = None) -> None:
        """Add what `summarize` has found; thresholds were then not divided by the scale."""
        row = self.row(place, vector.device)
        layout = self.layout if vector.numel() == len(self.layout.found) else self.layout.closer
        if vector.device.type == "cpu":
            add(as_numbers(vector, layout), row, layout, _factor(scale))
            return
        with torch.no_grad():
            row.take(as_columns(vector, layout, scale))

    def take_beside(self, place: Watched, tensor: Tensor, scale: Any = None) -> None:
        """Add to what is kept per unit."""
        local = _numbers_of(tensor) if place.beside else None
        if local is not None:
            with torch.no_grad(), self.lock:
                numbers = local.detach() if scale is None else local.detach() * _factor(scale)
                for kept in place.beside:
                    kept.take(numbers)

    def empty(self, place: Watched) -> None:
        """Forget the numbers of one place."""
        for device, row in place.rows.items():
            self.states[device].empty(row)
        place.forget_beside()

    def reset(self) -> None:
        """Forget the numbers; rows stay where they are."""
        for pending in self._pending.values():
            pending.forget()
        for state in self.states.values():
            state.reset()
        for place in self.places.values():
            place.forget_beside()

    def read(self) -> dict[Watched, dict[str, float]]:
        """The columns of every place: one transfer per device."""
        self.flush()
        numbers = {device: state.read() for device, state in self.states.items()}
        return {place: self._joined(place, numbers) for place in self.places.values()}

    def to_metrics(self) -> dict[str, Any]:
        """Every statistic, by ``"name/kind/statistic"``."""
        metrics: dict[str, Any] = {}
        beside = self._read_beside()
        for place, cells in self.read().items():
            prefix = place.prefix
            metrics |= {prefix + name: value for name, value in as_metrics(cells, self.layout).items()}
            metrics |= {prefix + name: value for name, value in beside.get(place, {}).items()}
        return metrics

    def _joined(self, place: Watched, numbers: dict[torch.device, NDArray[Any]]) -> dict[str, float]:
        """The rows of a place on all devices, as one."""
        rows = [numbers[device][row.number].tolist() for device, row in place.rows.items()]
        if not rows:
            return dict.fromkeys(self.layout.names, 0.0)
        added = len(self.layout.added)
        columns = list(zip(*rows, strict=True))
        joined = [sum(column) for column in columns[:added]] + [_largest(column) for column in columns[added:]]
        return dict(zip(self.layout.names, joined, strict=True))

    def _read_beside(self) -> dict[Watched, dict[str, Any]]:
        kept = [
            (place, one, one.kept) for place in self.places.values() for one in place.beside if one.kept is not None
        ]
        found: dict[Watched, dict[str, Any]] = {}
        for (place, one, _), values in zip(kept, read_all(tensor for _, _, tensor in kept), strict=True):
            found.setdefault(place, {})[one.name] = one.as_metric(values)
        return found


_READ_ON_HOST: Final = ("cpu", "mps")
"""Where tensors are reduced on the CPU; Apple's GPU has no float64 to add up in."""
_AT_ONCE: Final = ("param", "param_grad")
"""Kinds that are changed in place by the next step."""
_BESIDE: Final[dict[str, type[Units | Bins]]] = {Units.name: Units, Bins.name: Bins}


def _numbers_of(tensor: Tensor) -> Tensor | None:
    """What there are numbers of: this process's part, and of a sparse or nested tensor those that it has."""
    if tensor.is_nested:
        tensor = tensor.values()
    local: Tensor | None = _torch.local_tensor(tensor)
    if local is None or local.device.type == "meta" or _torch.is_wrapped(local):
        return None
    if local.layout is torch.strided:
        return local.dequantize() if local.is_quantized else local
    values: Tensor = (local.coalesce() if local.layout is torch.sparse_coo else local).values()
    return values


def _factor(scale: Any) -> float:
    """What to multiply by, to divide by a scale; a scale of zero has left nothing to see."""
    return 1.0 if scale is None or not float(scale) else 1.0 / float(scale)


def _largest(column: Iterable[float]) -> float:
    values = list(column)
    return math.nan if any(value != value for value in values) else max(values)
