"""Add up statistics of outputs by the engine of ``watch`` while a model answers.

``activation_stats``, ``nan_alarm`` and ``probe`` derive from `StreamingObserver`. In inference mode torch does not say
whether a tensor was changed in place, so an output cannot be noted and read later, as ``watch`` does in training. A
launch for each takes the host 140 µs next to an H200, more than many a layer has to do when it decodes; a copy takes
10. So small outputs on a GPU are copied, and the copies of a forward are reduced together; larger ones are worth a
launch of their own. On a CPU each is reduced in its call. Compiled code hands the outputs of all modules over by one
operator, and they are reduced together.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from hookline.factories.factory_hook import ByModule, Observer
from hookline.factories.served_batch import output_tensor, without_padding
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.graph import hand_over_late
from hookline.observe.watch.pending import limit_of
from hookline.sites import _torch
from hookline.sites.compiled.op_schemas import Summary
from hookline.sites.hook_at_site import PerSiteHook
from hookline.tree import main_of

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.watch.row import Layout
    from hookline.sites.compiled.op_schemas import Found, Handed
    from hookline.sites.site_info import Site

__all__ = ["Gathered", "StreamedModule", "Streaming", "StreamingObserver"]

_READ_AT_ONCE: Final = ("cpu", "mps", "meta")
"""Devices that the engine reads at once, as they do not run behind the host."""
_SMALL_SHARE: Final = 4096
"""Of what `limit_of` gives, a copied output has one part in so many at most: 560 KiB on an H200, a batch of 64 tokens
of width 4096."""


class StreamedModule:
    """Hold the row of one module, and count its calls."""

    __slots__ = ("calls", "name", "watched")

    def __init__(self, engine: StatsEngine, name: str) -> None:
        self.name = name
        self.watched = engine.place(name, "")
        self.calls = 0


ModuleT = TypeVar("ModuleT", bound=StreamedModule)
Gathered: TypeAlias = list[tuple[StreamedModule, Tensor]]
"""Outputs of compiled code that are reduced together, before it goes on and uses their memory again."""


class Streaming:
    """Add up statistics of any number of modules, on the devices of their tensors."""

    def __init__(self, layout: Layout) -> None:
        self.engine = StatsEngine(layout)

    @property
    def layout(self) -> Layout:
        """Return which statistics are counted."""
        return self.engine.layout

    def take(self, module: StreamedModule, tensor: Tensor, gathered: Gathered | None = None) -> None:
        """Add the statistics of a tensor, now or at the end of the forward; or put it into ``gathered`` for that."""
        place, device = module.watched, tensor.device
        if device not in place.rows and _torch.capturing():
            place.unread = "the first forward was recorded as a CUDA graph, where nothing can be made ready"
        elif gathered is not None and device.type not in _READ_AT_ONCE:
            gathered.append((module, tensor))
        else:
            self.engine.take(place, _copied(tensor) if _may_change(tensor) else tensor)

    def take_gathered(self, gathered: Gathered) -> None:
        """Add the statistics of tensors, those on one device in one launch."""
        self.engine.take_all((module.watched, tensor, None) for module, tensor in gathered)

    def read(self, modules: Iterable[StreamedModule]) -> list[dict[str, float]]:
        """Return the columns of each module: one transfer per device."""
        with self.engine.lock:
            cells = self.engine.read()
            return [cells[module.watched] for module in modules]


def _may_change(tensor: Tensor) -> bool:
    """Return whether a small tensor on a GPU may be changed in place behind the back of torch."""
    return (
        tensor.is_inference()
        and tensor.device.type not in _READ_AT_ONCE
        and type(tensor) is Tensor
        and _torch.has_numbers(tensor)
        and tensor.layout is torch.strided
        and tensor.nbytes <= _most_copied(tensor.device)
        and not _torch.capturing()
    )


def _copied(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a copy whose changes are counted, so that the engine may hold it
        return tensor.clone()


@functools.cache
def _most_copied(device: torch.device) -> int:
    return limit_of(device) // _SMALL_SHARE


def _main_output(tensors: list[Tensor]) -> Found:
    """Return the main tensor of an output, to be handed over; an output without a tensor counts as a call."""
    main = main_of(tensors)
    hand_over_late()
    return ([] if main is None else [main.detach()]), 1


class StreamingObserver(Observer, PerSiteHook, Summary, Generic[ModuleT]):
    """Feed a `Streaming` with the outputs of each module that the hook is on."""

    number = zlib.crc32(b"main tensor of an output")
    make = staticmethod(_main_output)

    def __init__(self, streaming: Streaming, kind: type[ModuleT], *, add_residual: bool = False) -> None:
        self._streaming = streaming
        self._modules = ByModule(lambda name: kind(streaming.engine, name))
        self._expected: set[str] = set()
        """Modules that it was told of before they ran."""
        self._add_residual = add_residual
        self._first: ModuleT | None = None
        """The module that was called first: when it is called again, a forward is over."""
        self.summary = None if add_residual else self

    def expect(self, names: Iterable[str]) -> None:
        """Make the rows of modules with these names now."""
        self._expected |= set(names)
        self._modules.expect(names)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Add the output of a module."""
        if not _torch.in_recomputation():  # it was counted the first time
            self._fire(self._modules.of(module, site), output)

    @property
    def is_per_site(self) -> bool:
        """Whether nothing is done around a call that `for_site` would leave out, such as reading the inputs."""
        return type(self).__call__ is StreamingObserver.__call__

    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what observes the module called ``name``, whose state is found once."""
        seen: ModuleT | None = None

        def observe(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal seen
            if not _torch.in_recomputation():
                seen = seen or self._modules.named(name, module)
                self._fire(seen, output)

        return observe

    def _fire(self, seen: ModuleT, output: Any, gathered: Gathered | None = None) -> None:
        """Add the output of a module; into ``gathered``, if it is to be reduced together with others."""
        if self._first is None:
            self._first = seen
        elif seen is self._first:
            self._end_forward()
        seen.calls += 1
        tensor = output_tensor(output, self._add_residual)
        if tensor is None:
            seen.watched.unread = "there is no tensor in its output"
        else:
            self._take(seen, tensor, gathered)

    def receive(self, items: Sequence[Handed]) -> None:
        """Add the outputs that compiled code hands over, in one call where they are small."""
        if not _torch.in_recomputation():
            gathered: Gathered = []
            for name, module, found, _ in items:
                self._fire(self._modules.named(name, module), found[0] if found else None, gathered)
            self._streaming.take_gathered(gathered)

    def _end_forward(self) -> None:
        """Begin the next forward: reduce what waits."""
        self._streaming.engine.flush()

    def _take(self, seen: ModuleT, tensor: Tensor, gathered: Gathered | None) -> None:
        """Add the statistics of ``tensor``."""
        try:
            real = without_padding(tensor)
            if real is not None:
                self._add(seen, real, gathered)
        except Exception as error:  # an observer must not end the run
            seen.watched.give_up(tensor, error)

    def _add(self, seen: ModuleT, real: Tensor, gathered: Gathered | None) -> None:
        self._streaming.take(seen, real, gathered)


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(StreamingObserver.__call__)
