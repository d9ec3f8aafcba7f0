"""Gather the hidden states that requests ask for, and give each request its own rows alone.

`Session` opens a `RequestStates` when a request begins that wants some, tells `HiddenStates` of every step, and closes
it when the request has ended. One observer sits on each module that a running request wants. In a forward it copies the
wanted rows of each request to the host, while the model goes on. Padding and rows of other requests are never among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.engines.request_options import StatesWanted
from hookline.errors import OptionError
from hookline.observe.host_values import sent_to_host
from hookline.observe.tokens import Tokens, current_tokens
from hookline.sites.attach import attach
from hookline.sites.wrappers import submodule

if TYPE_CHECKING:
    from hookline.sites.handle import HookHandle

_Stream = Callable[[nn.Module, Any], "Tensor | None"]


class StateSource(NamedTuple):
    """A module and a side of it that hidden states come from."""

    module: str
    """The dotted name of the module that is hooked."""
    of: str
    """``"output"`` or ``"input"``."""
    name: str = ""
    """What the user calls it; the module's own name if left out."""
    columns: tuple[int, int] | None = None
    """First column and the one behind the last, of a part of a fused projection; None for all."""

    @property
    def title(self) -> str:
        """Return the name under which its states are given back."""
        return self.name or self.module


@dataclass(frozen=True, slots=True)
class StatesOfLayer:
    """Hidden states of one layer, of one request alone; a copy.

    Recipe: ``finished.states["model.layers.0"].values``, of the `Finished` of a request.
    """

    positions: list[int]
    """The position in the sequence of each row of ``values``, rising."""
    values: Tensor
    """(positions, features), on the CPU, in the layer's own type."""

    def to_plain(self) -> dict[str, Any]:
        """Return them as plain data, with bytes as ``data``."""
        values = self.values.contiguous()
        return {
            "dtype": str(values.dtype).removeprefix("torch."),
            "shape": list(values.shape),
            "positions": self.positions,
            "data": values.view(torch.uint8).numpy().tobytes() if values.numel() else b"",
        }


