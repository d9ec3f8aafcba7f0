"""The hooks of a profile: which call began and ended when.

Takes hook calls from modules and functions, hands spans (calls) and visits (of backward passes at calls) to `Profile`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hookline.observe.profile.profile_rows import Span, Visit
from hookline.sites import _torch, tree

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.observe.profile.clock import Clock
    from hookline.sites.functions.function_site import FunctionSite
    from hookline.sites.site import Site

__all__ = ["Recorder"]

_Key: TypeAlias = tuple[str, int, int]
"""Name, step, and number of the call, as gradient hooks know it."""


class _Here(threading.local):
    """What is under way in this thread."""

    def __init__(self) -> None:
        self.stack: list[Span] = []
        """The calls that have begun and not ended; one that raised goes when the call around it ends."""
        self.counts: dict[str, int] = {}
        """How often each module was called with gradients on in this step: so do gradient hooks count calls."""
        self.step = -1
        """The step that ``counts`` is of; calls of a part begin steps too, where the model itself is not called."""
        self.repeats: list[Visit] = []
        """The same as ``stack`` for calls that are repeated in a backward pass."""
        self.visited: Span | None = None
        """The call that a backward pass came to last."""

    def begin(self) -> None:
        """A forward of the whole model begins."""
        if not any(span.name == "" for span in self.stack):
            self.stack.clear()  # parts of it were called by themselves, and raised

    def count(self, name: str, step: int) -> int:
        """Which call of that module in `step` this is, of those with gradients on."""
        if step != self.step:
            self.step = step
            self.counts.clear()
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return number


class Recorder:
    """Notes marks of the clock, and leaves all arithmetic for later."""

    def __init__(self, clock: Clock, max_spans: int, *, takes_backward: bool) -> None:
        self.clock = clock
        self.takes_backward = takes_backward
        self._max_spans = max_spans
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.spans: list[Span] = []
        self.visits: list[Visit] = []
        self.dropped = 0
        self._here = _Here()
        self._calls: dict[_Key, Span] = {}

    # -- in the forward ----------------------------------------------------------------------------------

    def enter_module(self, module: Any, args: Any, *, site: Site) -> None:
        """A module is about to be called."""
        if site.recompute:
            self._enter_repeat(site)
            return
        here = self._here
        if not site.name:
            here.begin()
        number = here.count(site.name, site.step) if torch.is_grad_enabled() else site.call
        self._enter(here, Span(site.name, site.type, site.step, site.call), number)

    def leave_module(self, module: Any, args: Any, output: Any, *, site: Site) -> None:
        """A module has returned; the model as a whole may have raised as well."""
        if site.recompute:
            self._leave_repeat(site.name)
        else:
            self._leave(site.name, output)

    def enter_function(self, fn: FunctionSite, inputs: Grads) -> None:
        """A function is about to be called."""
        if not fn.in_backward:
            self._enter(self._here, Span(fn.name, "function", fn.step, fn.call, fn.module), fn.call)

    def leave_function(self, fn: FunctionSite, inputs: Grads, outputs: Grads) -> None:
        """A function has returned."""
        if not fn.in_backward:
            self._leave(fn.name, outputs)

    def _enter(self, here: _Here, span: Span, number: int) -> None:
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
        span.thread = threading.get_ident()
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
        span.output_bytes = sum(_num_bytes(leaf) for _, leaf in tree.leaves(output) if isinstance(leaf, Tensor))
        if span.allocated is not None:
            span.allocated = (self.clock.allocated() or 0) - span.allocated

    # -- in the backward ---------------------------------------------------------------------------------

    def enter_backward(self, subject: Any, grad_outputs: Grads, *, site: Site) -> None:
        """The gradients of the outputs are there."""
        span = self._find(site)
        if span is not None:
            now = self.clock.mark() if site.began is None else site.began
            span.visit = Visit(span, _torch.graph_task_id(), threading.get_ident(), now)
            self.visits.append(span.visit)
            self._here.visited = span

    def leave_backward(self, subject: Any, grad_inputs: Grads, grad_outputs: Grads, *, site: Site) -> None:
        """A backward pass has come past the call, perhaps some time ago."""
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
