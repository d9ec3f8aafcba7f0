"""Record the calls of captured modules; sorting them is left for when they are read.

``capture`` puts the hooks of a `CaptureRecorder` on modules, and the cache takes `CapturedCall`s from it.

Without inputs and gradients there is one hook per module, which adds one tuple to one list. With them a call is opened
before the forward (which may change its inputs in place), closed after it, and found by its gradients through step and
number.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.errors import CaptureError, OptionError
from hookline.observe.capture.captured_calls import CapturedCall
from hookline.observe.capture.stored_value import NoNumbers, StoredValue, ValueStore
from hookline.observe.token_axes import GIVE_ROWS, TokenAxes
from hookline.phases import ALL_PHASES, Phases, known_phase
from hookline.sites import _torch
from hookline.sites.hook_at_site import open_contexts
from hookline.tree import main_tensor, map_tensors

if TYPE_CHECKING:
    from hookline.hook_types import Grads, Hook
    from hookline.sites.hook_at_site import ForwardCounter, HookAtSite
    from hookline.sites.site_info import Site

__all__ = ["CaptureRecorder", "CaptureStopped"]

_Note: TypeAlias = tuple[str, Any, int, int]
"""Name, output, its version, and the step."""
_Key: TypeAlias = tuple[str, int, int]
"""Name, step, and number of the call among those that gradients can come to, as gradient hooks count."""
_NEVER_CALLED: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NO_NUMBERS: Final = (
    "its calls were inside of a transform (torch.vmap, torch.func.grad) or of torch.export, where tensors have no "
    "numbers of their own that could be kept; run the model outside of it"
)


class CaptureStopped(BaseException):
    """Ends a forward whose last site is captured; no Exception, since a model may catch those."""

    def __init__(self, owner: object) -> None:
        super().__init__("hookline.capture(..., stop=True) has captured its last target; this ends its `with` block.")
        self.owner = owner


class _OpenCalls(threading.local):
    """The calls that are under way in this thread."""

    def __init__(self) -> None:
        self.by_module: dict[str, list[CapturedCall]] = defaultdict(list)
        """The innermost call last; a call that raised is dropped at the next one."""


_NONE_OPEN: Final = _OpenCalls()
"""For recorders that open no calls: to make one takes 2 µs."""


class CaptureRecorder:
    """Records calls, in the order they end."""

    def __init__(
        self,
        store: ValueStore,
        *,
        inputs: bool,
        grads: bool,
        stop: bool,
        during: Phases = ALL_PHASES,
        axes: TokenAxes | None = None,
    ) -> None:
        self.store = store
        self._axes = axes
        self.wait = None if store.is_plain else store.wait_for_copies
        """Waits for copies that are under way; None if there are none ever."""
        self.takes_inputs = inputs
        self.takes_grads = grads
        self.opens_calls = inputs or grads
        """Whether calls are opened and closed, and not just noted at their end."""
        self.stops = stop
        self.during = None if during == ALL_PHASES else during
        """The phases of a run whose calls are kept; None for all."""
        self.left_out: dict[str, str] = {}
        """For each module of which a call was not kept, why."""
        self.can_stop = False
        """Whether there is a ``with`` block for `CaptureStopped` to leave."""
        self.notes: list[_Note | CapturedCall] = []
        """Calls that were not read yet, oldest first; shared by all threads."""
        self._ahead: set[str] = set()
        self._sites: set[str] = set()
        self._open = _OpenCalls() if inputs or grads else _NONE_OPEN
        self._awaiting: dict[_Key, list[CapturedCall]] = {}
        self._without_graph: dict[str, list[CapturedCall]] = defaultdict(list)
        self._counts: dict[tuple[str, int], int] = {}
        """How many calls of each module were noted in each step."""

    def expect(self, name: str, module: nn.Module) -> None:
        """Add a site; the last one to be called may stop the forward."""
        if not isinstance(module, _NEVER_CALLED):
            self._sites.add(name)
            self._ahead.add(name)

    def clear(self) -> None:
        """Drop all calls."""
        self.notes.clear()
        self.left_out.clear()
        self._awaiting.clear()
        self._without_graph.clear()
        self._counts.clear()
        self._ahead = set(self._sites)
        self.store.clear()

    def release(self) -> None:
        """Hold no call any more, once the hooks are off.

        Graph nodes hold the hook of gradients, which leads here, and calls hold outputs, which hold graph nodes. The
        garbage collector does not see that circle, since it goes through C++, so it has to be cut.
        """
        self._awaiting.clear()
        self._without_graph.clear()
        self._open = _OpenCalls()  # that of every thread

    def take_calls(self) -> list[CapturedCall]:
        """Return the calls since the last time, oldest first."""
        count = len(self.notes)
        fresh, self.notes[:count] = self.notes[:count], []
        calls = []
        for note in fresh:  # one loop: a capture of one call takes this step for it
            if isinstance(note, CapturedCall):
                calls.append(note)
                continue
            name, output, version, step = note
            number = self._counts.get((name, step), 0)
            self._counts[name, step] = number + 1
            kept = output if isinstance(output, StoredValue) else StoredValue(output, ((output, version),))
            calls.append(CapturedCall(name, step, number, kept, wait=self.wait))
        return calls

    # -- without inputs and gradients --------------------------------------------------------------------

    def output_hook(self, entry: HookAtSite, scope: int | None) -> Hook:
        """Return the forward hook of one module.

        It checks the context by itself, and leaves counting calls for later: together 1 to 2 of the 8 to 10 µs that it
        adds to a call in a tiny GPT-2 (benchmarks/capturing.py).
        """
        name, counter, append = entry.name, entry.counter, self.notes.append
        here = counter.here
        task, keep = _torch.graph_task_id, self._keep_and_stop
        plain = self.store.is_plain and not self.stops
        during, is_wrapped = self.during, _torch.is_wrapped

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if scope is not None and scope not in open_contexts():
                return
            if task() != -1 and _torch.in_recomputation():
                return  # it was noted the first time
            if during is not None and (now := _phase_of(counter)) not in during:
                self._leave_out_for_phase(name, now)
                return
            if plain and type(output) is Tensor and not is_wrapped(output):
                try:
                    append((name, output, output._version, here.step))
                    return
                except RuntimeError:  # in inference mode tensors have no version
                    pass
            keep(name, output, here.step)

        return note

    def _keep_and_stop(self, name: str, output: Any, step: int) -> None:
        try:
            kept = self._keep_output(name, output)
        except NoNumbers:
            self.left_out[name] = _NO_NUMBERS
            return
        self.notes.append((name, kept, 0, step))
        if self.stops:
            self._stop_after(name)

    def _keep_output(self, name: str, output: Any) -> StoredValue:
        main = None if self._axes is None else main_tensor(output)
        if self._axes is not None and main is not None and (fault := self._axes.fault(name, main)):
            shape = tuple(main.shape)
            raise CaptureError(f"index= names axes, but the output of {name!r}, of shape {shape}, {fault}. {GIVE_ROWS}")
        return self.store.keep(output, f"output of {name!r}")

    def _leave_out_for_phase(self, name: str, now: str) -> None:
        assert self.during is not None
        wanted = ", ".join(sorted(self.during))
        self.left_out[name] = f"it was called in phase {now!r} of the run, and during= asks for: {wanted}"

    def _stop_after(self, name: str) -> None:
        self._ahead.discard(name)
        if self._ahead:
            return
        self._ahead = set(self._sites)
        if not self.can_stop:
            raise OptionError("stop=True ends the forward by leaving a `with` block: with hl.capture(..., stop=True):")
        raise CaptureStopped(self)

    # -- with inputs or gradients ------------------------------------------------------------------------

    def begin_hook(self, entry: HookAtSite) -> Hook:
        """Return the forward pre-hook of one module."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _torch.in_recomputation():
                self._begin_again(entry)
            else:
                self._begin(entry, module, args, kwargs)

        return begin

    def _begin(self, entry: HookAtSite, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = entry.name
        step, number = entry.counter.moment(entry)
        call = CapturedCall(name, step, number, takes_grads=self.takes_grads, wait=self.wait)
        if self.during is not None and (now := _phase_of(entry.counter)) not in self.during:
            call.is_left_out = True
            self._leave_out_for_phase(name, now)
        elif self.takes_inputs:
            self._keep_inputs(call, args, kwargs)
        under_way = self._open.by_module[name]
        if under_way:
            del under_way[_alive(module, under_way) - 1 :]
        under_way.append(call)
        # A call that is left out is counted all the same: gradients know theirs by number.
        if self.takes_grads and torch.is_grad_enabled():
            self._awaiting[name, *entry.counter.moment((entry, "grad"))] = [call]
        elif self.takes_grads:
            self._without_graph[name].append(call)

    def _keep_inputs(self, call: CapturedCall, args: Any, kwargs: Any) -> None:
        what = f"input of {call.name!r}"
        try:
            named = self.store.keep(dict(kwargs), what) if kwargs else StoredValue({})
            call.add_inputs(self.store.keep(tuple(args), what), named)
        except NoNumbers:
            call.is_left_out = True
            self.left_out[call.name] = _NO_NUMBERS

    def _begin_again(self, entry: HookAtSite) -> None:
        """Note a call that checkpointing repeats: if there was no graph the first time, it gets the gradients."""
        name = entry.name
        unclaimed = [call for call in self._without_graph.get(name, ()) if not (call.has_grads or call.is_left_out)]
        if not unclaimed or not torch.is_grad_enabled():
            return
        waiting = self._awaiting.setdefault((name, *entry.counter.moment((entry, "grad"))), [])
        waiting.extend(call for call in unclaimed if call not in waiting)

    def end_hook(self, entry: HookAtSite) -> Hook:
        """Return the forward hook of one module."""

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if _torch.in_recomputation():
                return
            begun = self._open.by_module[entry.name]
            if len(begun) > 1:
                del begun[_alive(module, begun) :]
            if begun:
                self._end(begun.pop(), output)

        return end

    def _end(self, call: CapturedCall, output: Any) -> None:
        if call.is_left_out:
            return
        try:
            call.add_output(self._keep_output(call.name, output))
        except NoNumbers:
            call.is_left_out = True
            self.left_out[call.name] = _NO_NUMBERS
            return
        self.notes.append(call)
        if self.stops:
            self._stop_after(call.name)

    def take_grads(self, module: nn.Module, grads: Grads, *, site: Site) -> None:
        """Take the gradients of a module's output; one hook for all modules."""
        waiting = self._awaiting.get((site.name, site.step, site.call), ())
        if len(waiting) != 1:
            for call in waiting:
                call.mixed = True
            return
        call = waiting[0]
        if call.is_left_out:
            return
        by_path = dict(zip(site.outputs, grads, strict=True))
        shaped = map_tensors(call.kept_output.value, lambda path, tensor: by_path.get(path), lambda leaf: None)
        with suppress(NoNumbers):
            call.add_grad(self.store.keep(shaped, f"gradient of {site.name!r}"))


def _phase_of(counter: ForwardCounter) -> str:
    """Return what the run is doing: what a loop says, or else what the model's mode and gradients tell."""
    return known_phase() or ("train" if all(counter.mode()) else "eval")


def _alive(module: nn.Module, begun: list[CapturedCall]) -> int:
    """Return how many calls of a module are under way, with the one that begins or ends; a raised one is not."""
    return _torch.times_running(module) or len(begun) + 1  # compiled code shows none, and raises in none
