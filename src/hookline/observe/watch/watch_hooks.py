"""What ``watch`` puts on modules: hooks that hand what they are shown to the engine.

One hook object serves all modules of a kind. In compiled code it leaves a summary of the tensor in the graph instead of
being called there.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel, type_name
from hookline.observe.watch.row_sums import find_in
from hookline.sites import _torch
from hookline.sites.hook_at_site import Summary
from hookline.sites.kinds import Kind
from hookline.sites.main_tensor import main_of, main_tensor

if TYPE_CHECKING:
    from hookline.observe.watch.columns import Layout
    from hookline.observe.watch.stats_engine import Engine, Watched
    from hookline.sites.hook_at_site import Found

__all__ = ["MODULE_KINDS", "ModuleHook", "give_up"]

MODULE_KINDS: Final[dict[str, tuple[Kind, str, str]]] = {
    "forward": (Kind.FORWARD, "forward", "beside"),
    "backward": (Kind.BACKWARD_PRE, "backward", "beside_backward"),
}
"""For each kind: what to attach as, the method of the hook, and the method for what is kept per unit."""


class ModuleHook(Summary):
    """Adds up the statistics of what modules give out, or of the gradients of that."""

    def __init__(
        self, engine: Engine, sites: list[tuple[str, nn.Module]], kind: str, due: Callable[[], bool], scale: Any = None
    ) -> None:
        self._engine = engine
        self._due = due
        self._scale: Callable[[], Tensor | None] = scale or (lambda: None)
        self._is_forward = kind == "forward"
        self._places = {id(module): engine.place(name, kind) for name, module in sites}
        """By the identity of modules that carry the hook, which live as long as it is on them."""
        self._last = next((id(module) for name, module in sites if not name), None)
        """The model itself, if it carries the hook: with what it gives out, a forward is over."""
        self._set(engine.layout)

    def _set(self, layout: Layout) -> None:
        self.make = _maker(layout)
        self.number = zlib.crc32(repr(layout).encode())

    def look_closer(self) -> None:
        """Have compiled code count NaN and Inf as well, once it is compiled anew."""
        self._set(self._engine.layout.closer)

    def forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module has given this out."""
        # A forward that activation checkpointing repeats was counted the first time.
        if self._due() and not _torch.in_recomputation():
            if not (type(output) is Tensor and self._note(module, output)):
                self._take(module, output, self._engine.take)
            if id(module) == self._last:
                self._engine.flush()

    def backward(self, module: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        """The gradients of what it has given out are there."""
        if self._due() and not (len(grads) == 1 and self._note(module, grads[0])):
            self._take(module, grads, self._engine.take)

    def beside(self, module: nn.Module, args: Any, output: Any) -> None:
        """As `forward`, for what is kept per unit."""
        if self._due() and not _torch.in_recomputation():
            self._take(module, output, self._engine.take_beside)

    def beside_backward(self, module: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        """As `backward`, for what is kept per unit."""
        if self._due():
            self._take(module, grads, self._engine.take_beside)

    def receive(self, items: Sequence[tuple[Any, list[Tensor], int]]) -> None:
        """Compiled code has made summaries."""
        if not self._due() or (self._is_forward and _torch.in_recomputation()):
            return
        places, scale = self._places, self._scale()
        known = [(places[id(module)], found, each, scale) for module, found, each in items if id(module) in places]
        try:
            self._engine.take_found(known)
        except Exception as error:
            for place, found, _, _ in known:
                give_up(place, found[0], error)

    def _note(self, module: nn.Module, tensor: Any) -> bool:
        """The short way, for what nearly every firing is: a tensor on a GPU, at a place that is known."""
        place = self._places.get(id(module))
        if place is None or place.deferred is None:
            return False
        try:
            return place.deferred.note(place, tensor, self._scale())
        except Exception as error:  # as in `_take`
            give_up(place, tensor, error)
            return True

    def _take(self, module: nn.Module, value: Any, take: Callable[[Watched, Tensor, Any], None]) -> None:
        place = self._places.get(id(module))
        if place is None:  # a copy of a module takes its hooks along, and goes unwatched
            return
        tensor = value if isinstance(value, Tensor) else main_tensor(value)
        if tensor is None:
            if self._is_forward:  # of gradients, none may have come
                self._say_empty(place, value)
            return
        try:
            take(place, tensor, self._scale())
        except Exception as error:  # whoever only watches must not lose the run to it
            give_up(place, tensor, error)

    def _say_empty(self, place: Watched, value: Any) -> None:
        if not place.silent:
            place.silent = f"there is no tensor in its output, {type_name(value)}"
            warnings.warn(
                f"{place.label!r} cannot be watched: {place.silent}. Watch a module inside it, or leave "
                "it out (exclude=).",
                HooklineWarning,
                stacklevel=caller_stacklevel(),
            )


def give_up(place: Watched, tensor: Tensor, error: Exception) -> None:
    """Say once that a place cannot be measured; the run goes on."""
    if not place.silent:
        place.silent = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"The statistics of {place.label!r} ({type(tensor).__name__}, {tensor.dtype}, shape "
            f"{tuple(tensor.shape)}) could not be taken: {place.silent}. The run goes on; exclude= leaves it out.",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


@functools.cache
def _maker(layout: Layout) -> Callable[[list[Tensor]], Found | None]:
    """What makes the summary of the main one of several tensors; the same for the same layout, so that code fits."""

    def make(tensors: list[Tensor]) -> Found | None:
        main = main_of(tensors)
        return None if main is None else find_in(main, layout)

    return make
