"""Hold tensors that were seen on a GPU, and have many of them reduced at once.

`StatsEngine` (engine.py) and `DeviceFingerprints` (fingerprint.py of ``debug.compare``) make one `PendingTensors` for
each device and give it tensors with their places. It calls them back by itself at the end of a backward pass and when
it holds too many bytes, and when its owner calls `flush`: after a forward, or when numbers are asked for. Where
``place.deferred`` is set, watch hooks (hooks.py) and `TraceRecorder` (``debug.compare``) call its `note` themselves. A
``scale`` is handed on unread, but for the version of a tensor; of traces it is the number of a row. `Kernel` and
factories/streaming_stats.py use `Streams`, the latter `limit_of` too.

A launch for each tensor takes the host longer than many a layer does; a note takes 2 µs. `StatsEngine.take` and
`DeviceFingerprints.add` give it no tensor of a CPU, where a tensor is in the cache at once, and not later; the tests do
(tests/observe/watch/test_pending.py), and they alone read ``lost``.

A place is a `WatchedPlace` (engine.py), or the ``_Place`` of recorder.py in ``debug.compare``. Both have the attributes
``deferred``, which is None until it is set here, and ``silent``, the reason why something was not counted.

A tensor may be changed in place before it is reduced, and then its numbers would be wrong. So the first tensor of a
place is reduced at once, and its version is compared later. Where it was changed, tensors are always reduced at once.
Where it was not, later ones are noted, with their version. Should one be changed after all, its firing is lost and
reported as such, and the place is reduced at once from then on. What changes a tensor without torch noticing
(``.data``, a kernel of your own) is not noticed here.

Holding a tensor changes nothing that is computed. Autograd adds up gradients in place only where nothing else holds
them, and otherwise makes a new one of the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.observe.watch.engine import WatchedPlace

_SHARE: Final = 64
_LEAST: Final = 64 << 20
"""Bytes; see `limit_of`."""
_MOST_CHECKS: Final = 4096
"""How many firings at places that are not known are remembered; that is more than a step has."""


def limit_of(device: torch.device) -> int:
    """Return how many bytes are held, beside the tensor that exceeds them: one part in 64 of the device's memory.

    On an H200 that is 2.2 GiB; with 256 MiB, a step of GPT-2 had 26 batches to reduce, not 5. What a forward has made
    is mostly kept for the backward pass anyway: the peak was the same.
    """
    if device.type != "cuda":
        return _LEAST
    return max(torch.cuda.get_device_properties(device).total_memory // _SHARE, _LEAST)


_Kept: TypeAlias = "tuple[int, WatchedPlace, Tensor, Any, int, int]"
"""Stream, place, tensor, its scale, and the versions of both."""
Note: TypeAlias = "tuple[WatchedPlace, Tensor, Any]"
"""A tensor that was seen: its place, the tensor, and what its numbers are divided by. A plain tuple, since to make an
object of a class takes longer than all else here."""


class PendingTensors:
    """The tensors of one device that are still to be reduced.

    Threads may share it (the backward pass of a GPU runs in one of its own): notes enter a queue at one end and leave
    it at the other, each by one step that no other thread can divide.
    """

    def __init__(self, reduce: Callable[[Sequence[Note]], None], device: torch.device) -> None:
        self._reduce = reduce
        self._limit = limit_of(device)
        self._streams = Streams(device)
        self._index = -1 if device.index is None else device.index
        self._notes: deque[_Kept] = deque()
        self._bytes = 0
        self._task = -1
        self._last: int | None = None
        """The stream that last added to rows."""
        self._stays: dict[WatchedPlace, bool] = {}
        """For each place that is known: whether its tensors stay unchanged until the pass is over."""
        self._checks: deque[tuple[WatchedPlace, Tensor, int]] = deque()
        self._checked = 0
        """The bytes of tensors that were seen for the first time."""
        self.lost: dict[WatchedPlace, int] = {}
        """How many firings were not reduced because their tensor was changed first."""

    def __len__(self) -> int:
        return len(self._notes)

    def take(self, place: WatchedPlace, tensor: Tensor, scale: Any = None) -> None:
        """Reduce a tensor, now or later."""
        if not (self._stays.get(place) and self.note(place, tensor, scale)):
            self._take_at_once(place, tensor, scale)

    def note(self, place: Any, tensor: Any, scale: Any = None, task: int | None = None) -> bool:
        """Keep a tensor for later; return False if that cannot be done.

        ``task`` is the backward pass that is running, if that is known.

        One function without helpers, since a call costs a microsecond here: nothing is in the CPU's cache. Ask the
        tensor nothing that can be asked when it is reduced.
        """
        if (
            type(tensor) is not Tensor
            or tensor.get_device() != self._index
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or (_torch.transforms_active() and _torch.is_wrapped(tensor))
        ):
            return False
        stream = self._streams.now()
        if stream and _torch.capturing():  # CUDA records no graph on the stream of number 0, and asking it takes 2 µs
            return False
        try:
            version = tensor._version
        except RuntimeError:  # of inference mode, which keeps none
            return False
        scale_version = _version_of(scale) if isinstance(scale, Tensor) else 0
        self._notes.append((stream, place, tensor, scale, version, scale_version))
        # A view holds all that it is a view of; to ask for that takes four times as long.
        self._bytes += tensor.nbytes if tensor._base is None else tensor.untyped_storage().nbytes()
        if self._bytes > self._limit:
            self.reduce_noted()
        elif (_torch.graph_task_id() if task is None else task) != self._task:
            self._await_end()
        return True

    def flush(self) -> None:
        """Reduce all notes, and compare versions: a pass is over, or numbers are asked for."""
        if _torch.capturing():  # it would become part of the graph, and be done at each replay
            return
        self.reduce_noted()
        self._follow()
        self._checked = 0
        with suppress(IndexError):  # another thread may be faster
            while True:
                self._judge(*self._checks.popleft())

    def reduce_noted(self) -> None:
        """Reduce all notes."""
        self._bytes = 0
        by_stream: dict[int, list[Note]] = {}
        pop = self._notes.popleft  # one step, which no other thread can divide
        with suppress(IndexError):
            while True:
                stream, place, tensor, scale, version, scale_version = pop()
                if tensor._version != version or (isinstance(scale, Tensor) and _version_of(scale) != scale_version):
                    self._lose(place)
                elif stream in by_stream:
                    by_stream[stream].append((place, tensor, scale))
                else:
                    by_stream[stream] = [(place, tensor, scale)]
        for stream, notes in by_stream.items():
            with self._streams.on(stream):
                self._follow()
                self._reduce(notes)

    def forget(self) -> None:
        """Drop all notes."""
        self._notes.clear()
        self._bytes = 0

    def _follow(self) -> None:
        """Make the current stream wait for the one that last added to rows."""
        now = self._streams.now()
        if now != self._last and not _torch.capturing():  # who records a graph has waited
            if self._last is not None:
                self._streams.join(self._last)
            self._last = now

    def _take_at_once(self, place: WatchedPlace, tensor: Tensor, scale: Any) -> None:
        self._follow()
        self._reduce([(place, tensor, scale)])
        if place in self._stays or tensor.is_inference():
            return
        # Autograd adds to a gradient in place if nothing else holds it. Later ones are held, so this one is, too.
        self._checked += tensor.untyped_storage().nbytes()
        counter = tensor if self._checked <= self._limit else _without_numbers(tensor)
        self._checks.append((place, counter, counter._version))
        if len(self._checks) > _MOST_CHECKS:  # no pass has ended for long
            self._judge(*self._checks.popleft())
        self._await_end()

    def _judge(self, place: WatchedPlace, counter: Tensor, version: int) -> None:
        """Decide by the version of the first tensor whether later ones of its place may wait."""
        stays = self._stays[place] = self._stays.get(place, True) and counter._version == version
        place.deferred = self if stays else None

    def _await_end(self) -> None:
        """Flush at the end of the backward pass, if one is running."""
        task = _torch.graph_task_id()
        if task not in (-1, self._task):
            _torch.queue_end_of_backward(self.flush)
        self._task = task

    def _lose(self, place: WatchedPlace) -> None:
        self._stays[place] = False
        place.deferred = None
        count = self.lost[place] = self.lost.get(place, 0) + 1
        place.silent = f"{count} firing(s) not counted: the tensor was changed in place, which it was not at first"


def _without_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version of ``tensor``, and none of its memory."""
    with torch.no_grad():
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _version_of(scale: Tensor) -> int:
    return 0 if scale.is_inference() else scale._version


# -- streams of a device -------------------------------------------------------------------------------------


class Streams:
    """The streams of a device, by number; a device that is no CUDA device has stream 0 alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now: Callable[[], int] = lambda: 0
        """Return the current stream."""
        if device.type == "cuda":
            self.now = _torch.current_stream_of(torch.cuda.current_device() if device.index is None else device.index)

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Return a block whose work is put on stream ``number``."""
        return nullcontext() if number == self.now() else torch.cuda.stream(self._of(number))

    def join(self, number: int) -> None:
        """Make the current stream wait for stream ``number``, which is another one."""
        torch.cuda.current_stream(self._device).wait_stream(self._of(number))

    def _of(self, number: int) -> torch.cuda.Stream:
        if not number:  # given 0, ExternalStream would be any stream
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(number, self._device)  # type: ignore[no-untyped-call]
