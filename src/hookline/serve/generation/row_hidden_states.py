"""What hidden states one request wants, where they come from, and what has come so far.

Takes `StatesWanted` and what ``shapes`` has learned of the model from ``door``, hands `RowStates` to ``row``, where
``states`` puts what each forward gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hookline.errors import OptionError
from hookline.messages import nearest_names
from hookline.serve.generation_request import StatesOfLayer, StatesWanted
from hookline.sites.targets import select

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.serve.generation.model_probe import Shape

__all__ = ["Kept", "Place", "RowStates", "wanted_states"]


class Place(NamedTuple):
    """Where hidden states come from."""

    name: str
    """Dotted name of the module."""
    of: str
    """``"output"`` or ``"input"``."""


def wanted_states(
    model: nn.Module, wanted: StatesWanted, prompt: int, answer: int, shapes: dict[Place, Shape]
) -> RowStates:
    """What has to be gathered for a request with so many tokens; an error if that cannot be had."""
    places = list(dict.fromkeys(place for layer in wanted.layers for place in _places(model, layer, wanted.of, shapes)))
    last = prompt + max(answer, 1) - 2  # the last token of an answer is run by no forward
    positions = _positions(wanted, prompt, last)
    most = _count(wanted, prompt, last, positions)
    return RowStates(wanted, positions, {place: Kept(most, shapes[place]) for place in places})


def _places(model: nn.Module, layer: str, of: str, shapes: dict[Place, Shape]) -> list[Place]:
    """The modules of that name or glob that have hidden states; at least one."""
    named = [Place(name, of) for name, _ in select(model, layer)]
    found = [place for place in named if place in shapes]  # in a glob over everything, containers come along
    if not found:
        others = nearest_names(layer, [place.name for place in shapes if place.of == of and place.name])
        raise OptionError(
            f"{layer!r} has no {of} with a row for each token in a forward of this model; nearest that has: "
            f"{', '.join(map(repr, others))}."
        )
    return found


def _positions(wanted: StatesWanted, prompt: int, last: int) -> frozenset[int] | None:
    """The positions that are listed, from 0; None if there is no list."""
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
    """How many positions it can come to at most."""
    if positions is not None:
        return len(positions)
    prefill = 0 if wanted.phase == "decode" else 1 if wanted.positions == "last" else prompt
    return prefill + (0 if wanted.phase == "prefill" else last + 1 - prompt)


@dataclass(eq=False)
class RowStates:
    """The hidden states of one request, as they come."""

    wanted: StatesWanted
    positions: frozenset[int] | None
    """The positions that are listed, if they are."""
    kept: dict[Place, Kept]
    """What has come of each place."""
    error: str | None = None
    """Why they cannot be had, once that is known."""

    @property
    def nbytes(self) -> int:
        """Bytes that all of it can come to."""
        return sum(kept.nbytes for kept in self.kept.values())

    def columns(self, first: int, count: int, phase: str) -> range | list[int]:
        """Which tokens of a forward are wanted, counted from the row's first, which is at this position."""
        wanted = self.wanted
        if wanted.phase not in (phase, "both"):
            return range(0)
        if self.positions is not None:
            return [column for column in range(count) if first + column in self.positions]
        return range(count) if wanted.positions == "all" else range(count - 1, count)

    def add(self, place: Place, positions: Sequence[int], values: Tensor) -> None:
        """Copy what one forward gave."""
        try:
            self.kept[place].add(positions, values)
        except Exception as error:  # of this request alone, not of the batch
            self.error = f"{place.name!r}: {error}"

    def result(self) -> dict[str, StatesOfLayer]:
        """All that came, by the names of the modules; one that nothing came of has no rows."""
        return {place.name: kept.result() for place, kept in self.kept.items()}


class Kept:
    """The states of one place, in memory that is set aside once: what is not written yet takes up no room."""

    def __init__(self, most: int, shape: Shape) -> None:
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
            with torch.inference_mode(False):  # a tensor for anybody, also for autograd
                self._values = torch.empty((self._most, self._shape.features), dtype=self._shape.dtype)
        return self._values

    def result(self) -> StatesOfLayer:
        """What has come, without the room that was not needed."""
        count, values = len(self._positions), self._room()
        return StatesOfLayer(self._positions, values if count == self._most else values[:count].clone())
