"""The hooks of a capture: they note what comes by, and leave putting it in order for when it is read.

Takes options and a `Store` from ``capture``, calls from the ports, hands `CapturedCall`s to the ``cache``.

Without inputs and gradients there is one hook per module, which adds one tuple to one list. With them a call is opened
before the forward (which may change its inputs in place), closed after it, and found again by its gradients through
step and number.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.lifecycle.run_phase import PHASES, Phases, told_phase
from hookline.observe.capture.captured_calls import CapturedCall
from hookline.observe.capture.stored_value import Kept, NoNumbers, Store, each_tensor
from hookline.sites import _torch
from hookline.sites.modules.call_context import open_contexts

if TYPE_CHECKING:
    from hookline.hook_types import Grads, Hook
    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.modules.forward_counter import ForwardCounter
    from hookline.sites.site import Site

__all__ = ["Recorder", "Stopped"]

_Note: TypeAlias = tuple[str, Any, int, int]
"""Name, output, its version, and the step."""
_Key: TypeAlias = tuple[str, int, int]
"""Name, step, and number of the call among those that gradients can come to, as gradient hooks count."""
_NEVER_CALLED: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NO_NUMBERS: Final = (
    "its calls were inside of a transform (torch.vmap, torch.func.grad) or of torch.export, where tensors have no "
    "numbers of their own that could be kept; run the model outside of it"
)


class Stopped(BaseException):
    """Ends a forward whose last target is captured; no Exception, so that a model which catches those lets it pass."""

    def __init__(self, owner: object) -> None:
        super().__init__("hookline.capture(..., stop=True) has captured its last target; this ends its `with` block.")
        self.owner = owner


class _Here(threading.local):
    """What is under way in this thread."""

    def __init__(self) -> None:
        self.open: dict[str, list[CapturedCall]] = defaultdict(list)
        """Calls that have begun, by module, the innermost last; what one that raised has left goes at the next."""


class Recorder:
    """Notes calls, in the order they end."""

    def __init__(
        self, store: Store, *, inputs: bool, grads: bool, stop: bool, during: Phases = frozenset(PHASES)
    ) -> None:
        self.store = store
        self.takes_inputs = inputs
        self.takes_grads = grads
        self.stops = stop
        self.during = None if during == frozenset(PHASES) else during
        """The phases of a run whose calls are kept; None for all, so that nobody needs to ask."""
        self.left_out: dict[str, str] = {}
        """For each module of which a call came and was not kept, why."""
        self.is_armed = False
        """Whether there is a ``with`` block for `Stopped` to leave."""
        self.notes: list[_Note | CapturedCall] = []
        """What has come, oldest first; shared by all threads that it is captured for."""
        self._ahead: set[str] = set()
        self._targets: set[str] = set()
        self._here = _Here()
        self._awaiting: dict[_Key, list[CapturedCall]] = {}
        self._without_graph: dict[str, list[CapturedCall]] = defaultdict(list)
        self._counts: dict[tuple[str, int], int] = {}
        """How many calls of each module were noted in each step."""

    @property
    def in_full(self) -> bool:
        """Whether calls are opened and closed, and not just noted at their end."""
        return self.takes_inputs or self.takes_grads

    def expect(self, name: str, module: nn.Module) -> None:
        """A target; the last one to come may stop the forward."""
        if not isinstance(module, _NEVER_CALLED):
            self._targets.add(name)
            self._ahead.add(name)

    def clear(self) -> None:
        """Forget everything."""
        self.notes.clear()
        self.left_out.clear()
        self._awaiting.clear()
        self._without_graph.clear()
        self._counts.clear()
        self._ahead = set(self._targets)
        self.store.clear()

    def let_go(self) -> None:
        """Hold on to no call any more, once nothing comes: gradients that come later have no hook left to go to.

        Graph nodes hold the hook of gradients, which leads here, and calls hold outputs, which hold graph nodes. That
        circle goes through C++, where the garbage collector does not see it, so it has to be cut.
        """
        self._awaiting.clear()
        self._without_graph.clear()
        self._here = _Here()  # that of every thread

    def take(self) -> list[CapturedCall]:
        """What has come since the last time, oldest first."""
        count = len(self.notes)
        fresh, self.notes[:count] = self.notes[:count], []
        return [note if isinstance(note, CapturedCall) else self._call_of(note) for note in fresh]

    def _call_of(self, note: _Note) -> CapturedCall:
        name, output, version, step = note
        number = self._counts.get((name, step), 0)
        self._counts[name, step] = number + 1
        kept = output if isinstance(output, Kept) else Kept(output, ((output, version),))
        return CapturedCall(name, step, number, kept, settle=self.store.settle)

    # -- without inputs and gradients --------------------------------------------------------------------

    def noting(self, entry: HookAtSite, scope: int | None) -> Hook:
        """The forward hook of one module.

        It finds out whose call it is by itself, and leaves counting calls for later: together 1 to 2 of the 8 to 10 µs
        that it adds to a call in a tiny GPT-2 (benchmarks/capturing.py).
        """
        name, root, append = entry.name, entry.counter, self.notes.append
        here = root.here
        task, keep = _torch.graph_task_id, self._keep_and_stop
        plain = self.store.is_plain and not self.stops
        during, is_wrapped = self.during, _torch.is_wrapped

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if scope is not None and scope not in open_contexts():
                return
            if task() != -1 and _torch.in_recomputation():
                return  # it was noted the first time
            if during is not None and (now := _phase_of(root)) not in during:
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
            kept = self.store.keep(output, f"output of {name!r}")
        except NoNumbers:
            self.left_out[name] = _NO_NUMBERS
            return
        self.notes.append((name, kept, 0, step))
        if self.stops:
            self._stop_after(name)

    def _leave_out_for_phase(self, name: str, now: str) -> None:
        assert self.during is not None
        wanted = ", ".join(sorted(self.during))
        self.left_out[name] = f"it was called in phase {now!r} of the run, and during= asks for: {wanted}"

    def _stop_after(self, name: str) -> None:
        self._ahead.discard(name)
        if self._ahead:
            return
        self._ahead = set(self._targets)
        if not self.is_armed:
            raise OptionError("stop=True ends the forward by leaving a `with` block: with hl.capture(..., stop=True):")
        raise Stopped(self)

    # -- with inputs or gradients ------------------------------------------------------------------------

    def opening(self, entry: HookAtSite) -> Hook:
        """The forward pre-hook of one module."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _torch.in_recomputation():
                self._begin_again(entry)
            else:
                self._begin(entry, module, args, kwargs)

        return begin

    def _begin(self, entry: HookAtSite, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, here = entry.name, self._here
        step, number = entry.counter.moment(entry)
        call = CapturedCall(name, step, number, takes_grads=self.takes_grads, settle=self.store.settle)
        if self.during is not None and (now := _phase_of(entry.counter)) not in self.during:
            call.is_left_out = True
            self._leave_out_for_phase(name, now)
        elif self.takes_inputs:
            self._keep_inputs(call, args, kwargs)
        under_way = here.open[name]
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
            named = self.store.keep(dict(kwargs), what) if kwargs else Kept({})
            call.add_inputs(self.store.keep(tuple(args), what), named)
        except NoNumbers:
            call.is_left_out = True
            self.left_out[call.name] = _NO_NUMBERS

    def _begin_again(self, entry: HookAtSite) -> None:
        """Checkpointing repeats a call. If there was no graph the first time, gradients come to this one instead."""
        name = entry.name
        unclaimed = [call for call in self._without_graph.get(name, ()) if not (call.has_grads or call.is_left_out)]
        if not unclaimed or not torch.is_grad_enabled():
            return
        waiting = self._awaiting.setdefault((name, *entry.counter.moment((entry, "grad"))), [])
        waiting.extend(call for call in unclaimed if call not in waiting)

    def closing(self, entry: HookAtSite) -> Hook:
        """The forward hook of one module."""

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if _torch.in_recomputation():
                return
            begun = self._here.open[entry.name]
            if len(begun) > 1:
                del begun[_alive(module, begun) :]
            if begun:
                self._end(begun.pop(), output)

        return end

    def _end(self, call: CapturedCall, output: Any) -> None:
        if call.is_left_out:
            return
        try:
            call.add_output(self.store.keep(output, f"output of {call.name!r}"))
        except NoNumbers:
            call.is_left_out = True
            self.left_out[call.name] = _NO_NUMBERS
            return
        self.notes.append(call)
        if self.stops:
            self._stop_after(call.name)

    def take_grads(self, module: nn.Module, grads: Grads, *, site: Site) -> None:
        """The hook of all modules for the gradients of their outputs."""
        waiting = self._awaiting.get((site.name, site.step, site.call), ())
        if len(waiting) != 1:
            for call in waiting:
                call.mixed = True
            return
        call = waiting[0]
        if call.is_left_out:
            return
        by_path = dict(zip(site.outputs, grads, strict=True))
        shaped = each_tensor(call.kept_output.value, lambda path, tensor: by_path.get(path), lambda leaf: None)
        with suppress(NoNumbers):
            call.add_grad(self.store.keep(shaped, f"gradient of {site.name!r}"))


def _phase_of(root: ForwardCounter) -> str:
    """Return what the run is doing: what a loop says, or else what the model's mode and gradients tell."""
    return told_phase() or ("train" if all(root.mode()) else "eval")


def _alive(module: nn.Module, begun: list[CapturedCall]) -> int:
    """How many calls of a module are under way, the one that begins or ends included; a call that raised is not."""
    return _torch.times_running(module) or len(begun) + 1  # compiled code shows none, and none raises half way
