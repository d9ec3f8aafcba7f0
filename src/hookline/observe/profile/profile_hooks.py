"""Mark when calls of modules and functions begin and end, without making CPU or GPU wait.

`Profile` puts the hooks of a `ProfileRecorder` on sites, and reads its spans (calls) and visits (of backward passes at
calls). On a GPU a mark is an event in the stream, so it has the time of the device, not that of Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hookline import tree
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.functions.function_site import FunctionSite
    from hookline.sites.site_info import Site

__all__ = ["CpuClock", "CudaClock", "ProfileClock", "ProfileRecorder", "Span", "Visit", "clock_for"]

_Key: TypeAlias = tuple[str, int, int]
"""Name, step, and number of the call, as gradient hooks know it."""


class ProfileClock(Protocol):
    """Marks moments now, and gives their times later."""

    name: str
    """What it measures, for the report."""

    def mark(self) -> Any:
        """Mark this moment."""

    def settle(self) -> None:
        """Wait until the device has passed all marks."""

    def since(self, began: Any) -> Callable[[Any], float]:
        """Return a function that gives the seconds from ``began`` to any other mark, after `settle`."""

    def allocated(self) -> int | None:
        """Return the bytes in use on the device now; None if they are not counted."""


class CpuClock:
    """The time of the machine."""

    name = "CPU"
    mark = staticmethod(time.perf_counter_ns)  # straight to C: it is called four times per call of a module

    def settle(self) -> None:
        """Do nothing: every mark is passed at once."""

    def since(self, began: int) -> Callable[[int], float]:
        """Return a function that gives the seconds from ``began`` to any other mark."""
        return lambda mark: (mark - began) * 1e-9

    def allocated(self) -> int | None:
        """Return None: the process's allocator keeps no count."""
        return None


class CudaClock:
    """The time of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = torch.cuda.get_device_name(device)

    def mark(self) -> torch.cuda.Event:
        """Mark the moment the device gets here."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def since(self, began: torch.cuda.Event) -> Callable[[torch.cuda.Event], float]:
        """Return a function that gives the seconds from ``began`` to any other mark."""
        base, offset = began, 0.0

        def seconds(mark: torch.cuda.Event) -> float:
            nonlocal base, offset
            milliseconds: float = base.elapsed_time(mark)
            moment = offset + milliseconds * 1e-3
            if abs(milliseconds) > 1000:  # torch gives 32 bits: count on from here, or minutes cost the microseconds
                base, offset = mark, moment
            return moment

        return seconds

    def allocated(self) -> int | None:
        """Return what the caching allocator has given out."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)  # memory_allocated() makes a flat copy of it first
        bytes_now: int = stats["allocated_bytes"]["all"]["current"] if stats else 0
        return bytes_now


def clock_for(model: nn.Module) -> ProfileClock:
    """Return the clock of the device that the model is on."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cuda":
            return CudaClock(tensor.device)
    return CpuClock()


