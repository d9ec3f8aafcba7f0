"""Gather the hidden states that requests ask for, and give each request its own rows alone.

`Session` opens a `RequestStates` when a request begins that wants some, tells `HiddenStates` of every step, and closes
it when the request has ended. One observer sits on each module that a running request wants. In a forward it takes the
wanted rows out of the batch with one gather, which is copied to the host while the model goes on. Padding and rows of
other requests are never among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.messages import suggest
from hookline.observe.tokens import Tokens, current_tokens, sent_to_host
from hookline.sites.attach import attach
from hookline.sites.wrappers import submodule
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from hookline.sites.handle import HookHandle

__all__ = ["HiddenStates", "RequestStates", "StateSource", "StatesOfLayer", "StatesWanted"]

_MOST_POSITIONS: Final = 1 << 16
_MOST_REMEMBERED: Final = 64
_Stream = Callable[[nn.Module, Any], "Tensor | None"]


@dataclass(frozen=True)
class StatesWanted:
    """The hidden states that a request asks for.

    Recipe::

        wanted = hookline.serve.StatesWanted(("model.layers.#",), positions="last")
        engine.submit(hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), states=wanted), on_event=print)

    The token that is sampled last goes through no forward, so that an answer of n tokens has the states of n - 1.
    """

    layers: tuple[str, ...]
    """Names or globs of modules, of which each has to match: ``*`` crosses dots, ``#`` is one numeric part."""
    positions: Literal["all", "last"] | tuple[int, ...] = "all"
    """Positions in the sequence (prompt and answer) from 0; negative ones count from the end of the prompt; ``"last"``
    is the last token of each forward: that of the prompt, then every token of the answer."""
    phase: Literal["prefill", "decode", "both"] = "both"
    """Of the forward over the prompt, of those over the answer, or of both."""
    of: Literal["output", "input"] = "output"
    """What the module returns, or what it is called with; the main tensor of it."""
    window: tuple[int, int | None] | None = None
    """First position and the one behind the last, instead of ``positions``; negative ones count from the end of the
    prompt."""

    def __post_init__(self) -> None:
        put = object.__setattr__  # it is frozen
        layers = (self.layers,) if isinstance(self.layers, str) else self.layers
        if not isinstance(layers, list | tuple) or not all(isinstance(item, str) for item in layers):
            raise OptionError(f"layers is a list of names or patterns of modules, got {self.layers!r}.")
        if not layers:
            raise OptionError("layers names at least one module, got none; see hookline.find(model).")
        put(self, "layers", tuple(layers))
        put(self, "positions", _positions(self.positions))
        put(self, "window", _window(self.window))
        for name, words in (("phase", ("prefill", "decode", "both")), ("of", ("output", "input"))):
            if getattr(self, name) not in words:
                raise OptionError(f"{name} is one of {', '.join(map(repr, words))}; got {getattr(self, name)!r}.")
        if self.window is not None and self.positions != "all":
            raise OptionError("hidden_states takes positions or a window, not both.")

    @classmethod
    def read(cls, given: Any) -> StatesWanted:
        """Return what an object of a request describes; raise for an object that describes nothing."""
        if not isinstance(given, Mapping):
            raise OptionError(f"hidden_states is an object such as {{'layers': ['model.layers.#']}}, got {given!r}.")
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                raise OptionError(f"hidden_states has no option {key!r}{suggest(str(key), known) or '.'}")
        if given.get("layers") is None:
            raise OptionError("hidden_states needs layers: names or patterns of modules, such as 'model.layers.#'.")
        return cls(**{key: value for key, value in given.items() if value is not None})

    def check(self, prompt: int, last: int | None = None) -> None:
        """Raise for positions that no forward has, of a prompt with so many tokens; ``last`` is the last, if known."""
        if self.window is not None and self.window[1] is not None:
            first, end = (each + prompt if each < 0 else each for each in self.window if each is not None)
            if end <= max(first, 0):
                raise OptionError(
                    f"window {list(self.window)} has no position in it: of {prompt} tokens of prompt it begins at "
                    f"{first} and ends before {end}."
                )
        if last is None or isinstance(self.positions, str):
            return
        first = prompt if self.phase == "decode" else 0
        last = prompt - 1 if self.phase == "prefill" else last
        if first > last:
            raise OptionError(
                f"No forward is in phase {self.phase!r}: an answer of one token comes of the prompt's own."
            )
        for asked in self.positions:
            if not first <= (asked + prompt if asked < 0 else asked) <= last:
                raise OptionError(
                    f"Position {asked} is never run: the prompt has {prompt} tokens, so that in phase {self.phase!r} "
                    f"positions go from {first} to {last}."
                )

    def places(self, first: int, count: int, prompt: int) -> Sequence[int]:
        """Return the wanted positions among ``count`` from ``first`` on, rising, of a sequence with such a prompt."""
        end = first + count
        if self.phase == "prefill":
            end = min(end, prompt)
        elif self.phase == "decode":
            first = max(first, prompt)
        if self.positions == "last":  # of the prompt, then every token of the answer; a prompt may come in chunks
            first = max(first, prompt - 1)
        if self.window is not None:
            start, stop = self.window
            first = max(first, start if start >= 0 else prompt + start)
            end = end if stop is None else min(end, stop if stop >= 0 else prompt + stop)
        if isinstance(self.positions, str):
            return range(first, max(end, first))
        return sorted({at for each in self.positions if first <= (at := each if each >= 0 else prompt + each) < end})