@dataclass(eq=False)
class RequestStates:
    """The hidden states of one request, gathered so far."""

    id: str
    """The engine's own id of the request: no client chooses it."""
    wanted: StatesWanted
    prompt: int
    """How many tokens its prompt has."""
    sources: Sequence[StateSource]
    most_bytes: int | None = None
    """How many bytes were set aside for them; None if an engine counts what has come."""
    pieces: dict[StateSource, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)
    silent: set[StateSource] = field(default_factory=set)
    """Sources that were not called in a step in which the request wanted their states."""
    nbytes: int = 0
    error: Exception | None = None
    """Why they cannot be had, once that is known."""

    def fail(self, error: Exception) -> None:
        """Give the states up, and keep the reason."""
        self.error = self.error or error
        self.pieces.clear()
        self.nbytes = 0

    def add(self, source: StateSource, positions: Sequence[int], values: Tensor) -> None:
        """Keep what one forward gave."""
        if self.error is not None:
            return
        self.pieces.setdefault(source, []).append((positions, values))
        self.nbytes += values.nbytes
        if self.most_bytes is not None and self.nbytes > self.most_bytes:
            self.fail(OptionError(f"{source.title!r} gives more or larger numbers than when the engine was made"))

    def result(self) -> dict[str, StatesOfLayer]:
        """Return all states by the names of their sources, and let go of them; a source that gave none has no rows."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are made by its streams
        return {source.title: _joined(self.pieces.pop(source, []), source) for source in self.sources}


def _joined(pieces: list[tuple[Sequence[int], Tensor]], source: StateSource) -> StatesOfLayer:
    """Return the pieces of one source as one; of a position that came twice, the last."""
    if not pieces:
        return StatesOfLayer([], torch.empty(0, 0))
    values = torch.cat([piece for _, piece in pieces])
    places = {position: place for place, position in enumerate(p for each, _ in pieces for p in each)}
    order = sorted(places)
    if order != list(places) or len(order) != len(values):  # put off and run again, or drafted tokens
        values = values.index_select(0, torch.tensor([places[position] for position in order]))
    if source.columns is not None:
        values = values[:, slice(*source.columns)].clone()
    return StatesOfLayer(order, values)


class _Wish(NamedTuple):
    """What one request wants of a forward."""

    states: RequestStates
    positions: range
    places: slice
    """Where these tokens are among the entries of the batch."""


class _Step(NamedTuple):
    """A forward, and what is wanted of it."""

    table: Tokens
    wishes: Sequence[_Wish]


class _Observer:
    """Observe one side of one module for all requests that want its states."""

    def __init__(self, model: nn.Module, module: str, of: str, stream: _Stream) -> None:
        self.users: dict[RequestStates, list[StateSource]] = {}
        """Which of its sources each request has here."""
        self.step: _Step | None = None
        """The forward to look at; None if there is none, or once the module was called in it."""
        self._found: dict[RequestStates, Tensor] = {}
        self._module = submodule(model, module) if module else model
        self._what = f"the {of} of {module!r}"
        self._stream = stream
        hook = self._after if of == "output" else self._before
        options: Any = {} if of == "output" else {"on": "forward_pre", "with_kwargs": True}
        self.handle: HookHandle = attach(model, module or None, hook, observe=True, name="states", **options)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._take(output)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._take((args, kwargs))

    def _take(self, value: Any) -> None:
        step = self.step
        if step is None or current_tokens() is not step.table:  # another thread may run the same model
            return
        self.step = None
        wishes = [wish for wish in step.wishes if wish.states in self.users]
        try:
            main = self._stream(self._module, value) if wishes else None
            rows = None if main is None else step.table.by_token(main)
            if wishes and rows is None:
                raise OptionError(f"{self._what} has no row of numbers for each token here")
            self._found = {wish.states: _own(rows, wish.places) for wish in wishes if rows is not None}
        except Exception as error:  # fails the requests that asked, not the batch
            for wish in wishes:
                wish.states.fail(error)

    def hand_out(self, step: _Step) -> None:
        """Give what the forward gave to the requests."""
        found, self._found, self.step = self._found, {}, None
        for states, positions, _ in step.wishes:
            for source in self.users.get(states, ()):
                if states in found:
                    states.add(source, positions, found[states])
                else:
                    states.silent.add(source)


def _own(rows: Tensor, places: slice) -> Tensor:
    """Return rows of one request on the host, in memory of their own: what others gave must not stay with them."""
    part = rows[places]
    part = part.flatten(1) if part.dim() > 1 else part.unsqueeze(1)
    copied: Tensor = part.clone() if part.device.type == "cpu" else sent_to_host(part)
    return copied


class HiddenStates:
    """Keep an observer on every module that a running request wants states of.

    Args:
        model: The model that an engine runs.
        stream: Returns the hidden states in what a module returns, or in the ``(args, kwargs)`` that it takes.
    """

    def __init__(self, model: nn.Module, stream: _Stream) -> None:
        self._model = model
        self._stream = stream
        self._observers: dict[tuple[str, str], _Observer] = {}
        self._open: dict[str, RequestStates] = {}
        self._step: _Step | None = None

    @property
    def is_active(self) -> bool:
        """Return whether a running request wants states."""
        return bool(self._observers)

    @property
    def places(self) -> Iterator[tuple[str, str]]:
        """Yield the modules that have observers, with the kind of hook."""
        return ((name, "forward" if of == "output" else "forward_pre") for name, of in self._observers)

    def open(self, states: RequestStates) -> None:
        """Attach observers for what a request wants, all or none; called when it begins to run."""
        try:
            for source in states.sources:
                place = source.module, source.of
                if place not in self._observers:
                    self._observers[place] = _Observer(self._model, *place, self._stream)
                self._observers[place].users.setdefault(states, []).append(source)
        except BaseException:
            self.close(states)
            raise
        self._open[states.id] = states

    def close(self, states: RequestStates) -> None:
        """Remove the observers that no other request wants; called when a request has ended, or has failed."""
        if self._open.get(states.id) is states:
            del self._open[states.id]
        for place, observer in list(self._observers.items()):
            observer.users.pop(states, None)
            if not observer.users:
                observer.handle.remove(quiet=True)
                del self._observers[place]

    def begin_step(self, table: Tokens) -> None:
        """Tell the observers what to take in the next forward."""
        self._step = _Step(table, self._wishes(table)) if self._observers else None
        for observer in self._observers.values():
            observer.step = self._step

    def _wishes(self, table: Tokens) -> list[_Wish]:
        """Return what is wanted of the step."""
        found = []
        for row, key in enumerate(table.keys or table.requests):
            states, first = self._open.get(key), table.firsts[row]
            if states is not None and first is not None and states.error is None:
                positions = states.wanted.places(first, table.lengths[row], states.prompt)
                offset = table.begins[row] - first
                if positions:
                    found.append(_Wish(states, positions, slice(positions.start + offset, positions.stop + offset)))
        return found

    def end_step(self) -> None:
        """Hand out what the forward gave, and stop gathering for requests that cannot have theirs."""
        step, self._step = self._step, None
        if step is not None:
            for observer in self._observers.values():
                observer.hand_out(step)
        for states in [each for each in self._open.values() if each.error is not None]:
            self.close(states)
