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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.observe.watch.stats_engine import Watched

__all__ = ["Note", "Pending", "limit_of"]

_CPU: Final = torch.device("cpu")
_SHARE: Final = 64
_LEAST: Final = 64 << 20
_MOST_CHECKS: Final = 4096
"""How many firings at places that are not known are remembered; that is more than a step has."""

_T = TypeVar("_T")


def limit_of(device: torch.device) -> int:
    """How many bytes are held at most, beside the tensor that exceeds them: one part in 64 of the device's memory.

    On an H200 that is 2.2 GiB; with 256 MiB, a step of GPT-2 had 26 batches to reduce, not 5. What a forward has made
    is mostly kept for the backward pass anyway: the peak was the same.
    """
    if device.type != "cuda":
        return _LEAST
    return max(torch.cuda.get_device_properties(device).total_memory // _SHARE, _LEAST)


class Note(NamedTuple):
    """A tensor that was seen at a place."""

    place: Watched
    tensor: Tensor
    scale: Any = None
    """What its numbers are to be divided by."""


_Kept: TypeAlias = "tuple[int, Watched, Tensor, Any, int, int]"
"""What is noted: the stream, the place, the tensor, its scale, and the versions of both."""


class _Streams:
    """The streams of a device, by number; of a device that has none, here."""

    now: Callable[[], int] = staticmethod(lambda: 0)
    """Tells the one that work is put on."""

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Puts work on that one."""
        return nullcontext()

    def join(self, number: int) -> None:
        """Has the current one wait for that one."""


class _CudaStreams(_Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now = _torch.current_stream_of(torch.cuda.current_device() if device.index is None else device.index)

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
        self,
        reduce: Callable[[Sequence[Note]], None],
        device: torch.device = _CPU,
        *,
        limit: int | None = None,
    ) -> None:
        self._reduce = reduce
        self._limit = limit_of(device) if limit is None else limit
        self._streams = _CudaStreams(device) if device.type == "cuda" else _Streams()
        self._index = -1 if device.index is None else device.index
        self._notes: deque[_Kept] = deque()
        self._bytes = 0
        self._task = -1
        self._last: int | None = None
        """The stream that rows were last added to on."""
        self._stays: dict[Watched, bool] = {}
        """For each place that is known: whether what is seen there stays as it is until the pass is over."""
        self._checks: deque[tuple[Watched, Tensor, int]] = deque()
        self._checked = 0
        """The bytes of tensors that were seen for the first time."""
        self.lost: dict[Watched, int] = {}
        """How many firings were not reduced because their tensor was changed first."""

    def __len__(self) -> int:
        return len(self._notes)

    def take(self, place: Watched, tensor: Tensor, scale: Any = None) -> None:
        """Reduce a tensor, now or later."""
        if not (self._stays.get(place) and self.note(place, tensor, scale)):
            self._take_at_once(place, tensor, scale)

    def note(self, place: Watched, tensor: Tensor, scale: Any = None) -> bool:
        """Keep a tensor for later; False if that cannot be done.

        In one piece: a call costs a microsecond here, in the middle of a model, where nothing is in the CPU's cache.
        """
        if (
            type(tensor) is not Tensor
            or tensor.get_device() != self._index
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_inference()
            or _torch.is_wrapped(tensor)
        ):
            return False
        stream = self._streams.now()
        if stream and _torch.capturing():  # CUDA records no graph on the stream of number 0, and asking it takes 2 µs
            return False
        scale_version = 0 if scale is None else _version_of(scale)
        self._notes.append((stream, place, tensor, scale, tensor._version, scale_version))
        self._bytes += tensor.untyped_storage().nbytes()  # a view holds all that it is a view of
        if self._bytes > self._limit:
            self.reduce_noted()
        elif _torch.graph_task_id() != self._task:
            self._await_end()
        return True

    def flush(self) -> None:
        """Reduce all that is noted, and see which tensors were changed in place: a pass is over, or numbers are due."""
        if _torch.capturing():  # it would become part of the graph, and be done at each replay
            return
        self.reduce_noted()
        self._follow()
        self._checked = 0
        for check in _taken(self._checks):
            self._judge(*check)

    def reduce_noted(self) -> None:
        """Reduce all that is noted."""
        self._bytes = 0
        by_stream: dict[int, list[Note]] = {}
        for stream, place, tensor, scale, version, scale_version in _taken(self._notes):
            if tensor._version != version or (scale is not None and _version_of(scale) != scale_version):
                self._lose(place)
            else:
                by_stream.setdefault(stream, []).append(Note(place, tensor, scale))
        for stream, notes in by_stream.items():
            with nullcontext() if stream == self._streams.now() else self._streams.on(stream):
                self._follow()
                self._hand_over(notes)

    def forget(self) -> None:
        """Let go of what is noted."""
        self._notes.clear()
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
                stacklevel=caller_stacklevel(),
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
        # Autograd adds to a gradient in place if nobody else has it. Later somebody has: it is held this time, too.
        self._checked += tensor.untyped_storage().nbytes()
        counter = tensor if self._checked <= self._limit else _without_numbers(tensor)
        self._checks.append((place, counter, counter._version))
        if len(self._checks) > _MOST_CHECKS:  # nobody says that a pass is over
            self._judge(*self._checks.popleft())
        self._await_end()

    def _judge(self, place: Watched, counter: Tensor, version: int) -> None:
        """See whether a tensor was changed in place since it was first seen."""
        stays = self._stays[place] = self._stays.get(place, True) and counter._version == version
        place.deferred = self if stays else None

    def _await_end(self) -> None:
        """Have all reduced at the end of the backward pass, if one is running."""
        task = self._task = _torch.graph_task_id()
        if task != -1:
            _torch.queue_end_of_backward(self.flush)

    def _lose(self, place: Watched) -> None:
        self._stays[place] = False
        place.deferred = None
        count = self.lost[place] = self.lost.get(place, 0) + 1
        place.silent = f"{count} firing(s) not counted: the tensor was changed in place, which it was not at first"


def _taken(queue: deque[_T]) -> Iterator[_T]:
    """All that is in a queue, which is empty then."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


def _without_numbers(tensor: Tensor) -> Tensor:
    """A tensor that has the version of another one, and none of its memory."""
    with torch.no_grad():
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _version_of(scale: Any) -> int:
    return scale._version if isinstance(scale, Tensor) and not scale.is_inference() else 0