def _positions(value: Any) -> Any:
    if value in ("all", "last"):
        return value
    if not isinstance(value, list | tuple | range) or not value or any(type(each) is not int for each in value):
        raise OptionError(f"positions is 'all', 'last' or a list of whole numbers, got {value!r}.")
    if len(value) > _MOST_POSITIONS:
        raise OptionError(f"positions has at most {_MOST_POSITIONS} numbers, got {len(value)}.")
    return tuple(value)


def _window(given: Any) -> tuple[int, int | None] | None:
    if given is None:
        return None
    fits = isinstance(given, list | tuple) and len(given) == 2 and type(given[0]) is int
    if not fits or not (given[1] is None or type(given[1]) is int):
        raise OptionError(f"window is [first, behind the last], such as [0, 16] or [-8, null], got {given!r}.")
    first, end = given
    if end is not None and (first < 0) == (end < 0) and end <= first:
        raise OptionError(f"window is [first, behind the last], and {given!r} ends before it starts.")
    return int(first), end


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
    shapes: Mapping[StateSource, tuple[int, torch.dtype]] = field(default_factory=dict)
    """How many numbers, and of which type, a source gives for a token, where that is known before it does."""
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
        return {source.title: self._joined(source) for source in self.sources}

    def _joined(self, source: StateSource) -> StatesOfLayer:
        pieces = self.pieces.pop(source, [])
        if pieces:
            return _joined(pieces, source)
        features, dtype = self.shapes.get(source, (0, torch.float32))
        return StatesOfLayer([], torch.empty(0, features, dtype=dtype))


def _joined(pieces: list[tuple[Sequence[int], Tensor]], source: StateSource) -> StatesOfLayer:
    """Return the pieces of one source as one; of a position that came twice, the last."""
    values = torch.cat([piece for _, piece in pieces])
    places = {position: place for place, position in enumerate(p for each, _ in pieces for p in each)}
    order = sorted(places)
    if order != list(places) or len(order) != len(values):  # put off and run again, or drafted tokens
        values = values.index_select(0, torch.tensor([places[position] for position in order]))
    if source.columns is not None:
        values = values[:, slice(*source.columns)].clone()
    return StatesOfLayer(order, values)


class _Part(NamedTuple):
    """The rows of one gather that belong to one request."""

    states: RequestStates
    positions: Sequence[int]
    start: int


class _Expected(NamedTuple):
    """What an observer takes in the next forward."""

    table: Tokens
    places: dict[torch.device, Tensor] | None
    """Places among the entries of the batch, on each device that has asked; None for all of them."""
    parts: list[_Part]


