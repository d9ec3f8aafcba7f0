"""Hidden states for those who asked for them, and for nobody else.

Takes what requests want from ``loop`` and the row table of every forward from ``forward``, hands each row its own
copies. One observer sits on each module that somebody wants, for as long as somebody does; in a forward it takes the
wanted rows and columns out of the batch with one gather, on their way to the host while the model goes on. Padding, and
rows of others, are never among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.factories.batch_rows import BatchRows, current_rows
from hookline.serve.generation.row_hidden_states import Place, RowStates
from hookline.sites.attach import attach
from hookline.sites.tree import main_tensor

if TYPE_CHECKING:
    from hookline.serve.generation.request_row import Row
    from hookline.sites.handle import HookHandle

__all__ = ["Gatherer", "by_token", "shown"]


class _Slice(NamedTuple):
    """What of one gather is whose."""

    states: RowStates
    start: int
    positions: Sequence[int]


class _Expected(NamedTuple):
    """What an observer is to take in the forward that comes."""

    table: BatchRows
    columns: int
    places: Tensor
    """Places in the batch, row after row: row * columns + column."""
    slices: list[_Slice]


class _Observer:
    """Sits on a module for all requests that want its states."""

    def __init__(self, model: nn.Module, place: Place, device: torch.device) -> None:
        self.users = 0
        self.place = place
        self.expected: _Expected | None = None
        self.found: tuple[Tensor, list[_Slice]] | None = None
        self._device = device
        if place.of == "output":
            self.handle: HookHandle = attach(model, place.name or None, self._after, observe=True, name="states")
        else:
            self.handle = attach(
                model, place.name or None, self._before, on="forward_pre", with_kwargs=True, observe=True, name="states"
            )

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._take(output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._take((args, kwargs))

    def _take(self, value: Any) -> None:
        expected = self.expected
        if expected is None:  # nobody wants this forward, or the module is called again in it
            return
        if current_rows() is not expected.table:  # somebody else runs the same model, in a thread of theirs
            return
        self.expected = None
        try:
            tokens = by_token(shown(value), len(expected.table.request_ids), expected.columns)
            if tokens is None:
                raise OptionError(f"the {self.place.of} of {self.place.name!r} has no row for each token here")
            picked = tokens.index_select(0, expected.places.to(tokens.device))
            self.found = _to_host(picked, self._device), expected.slices
        except Exception as error:  # of those who asked, not of the batch
            for each in expected.slices:
                each.states.error = str(error)


def shown(value: Any) -> Tensor | None:
    """The tensor that is meant by the output, or by the arguments, of a module."""
    return main_tensor(value)


def by_token(value: Tensor | None, rows: int, columns: int) -> Tensor | None:
    """The value as (rows * columns, features), if that is what it is about; None if it is not."""
    if value is None:
        return None
    shape = tuple(value.shape)
    if len(shape) == 3 and shape[:2] == (rows, columns):
        return value.reshape(rows * columns, shape[2])
    if shape == (rows, columns):
        return value.reshape(rows * columns, 1)
    if len(shape) == 2 and shape[0] == rows * columns:  # as experts see their tokens
        return value
    return None


def _to_host(picked: Tensor, device: torch.device) -> Tensor:
    """On its way to the host; ``deliver`` waits until it is there."""
    if picked.device.type == "cuda" and picked.device == device:
        return torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True).copy_(picked, non_blocking=True)
    return picked.cpu()


class Gatherer:
    """Keeps an observer on every module that a running request wants states of."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._observers: dict[Place, _Observer] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self.gathered = 0
        """Bytes, so far."""

    def open(self, states: RowStates) -> None:
        """A request begins to run: observers for what it wants go on, all or none."""
        try:
            for place in states.kept:
                if place not in self._observers:
                    self._observers[place] = _Observer(self._model, place, self._device)
        except BaseException:
            self._sweep()
            raise
        for place in states.kept:
            self._observers[place].users += 1

    def close(self, states: RowStates) -> None:
        """It has ended: what nobody wants any more comes off."""
        for place in states.kept:
            self._observers[place].users -= 1
        self._sweep()

    def _sweep(self) -> None:
        for place, observer in list(self._observers.items()):
            if not observer.users:
                observer.handle.remove(quiet=True)
                del self._observers[place]

    def expect(self, rows: Sequence[Row], table: BatchRows, columns: int) -> None:
        """Tell the observers what to take in the forward that comes."""
        if not self._observers:
            return
        chosen = list(_chosen(rows, table, columns))
        for place, observer in self._observers.items():
            observer.found = None
            observer.expected = self._expected(place, chosen, table, columns)

    def _expected(self, place: Place, chosen: list[_Chosen], table: BatchRows, columns: int) -> _Expected | None:
        flat: list[int] = []
        slices = []
        for each in chosen:
            if place in each.states.kept:
                slices.append(_Slice(each.states, len(flat), each.positions))
                flat.extend(each.flat)
        return _Expected(table, columns, self._index(tuple(flat)), slices) if flat else None

    def _index(self, flat: tuple[int, ...]) -> Tensor:
        """The same places are asked for by every layer, and while rows stay together, by every step."""
        if flat not in self._indices:
            if len(self._indices) >= 64:
                self._indices.clear()
            self._indices[flat] = torch.tensor(flat, device=self._device)
        return self._indices[flat]

    def deliver(self) -> None:
        """Hand out what the last forward gave; called when the ids of the next tokens have come."""
        if self._device.type == "cuda" and self._observers:
            torch.cuda.current_stream(self._device).synchronize()  # of several devices, those ids are of the last
        for place, observer in self._observers.items():
            observer.expected = None
            if observer.found is None:
                continue
            (values, slices), observer.found = observer.found, None
            self.gathered += values.nbytes
            for states, start, positions in slices:
                states.add(place, positions, values[start : start + len(positions)])


class _Chosen(NamedTuple):
    """The tokens of one row that are wanted in one forward."""

    states: RowStates
    positions: Sequence[int]
    flat: Sequence[int]


def _chosen(rows: Sequence[Row], table: BatchRows, columns: int) -> Iterator[_Chosen]:
    for place, row in enumerate(rows):
        if row.states is not None:
            first, start = table.positions[place], table.starts[place]
            found = row.states.columns(first, len(table.tokens[place]), table.phase)
            if found:
                base = place * columns + start
                yield _Chosen(row.states, [first + each for each in found], [base + each for each in found])