@dataclass(slots=True, eq=False)
class Span:
    """One call of one site."""

    name: str
    kind: str
    step: int
    parent: Span | None = None
    """The call around it, of the sites that are measured."""
    start: Any = None
    end: Any = None
    """Marks of the clock; there is no end if the call raised."""
    visit: Visit | None = None
    """Its latest backward pass."""
    output_bytes: int = 0
    allocated: int | None = None

    def above(self) -> Iterator[Span]:
        """Yield the calls around it, the nearest first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent


@dataclass(slots=True, eq=False)
class Visit:
    """One backward pass at one call, or its forward once more within that pass."""

    span: Span
    task: int
    """The number of the pass."""
    thread: int
    start: Any
    """The mark when the first gradient of an output was there."""
    end: Any = None
    """The mark when the last gradient left for an input; None if none did."""
    seen: Any = None
    """If there is no end: the mark when the pass had come past all that the call has made."""
    repeats: bool = False
    """Whether activation checkpointing repeats the forward; then the marks are around that."""


class _ThreadCalls(threading.local):
    """The calls that are under way in this thread."""

    def __init__(self) -> None:
        self.stack: list[Span] = []
        """The calls that have begun and not ended; one that raised goes when the call around it ends."""
        self.counts: dict[str, int] = {}
        """How often each module was called with gradients on in this step, as gradient hooks count calls."""
        self.step = -1
        """The step that ``counts`` is of; calls of a part begin steps too, where the model itself is not called."""
        self.repeats: list[Visit] = []
        """The same as ``stack`` for calls that activation checkpointing repeats in a backward pass."""
        self.visited: Span | None = None
        """The call that a backward pass came to last."""

    def begin(self) -> None:
        """Begin a forward of the whole model."""
        if not any(span.name == "" for span in self.stack):
            self.stack.clear()  # parts of it were called by themselves, and raised

    def count(self, name: str, step: int) -> int:
        """Return the number of this call of a module in `step`, among those with gradients on."""
        if step != self.step:
            self.step = step
            self.counts.clear()
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return number


class ProfileRecorder:
    """Notes marks of the clock, and leaves all arithmetic for later."""

    def __init__(self, clock: ProfileClock, max_spans: int, *, takes_backward: bool) -> None:
        self.clock = clock
        self.takes_backward = takes_backward
        self._max_spans = max_spans
        self.reset()

    def reset(self) -> None:
        """Drop all that was recorded."""
        self.spans: list[Span] = []
        self.visits: list[Visit] = []
        self.dropped = 0
        self._here = _ThreadCalls()
        self._calls: dict[_Key, Span] = {}

    # -- in the forward ----------------------------------------------------------------------------------

    def enter_module(self, module: Any, args: Any, *, site: Site) -> None:
        """Mark the begin of a module's call."""
        if site.recompute:
            self._enter_repeat(site)
            return
        here = self._here
        if not site.name:
            here.begin()
        number = here.count(site.name, site.step) if torch.is_grad_enabled() else site.call
        self._enter(here, Span(site.name, site.type, site.step), number)

    def leave_module(self, module: Any, args: Any, output: Any, *, site: Site) -> None:
        """Mark the end of a module's call; the model as a whole may have raised as well."""
        if site.recompute:
            self._leave_repeat(site.name)
        else:
            self._leave(site.name, output)

    def enter_function(self, fn: FunctionSite, inputs: Grads) -> None:
        """Mark the begin of a function's call."""
        if not fn.in_backward:
            self._enter(self._here, Span(fn.name, "function", fn.step), fn.call)

    def leave_function(self, fn: FunctionSite, inputs: Grads, outputs: Grads) -> None:
        """Mark the end of a function's call."""
        if not fn.in_backward:
            self._leave(fn.name, outputs)

    def _enter(self, here: _ThreadCalls, span: Span, number: int) -> None:
        span.parent = here.stack[-1] if here.stack else None
        here.stack.append(span)
        if len(self.spans) >= self._max_spans:
            self.dropped += 1
            return
        self.spans.append(span)
        key = span.name, span.step, number
        if torch.is_grad_enabled():
            self._calls[key] = span
        else:  # gradients come only if checkpointing repeats the call with them on
            self._calls.setdefault(key, span)
        span.allocated = self.clock.allocated()
        span.start = self.clock.mark()

    def _leave(self, name: str, output: Any) -> None:
        now = self.clock.mark()
        stack = self._here.stack
        position = next((place for place in reversed(range(len(stack))) if stack[place].name == name), None)
        if position is None:
            return  # it had begun before the profile
        span = stack[position]
        del stack[position:]
        if span.start is None:
            return
        span.end = now
        span.output_bytes = sum(map(_num_bytes, tree.tensors_of(output)))
        if span.allocated is not None:
            span.allocated = (self.clock.allocated() or 0) - span.allocated

    # -- in the backward ---------------------------------------------------------------------------------

    def enter_backward(self, subject: Any, grad_outputs: Grads, *, site: Site) -> None:
        """Mark that the gradients of a call's outputs are there."""
        span = self._find(site)
        if span is not None:
            now = self.clock.mark() if site.began is None else site.began
            span.visit = Visit(span, _torch.graph_task_id(), threading.get_ident(), now)
            self.visits.append(span.visit)
            self._here.visited = span

    def leave_backward(self, subject: Any, grad_inputs: Grads, grad_outputs: Grads, *, site: Site) -> None:
        """Mark that a backward pass has come past a call, perhaps some time ago."""
        span = self._find(site)
        if span is None or span.visit is None:
            return
        if site.ended is None:
            span.visit.seen = self.clock.mark()
        else:
            span.visit.end = site.ended

    def _find(self, site: Site) -> Span | None:
        step = site.step
        if step == -1 and self._here.visited is not None:
            step = self._here.visited.step  # a thread of autograd's own, which has run no forward, repeats one
        return self._calls.get((site.name, step, site.call))

    def _enter_repeat(self, site: Site) -> None:
        span = self._find(site)
        if span is None or not self.takes_backward:
            return
        repeats, task = self._here.repeats, _torch.graph_task_id()
        if repeats and repeats[0].task != task:
            repeats.clear()
        visit = Visit(span, task, threading.get_ident(), self.clock.mark(), repeats=True)
        repeats.append(visit)
        self.visits.append(visit)

    def _leave_repeat(self, name: str) -> None:
        now = self.clock.mark()
        repeats = self._here.repeats
        while any(visit.span.name == name for visit in repeats):
            visit = repeats.pop()
            if visit.span.name == name:
                visit.end = now
                return


def _num_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:  # torch has no nbytes for these
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