class _Observer:
    """Observe one side of one module for all requests that want its states."""

    def __init__(self, model: nn.Module, module: str, of: str, stream: _Stream) -> None:
        self.users: dict[RequestStates, list[StateSource]] = {}
        """Which of its sources each request has here."""
        self.expected: _Expected | None = None
        self.found: list[Tensor] = []
        """What each part gave, once the module was called."""
        self.parts: list[_Part] = []
        """Those of the running forward."""
        self._module = submodule(model, module) if module else model
        self._name, self._of = module, of
        self._stream = stream
        is_output = of == "output"
        self.handle: HookHandle = attach(
            model,
            module or None,
            self._after if is_output else self._before,
            on="forward" if is_output else "forward_pre",
            with_kwargs=not is_output,
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
            main = self._stream(self._module, value)
            rows = None if main is None else expected.table.by_token(main)
            if rows is None:
                raise OptionError(f"the {self._of} of {self._name!r} has no row of numbers for each token here")
            picked = _picked(rows, expected)
            picked = picked.flatten(1) if picked.dim() > 1 else picked.unsqueeze(1)
            self.found = [_own(picked, part.start, len(part.positions)) for part in expected.parts]
        except Exception as error:  # fails the requests that asked, not the batch
            for part in expected.parts:
                part.states.fail(error)


def _picked(rows: Tensor, expected: _Expected) -> Tensor:
    """Return the wanted rows of all requests, one after the other; a copy."""
    places = expected.places
    if places is None:
        return rows[: expected.table.count].clone()
    if rows.device not in places:
        places[rows.device] = places[torch.device("cpu")].to(rows.device, non_blocking=True)
    return rows.index_select(0, places[rows.device])


def _own(picked: Tensor, start: int, count: int) -> Tensor:
    """Return the rows of one request on the host, in memory of their own: what others gave must not stay with them."""
    part = sent_to_host(picked[start : start + count])
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part  # type: ignore[no-any-return]


class HiddenStates:
    """Keep an observer on every module that a running request wants states of.

    Args:
        model: The model that an engine runs.
        stream: Returns the hidden states in what a module returns, or in the ``(args, kwargs)`` that it takes.
    """

    def __init__(self, model: nn.Module, stream: _Stream = lambda module, value: main_tensor(value)) -> None:
        self._model = model
        self._stream = stream
        self._observers: dict[tuple[str, str], _Observer] = {}
        self._open: dict[str, RequestStates] = {}
        self._places: dict[tuple[int, ...], dict[torch.device, Tensor]] = {}
        self.gathered = 0
        """Bytes, so far."""

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
        if not self._observers:
            return
        chosen = list(self._chosen(table))
        for observer in self._observers.values():
            observer.found, observer.parts = [], []
            places: list[int] = []
            for states, positions, offset in chosen:
                if states in observer.users:
                    observer.parts.append(_Part(states, positions, len(places)))
                    places += [offset + position for position in positions]
            is_all = table.width is None and len(places) == table.count
            remembered = None if is_all else self._remembered(tuple(places))
            observer.expected = _Expected(table, remembered, observer.parts) if places else None

    def _chosen(self, table: Tokens) -> list[tuple[RequestStates, Sequence[int], int]]:
        """Return who wants tokens of the step: which positions, and what to add to a position for its place."""
        found = []
        for row, key in enumerate(table.keys or table.requests):
            states, first = self._open.get(key), table.firsts[row]
            if states is not None and first is not None and states.error is None:
                positions = states.wanted.places(first, table.lengths[row], states.prompt)
                if positions:
                    found.append((states, positions, table.begins[row] - first))
        return found

    def _remembered(self, places: tuple[int, ...]) -> dict[torch.device, Tensor]:
        """Return `places` as a tensor, remembered: all layers, and most rounds, ask for the same."""
        if places not in self._places:
            if len(self._places) >= _MOST_REMEMBERED:
                self._places.clear()
            with torch.inference_mode(False):
                self._places[places] = {torch.device("cpu"): torch.tensor(places)}
        return self._places[places]

    def end_step(self) -> None:
        """Hand out what the forward gave, and stop gathering for requests that cannot have theirs."""
        for observer in self._observers.values():
            found, parts = observer.found, observer.parts
            observer.expected, observer.found, observer.parts = None, [], []
            self.gathered += sum(each.nbytes for each in found)
            for place, (states, positions, _) in enumerate(parts):
                for source in observer.users.get(states, ()):
                    if not found:
                        states.silent.add(source)
                    else:
                        states.add(source, positions, found[place])
        for states in [each for each in self._open.values() if each.error is not None]:
            self.close(states)
