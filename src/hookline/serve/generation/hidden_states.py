"""Gather the hidden states that requests ask for, and give each request its own rows alone.

The request validator calls `wanted_states` for each request; the engine's loop and forward drive `Gatherer`. One
observer sits on each module that a running request wants. In a forward it takes the wanted rows and columns out of the
batch with one gather, which is copied to the host while the model goes on. Padding and rows of other requests are never
among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.messages import nearest_names
from hookline.observe.tokens import Tokens, current_tokens
from hookline.serve.generation_request import StatesOfLayer, StatesWanted
from hookline.sites.attach import attach
from hookline.sites.targets import select
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from hookline.sites.handle import HookHandle

__all__ = ["Gatherer", "RowStates", "StateShape", "StateSource", "wanted_sources", "wanted_states"]


class StateSource(NamedTuple):
    """A module and a side of it that hidden states come from."""

    name: str
    """Dotted name of the module."""
    of: str
    """``"output"`` or ``"input"``."""


class StateShape(NamedTuple):
    """Size of the hidden states of a module, for one token."""

    features: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of one token."""
        return self.features * self.dtype.itemsize


_Shapes = dict[StateSource, StateShape]


def wanted_sources(model: nn.Module, wanted: StatesWanted, shapes: _Shapes) -> _Shapes:
    """Return the sources that a request asks for, each once, with their sizes; raise if there is none for a name."""
    layers = dict.fromkeys(wanted.layers)
    return {source: shapes[source] for layer in layers for source in _sources(model, layer, wanted.of, shapes)}


def wanted_states(wanted: StatesWanted, prompt: int, answer: int, sources: _Shapes) -> RowStates:
    """Return what to gather of `sources` for `prompt` and `answer` tokens; raise if that cannot be had."""
    last = prompt + max(answer, 1) - 2  # the last token of an answer is run by no forward
    positions = _positions(wanted, prompt, last)
    most = _count(wanted, prompt, last, positions)
    return RowStates(wanted, positions, {source: StateBuffer(most, shape) for source, shape in sources.items()})


def _sources(model: nn.Module, layer: str, of: str, shapes: _Shapes) -> list[StateSource]:
    """Return the sources of the name or glob `layer` that have hidden states; at least one."""
    named = [StateSource(name, of) for name, _ in select(model, layer)]
    found = [source for source in named if source in shapes]  # in a glob over everything, containers come along
    if not found:
        others = nearest_names(layer, [source.name for source in shapes if source.of == of and source.name])
        raise OptionError(
            f"{layer!r} has no {of} with a row for each token in a forward of this model; nearest that has: "
            f"{', '.join(map(repr, others))}."
        )
    return found


def _positions(wanted: StatesWanted, prompt: int, last: int) -> frozenset[int] | None:
    """Return the positions that are listed, from 0; None if there is no list."""
    if isinstance(wanted.positions, str):
        return None
    found = {position + prompt if position < 0 else position: position for position in wanted.positions}
    first = prompt if wanted.phase == "decode" else 0
    last = prompt - 1 if wanted.phase == "prefill" else last
    for position, asked in found.items():
        if not first <= position <= last:
            raise OptionError(
                f"Position {asked} is never run: the prompt has {prompt} tokens, so that in phase {wanted.phase!r} "
                f"positions go from {first} to {last}."
                if first <= last
                else f"No forward is in phase {wanted.phase!r}: an answer of one token comes of the prompt's own."
            )
    return frozenset(found)


def _count(wanted: StatesWanted, prompt: int, last: int, positions: frozenset[int] | None) -> int:
    """Return how many positions there can be at most."""
    if positions is not None:
        return len(positions)
    prefill = 0 if wanted.phase == "decode" else 1 if wanted.positions == "last" else prompt
    return prefill + (0 if wanted.phase == "prefill" else last + 1 - prompt)


@dataclass(eq=False)
class RowStates:
    """The hidden states of one request, gathered so far."""

    wanted: StatesWanted
    positions: frozenset[int] | None
    """The positions that are listed, if they are."""
    buffers: dict[StateSource, StateBuffer]
    """What has come of each source."""
    error: str | None = None
    """Why they cannot be had, once that is known."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that all of it can come to."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def columns(self, first: int, count: int, stage: str) -> range | list[int]:
        """Return the wanted tokens of a forward, counted from the row's first, which has position `first`."""
        wanted = self.wanted
        if wanted.phase not in (stage, "both"):
            return range(0)
        if self.positions is not None:
            return [column for column in range(count) if first + column in self.positions]
        return range(count) if wanted.positions == "all" else range(count - 1, count)

    def add(self, source: StateSource, positions: Sequence[int], values: Tensor) -> None:
        """Copy what one forward gave."""
        try:
            self.buffers[source].add(positions, values)
        except Exception as error:  # of this request alone, not of the batch
            self.error = f"{source.name!r}: {error}"

    def result(self) -> dict[str, StatesOfLayer]:
        """Return all states by module name; a module that gave none has no rows."""
        return {source.name: buffer.result() for source, buffer in self.buffers.items()}


class StateBuffer:
    """Hold the states of one source in memory that is set aside once; unwritten pages take up no room."""

    def __init__(self, most: int, shape: StateShape) -> None:
        self.nbytes = most * shape.nbytes
        self._most = most
        self._shape = shape
        self._values: Tensor | None = None
        self._positions: list[int] = []

    def add(self, positions: Sequence[int], values: Tensor) -> None:
        """Copy the next rows."""
        features, dtype = self._shape
        if (values.shape[1], values.dtype) != (features, dtype):
            raise OptionError(f"{features} numbers of {dtype} were expected, got {values.shape[1]} of {values.dtype}")
        start = len(self._positions)
        self._room()[start : start + len(positions)].copy_(values)
        self._positions.extend(positions)

    def _room(self) -> Tensor:
        if self._values is None:
            with torch.inference_mode(False):  # an ordinary tensor, also for autograd
                self._values = torch.empty((self._most, self._shape.features), dtype=self._shape.dtype)
        return self._values

    def result(self) -> StatesOfLayer:
        """Return what was added, without the room that was not needed."""
        count, values = len(self._positions), self._room()
        return StatesOfLayer(self._positions, values if count == self._most else values[:count].clone())


