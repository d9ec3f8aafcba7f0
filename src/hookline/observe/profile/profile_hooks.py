"""Mark when calls of modules and functions begin and end, without making CPU or GPU wait.

`Profile` puts the hooks of a `ProfileRecorder` on sites, and reads its spans (calls) and visits (of a thread at calls).
On a GPU a mark is an event in the stream, so it has the time of the device, not that of Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from hookline import tree
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.functions.function_site import FunctionSite
    from hookline.sites.site_info import Site

__all__ = ["BACKWARD", "FORWARD", "CpuClock", "ProfileRecorder", "Span", "Visit", "clock_for"]

FORWARD: Final = 0
BACKWARD: Final = 1
REPEAT: Final = 2
"""What a thread does at a call: REPEAT is its forward once more, for activation checkpointing."""

_Key: TypeAlias = tuple[str, int, int]
"""Name, step, and number of the call, as gradient hooks know it."""


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


def clock_for(model: nn.Module) -> Any:
    """Return the clock of the device that the model is on: a `CudaClock` or a `CpuClock`."""
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
    backward: Visit | None = None
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
    """What a thread does at a call, from one mark of the clock to another."""

    span: Span
    way: int
    """FORWARD, BACKWARD or REPEAT."""
    start: Any
    """In a backward pass, when the first gradient of an output was there."""
    task: int
    """The number of the backward pass; -1 outside of one."""
    thread: int
    end: Any = None
    """In a backward pass, when the last gradient left for an input; None if the call, or the pass, raised."""
    is_exact: bool = True
    """Whether the call has told its end; else it is when the pass had come past all that the call has made."""


class _ThreadCalls(threading.local):
    """The calls that are under way in this thread."""

    def __init__(self) -> None:
        self.stack: list[Visit] = []
        """Forwards and repetitions that have not ended; one that raised goes when the call around it ends."""
        self.counts: dict[str, int] = {}
        """How often each module was called with gradients on in this step, as gradient hooks count calls."""
        self.step = -1
        """The step that ``counts`` is of; calls of a part begin steps too, where the model itself is not called."""
        self.visited: Span | None = None
        """The call that a backward pass came to last."""

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

    def __init__(self, clock: Any, *, takes_backward: bool) -> None:
        self.clock = clock
        self.takes_backward = takes_backward
        self.reset()

    def reset(self) -> None:
        """Drop all that was recorded."""
        self.spans: list[Span] = []
        self.visits: list[Visit] = []
        self._here = _ThreadCalls()
        self._calls: dict[_Key, Span] = {}

    # -- in the forward ----------------------------------------------------------------------------------

    def enter_module(self, module: Any, args: Any, *, site: Site) -> None:
        """Mark the begin of a module's call."""
        if site.recompute:
            self._enter_repeat(site)
            return
        here = self._here
        if not site.name and not any(visit.span.name == "" and visit.way == FORWARD for visit in here.stack):
            here.stack.clear()  # parts of the model were called by themselves, and raised
        number = here.count(site.name, site.step) if torch.is_grad_enabled() else site.call
        self._enter(Span(site.name, site.type, site.step), number)

    def leave_module(self, module: Any, args: Any, output: Any, *, site: Site) -> None:
        """Mark the end of a module's call; the model as a whole may have raised as well."""
        self._leave(site.name, REPEAT if site.recompute else FORWARD, output)

    def enter_function(self, fn: FunctionSite, inputs: Grads) -> None:
        """Mark the begin of a function's call."""
        if not fn.in_backward:
            self._enter(Span(fn.name, "function", fn.step), fn.call)

    def leave_function(self, fn: FunctionSite, inputs: Grads, outputs: Grads) -> None:
        """Mark the end of a function's call."""
        if not fn.in_backward:
            self._leave(fn.name, FORWARD, outputs)

    def _enter(self, span: Span, number: int) -> None:
        stack = self._here.stack
        span.parent = next((visit.span for visit in reversed(stack) if visit.way == FORWARD), None)
        self.spans.append(span)
        key = span.name, span.step, number
        if torch.is_grad_enabled():
            self._calls[key] = span
        else:  # gradients come only if checkpointing repeats the call with them on
            self._calls.setdefault(key, span)
        span.allocated = self.clock.allocated()
        stack.append(self._visit(span, FORWARD, self.clock.mark()))

    def _enter_repeat(self, site: Site) -> None:
        span = self._find(site)
        if span is not None and self.takes_backward:
            self._here.stack.append(self._visit(span, REPEAT, self.clock.mark()))

    def _leave(self, name: str, way: int, output: Any) -> None:
        now = self.clock.mark()
        stack = self._here.stack
        for place in reversed(range(len(stack))):
            visit = stack[place]
            if visit.span.name == name and visit.way == way:
                del stack[place:]
                break
        else:
            return  # it had begun before the profile
        visit.end = now
        if way == FORWARD:
            tensors = tree.tensors_of(output)
            visit.span.output_bytes = sum(each.nbytes for each in tensors if each.layout is torch.strided)
            if visit.span.allocated is not None:
                visit.span.allocated = (self.clock.allocated() or 0) - visit.span.allocated

    # -- in the backward ---------------------------------------------------------------------------------

    def enter_backward(self, subject: Any, grad_outputs: Grads, *, site: Site) -> None:
        """Mark that the gradients of a call's outputs are there."""
        span, here = self._find(site), self._here
        if span is None:
            return
        now = self.clock.mark()
        while here.stack and here.stack[-1].way == REPEAT:  # checkpointing stopped when it had all that it needs
            here.stack.pop().end = now
        span.backward = self._visit(span, BACKWARD, now if site.began is None else site.began)
        here.visited = span

    def leave_backward(self, subject: Any, grad_inputs: Grads, grad_outputs: Grads, *, site: Site) -> None:
        """Mark that a backward pass has come past a call, perhaps some time ago."""
        span = self._find(site)
        if span is None or span.backward is None:
            return
        span.backward.is_exact = site.ended is not None
        span.backward.end = self.clock.mark() if site.ended is None else site.ended

    def _visit(self, span: Span, way: int, start: Any) -> Visit:
        visit = Visit(span, way, start, _torch.graph_task_id(), threading.get_ident())
        self.visits.append(visit)
        return visit

    def _find(self, site: Site) -> Span | None:
        step = site.step
        if step == -1 and self._here.visited is not None:
            step = self._here.visited.step  # a thread of autograd's own, which has run no forward, repeats one
        return self._calls.get((site.name, step, site.call))
