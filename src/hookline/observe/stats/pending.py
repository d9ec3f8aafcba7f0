"""Tensors that were seen and are reduced later, many in one go.

Takes tensors with the places they were seen at, from the engine, and hands them to a reducer together: at the end of a
forward, of a backward pass, or when numbers are asked for. A launch for each tensor takes the host longer than many a
layer does; a note takes 2 µs. This is for devices that work behind the host: a CPU has the tensor in its cache at once,
and not later.

A tensor may be changed in place before its turn comes, and then its numbers would be wrong. So whoever sees a place for
the first time has the tensor reduced at once, and looks later whether it was changed (its version tells). Where it was,
tensors are reduced at once for good. Where it was not, later ones are noted, with their version: should one be changed
after all, its firing is lost and said to be, and the place is reduced at once from then on. What changes a tensor
without torch noticing (``.data``, a kernel of your own) is not noticed here.

Holding a tensor changes nothing that is computed. Autograd adds up gradients in place only where nobody else has them,
and otherwise makes a new one of the same numbers.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.sites import _torch
from hookline.sites.receipt import outside

if TYPE_CHECKING:
    from hookline.observe.stats.engine import Watched

__all__ = ["LIMIT", "Note", "Pending"]

LIMIT: Final = 256 << 20
"""How many bytes are held at most, beside the tensor that exceeds them."""

_T = TypeVar("_T")


class Note(NamedTuple):
    """A tensor that was seen at a place."""

    place: Watched
    tensor: Tensor
    scale: Any = None
    """What its numbers are to be divided by."""
    version: int = 0
    scale_version: int = 0

    def is_as_it_was(self) -> bool:
        """Whether nothing was changed in place since."""
        return self.tensor._version == self.version and _version_of(self.scale) == self.scale_version


class _Streams:
    """The streams of a device, by number; of a device that has none, here."""

    def now(self) -> int:
        """The one that work is put on."""
        return 0

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Puts work on that one."""
        return nullcontext()

    def join(self, number: int) -> None:
        """Has the current one wait for that one."""


class _CudaStreams(_Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def now(self) -> int:
        return _torch.current_stream(self._index)

    def on(self, number: int) -> AbstractContextManager[Any]:
        context: Any = torch.cuda.stream
        return cast(AbstractContextManager[Any], context(self._stream(number)))

    def join(self, number: int) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream(number))

    def _stream(self, number: int) -> torch.cuda.Stream:
        other: Any = torch.cuda.ExternalStream
        # Given 0, ExternalStream would be any stream.
        return (
            cast(torch.cuda.Stream, other(number, self._device)) if number else torch.cuda.default_stream(self._device)
        )


class Pending:
    """What was noted of the tensors of one device, and is still to be reduced.

    Threads may share it (the backward pass of a GPU runs in one of its own): notes are put in at one end of a queue and
    taken out at the other, each by one step that no other thread can divide.
    """

    def __init__(
        self, reduce: Callable[[Sequence[Note]], None], device: torch.device | None = None, *, limit: int = LIMIT
    ) -> None:
        self._reduce = reduce
        self._limit = limit
        self._streams = _CudaStreams(device) if device is not None and device.type == "cuda" else _Streams()
        self._notes: deque[tuple[int, Note]] = deque()
        self._held: dict[int, int] = {}
        self._bytes = 0
        self._task = -1
        self._last: int | None = None
        """The stream that rows were last added to on."""
        self._stays: dict[Watched, bool] = {}
        """For each place that is known: whether what is seen there stays as it is until the pass is over."""
        self._checks: deque[tuple[Watched, Tensor, int]] = deque()
        self.lost: dict[Watched, int] = {}
        """How many firings were not reduced because their tensor was changed first."""

    def __len__(self) -> int:
        return len(self._notes)

    def take(self, place: Watched, tensor: Tensor, scale: Any = None) -> None:
        """Reduce a tensor, now or later."""
        if not self._stays.get(place) or tensor.is_inference() or _torch.capturing():
            self._take_at_once(place, tensor, scale)
            return
        held = self._held
        address, size = tensor.data_ptr(), tensor.nbytes
        if held.get(address, 0) < size:  # several places may see one tensor
            held[address] = size
            self._bytes += size
        scale_version = 0 if scale is None else _version_of(scale)
        self._notes.append((self._streams.now(), Note(place, tensor, scale, tensor._version, scale_version)))
        if self._bytes > self._limit:
            self.reduce_noted()
        elif _torch.graph_task_id() != self._task:
            self._await_end()

    def flush(self) -> None:
        """Reduce all that is noted, and see which tensors were changed in place: a pass is over, or numbers are due."""
        if _torch.capturing():  # it would become part of the graph, and be done at each replay
            return
        self.reduce_noted()
        self._follow()
        for place, counter, version in _taken(self._checks):
            self._stays[place] = self._stays.get(place, True) and counter._version == version

    def reduce_noted(self) -> None:
        """Reduce all that is noted."""
        self._held = {}
        self._bytes = 0
        by_stream: dict[int, list[Note]] = {}
        for stream, note in _taken(self._notes):
            if note.is_as_it_was():
                by_stream.setdefault(stream, []).append(note)
            else:
                self._lose(note.place)
        for stream, notes in by_stream.items():
            with nullcontext() if stream == self._streams.now() else self._streams.on(stream):
                self._follow()
                self._hand_over(notes)

    def forget(self) -> None:
        """Let go of what is noted."""
        self._notes.clear()
        self._held = {}
        self._bytes = 0

    def _hand_over(self, notes: list[Note]) -> None:
        try:
            self._reduce(notes)
        except Exception as error:  # whoever only watches must not lose the run to it
            for note in notes:
                note.place.silent = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"The statistics of {len(notes)} tensors could not be taken: {type(error).__name__}: {error}. The run "
                "goes on without them.",
                HooklineWarning,
                stacklevel=outside(),
            )

    def _follow(self) -> None:
        """What is put on the current stream from now on comes after what was added to rows before, on any."""
        now = self._streams.now()
        if now != self._last and not _torch.capturing():  # whoever records a graph has waited
            if self._last is not None:
                self._streams.join(self._last)
            self._last = now

    def _take_at_once(self, place: Watched, tensor: Tensor, scale: Any) -> None:
        self._follow()
        self._reduce([Note(place, tensor, scale)])
        if place in self._stays or tensor.is_inference():
            return
        # The version is kept by a tensor without numbers that shares the counter, so no memory is held.
        with torch.no_grad():
            counter = tensor.detach()
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._checks.append((place, counter, counter._version))
        self._await_end()

    def _await_end(self) -> None:
        """Have all reduced at the end of the backward pass, if one is running."""
        task = self._task = _torch.graph_task_id()
        if task != -1:
            _torch.queue_end_of_backward(self.flush)

    def _lose(self, place: Watched) -> None:
        self._stays[place] = False
        count = self.lost[place] = self.lost.get(place, 0) + 1
        place.silent = f"{count} firing(s) not counted: the tensor was changed in place, which it was not at first"


def _taken(queue: deque[_T]) -> Iterator[_T]:
    """All that is in a queue, which is empty then."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


def _version_of(scale: Any) -> int:
    return scale._version if isinstance(scale, Tensor) and not scale.is_inference() else 0