class _Slice(NamedTuple):
    """The part of one gather that belongs to one request."""

    states: RowStates
    start: int
    positions: Sequence[int]


class _Expected(NamedTuple):
    """The rows and columns that an observer takes in the next forward."""

    table: Tokens
    indices: Tensor
    """Places among the entries of the batch."""
    slices: list[_Slice]


class _Observer:
    """Observe a module for all requests that want its states."""

    def __init__(self, model: nn.Module, source: StateSource, device: torch.device) -> None:
        self.users = 0
        self.source = source
        self.expected: _Expected | None = None
        self.found: tuple[Tensor, list[_Slice]] | None = None
        self._device = device
        if source.of == "output":
            self.handle: HookHandle = attach(model, source.name or None, self._after, observe=True, name="states")
        else:
            self.handle = attach(
                model,
                source.name or None,
                self._before,
                on="forward_pre",
                with_kwargs=True,
                observe=True,
                name="states",
            )

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._take(output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._take((args, kwargs))

    def _take(self, value: Any) -> None:
        expected = self.expected
        if expected is None:  # no row is wanted, or the module is called again in this forward
            return
        if current_tokens() is not expected.table:  # another thread runs the same model
            return
        self.expected = None
        try:
            main = main_tensor(value)
            tokens = None if main is None else expected.table.by_token(main)
            if tokens is None:
                raise OptionError(f"the {self.source.of} of {self.source.name!r} has no row for each token here")
            picked = tokens.index_select(0, expected.indices.to(tokens.device))
            picked = picked if picked.dim() > 1 else picked.unsqueeze(1)
            self.found = _to_host(picked, self._device), expected.slices
        except Exception as error:  # fails the requests that asked, not the batch
            for each in expected.slices:
                each.states.error = str(error)


def _to_host(picked: Tensor, device: torch.device) -> Tensor:
    """Start the copy of `picked` to the host; ``deliver`` waits until it is done."""
    if picked.device.type == "cuda" and picked.device == device:
        return torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True).copy_(picked, non_blocking=True)
    return picked.cpu()


class Gatherer:
    """Keeps an observer on every module that a running request wants states of."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._observers: dict[StateSource, _Observer] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self.gathered = 0
        """Bytes, so far."""

    def open(self, states: RowStates) -> None:
        """Attach observers for what a request wants, all or none; called when it begins to run."""
        try:
            for source in states.buffers:
                if source not in self._observers:
                    self._observers[source] = _Observer(self._model, source, self._device)
        except BaseException:
            self._sweep()
            raise
        for source in states.buffers:
            self._observers[source].users += 1

    def close(self, states: RowStates) -> None:
        """Remove the observers that no other request wants; called when a request has ended."""
        for source in states.buffers:
            self._observers[source].users -= 1
        self._sweep()

    def _sweep(self) -> None:
        for source, observer in list(self._observers.items()):
            if not observer.users:
                observer.handle.remove(quiet=True)
                del self._observers[source]

    def expect(self, wanted: Sequence[RowStates | None], table: Tokens) -> None:
        """Tell the observers what to take in the next forward; `wanted` has an entry for each row of the batch."""
        if not self._observers:
            return
        chosen = list(_chosen(wanted, table))
        for source, observer in self._observers.items():
            observer.found = None
            observer.expected = self._expected(source, chosen, table)

    def _expected(self, source: StateSource, chosen: list[_Chosen], table: Tokens) -> _Expected | None:
        flat: list[int] = []
        slices = []
        for each in chosen:
            if source in each.states.buffers:
                slices.append(_Slice(each.states, len(flat), each.positions))
                flat.extend(each.flat)
        return _Expected(table, self._index(tuple(flat)), slices) if flat else None

    def _index(self, flat: tuple[int, ...]) -> Tensor:
        """Return `flat` as a tensor on the device, cached: all layers, and most rounds, ask for the same."""
        if flat not in self._indices:
            if len(self._indices) >= 64:
                self._indices.clear()
            self._indices[flat] = torch.tensor(flat, device=self._device)
        return self._indices[flat]

    def deliver(self) -> None:
        """Hand out what the last forward gave; called when the ids of the next tokens have come."""
        if self._device.type == "cuda" and self._observers:
            torch.cuda.current_stream(self._device).synchronize()  # of several devices, those ids are of the last
        for source, observer in self._observers.items():
            observer.expected = None
            if observer.found is None:
                continue
            (values, slices), observer.found = observer.found, None
            self.gathered += values.nbytes
            for states, start, positions in slices:
                states.add(source, positions, values[start : start + len(positions)])


class _Chosen(NamedTuple):
    """The tokens of one row that are wanted in one forward."""

    states: RowStates
    positions: Sequence[int]
    flat: Sequence[int]


def _chosen(wanted: Sequence[RowStates | None], table: Tokens) -> Iterator[_Chosen]:
    for row, states in enumerate(wanted):
        first = table.firsts[row]
        if states is not None and first is not None:
            found = states.columns(first, table.lengths[row], table.phases[row])
            if found:
                base = table.begins[row]
                yield _Chosen(states, [first + each for each in found], [base + each for each in found])
