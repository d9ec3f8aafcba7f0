"""Record the calls of captured modules.

``capture`` puts the hooks of a `CaptureRecorder` on modules, and the cache reads its ``calls``. A call is kept when its
forward ends. With inputs or gradients it is opened before the forward, which may change its inputs in place, and its
gradients find it through step and number.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from hookline.errors import CaptureError, OptionError
from hookline.observe.capture.calls import CapturedCall, NoNumbers, ValueStore
from hookline.observe.index import GIVE_ROWS, TokenAxes
from hookline.phases import ALL_PHASES, Phases, known_phase
from hookline.sites import _torch
from hookline.sites.hook_at_site import open_contexts
from hookline.tree import main_tensor, map_tensors

if TYPE_CHECKING:
    from hookline.hook_types import Grads, Hook
    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.site_info import Site

__all__ = ["CaptureRecorder", "CaptureStopped"]

_Key: TypeAlias = tuple[str, int, int]
"""Name, step, and number of the call among those that gradients can come to, as gradient hooks count."""
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


class CaptureRecorder:
    """Records calls, in the order they end."""

    def __init__(
        self,
        store: ValueStore,
        *,
        inputs: bool = False,
        grads: bool = False,
        during: Phases = ALL_PHASES,
        axes: TokenAxes | None = None,
    ) -> None:
        self.store = store
        self.scope: int | None = None
        """The number of the context whose calls are kept; None for those of the whole process."""
        self.calls: dict[str, list[CapturedCall]] = {}
        """The calls that have ended, by the names of the modules; shared by all threads."""
        self.takes_inputs = inputs
        self.takes_grads = grads
        self.left_out: dict[str, str] = {}
        """For each module of which a call was not kept, why."""
        self.stops_after: frozenset[str] = frozenset()
        """The modules after whose calls the forward is ended; none for a forward that goes on."""
        self.can_stop = False
        """Whether there is a ``with`` block for `CaptureStopped` to leave."""
        self._during = during
        self._axes = axes
        self._seen: set[str] = set()
        """The modules that were called, of those that a stop waits for."""
        self._open = _OpenCalls()
        self._awaiting: dict[_Key, CapturedCall] = {}
        """The calls that gradients can come to."""

    @property
    def opens_calls(self) -> bool:
        """Whether calls are opened before the forward, and not just made at its end."""
        return self.takes_inputs or self.takes_grads

    def clear(self) -> None:
        """Drop all calls."""
        self.calls.clear()
        self.left_out.clear()
        self._seen.clear()
        self._awaiting.clear()

    def release(self) -> dict[str, list[CapturedCall]]:
        """Return the calls and hold none any more, once the hooks are off.

        Graph nodes hold the hook of gradients, which leads here, and calls hold outputs, which hold graph nodes. The
        garbage collector does not see that circle, since it goes through C++, so it has to be cut.
        """
        self.store.wait_for_copies()
        calls, self.calls, self._awaiting = self.calls, {}, {}
        self._open = _OpenCalls()  # that of every thread
        return calls

    # -- hooks -------------------------------------------------------------------------------------------

    def begin_hook(self, entry: HookAtSite) -> Hook:
        """Return the forward pre-hook of one module, which opens a call."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _torch.in_recomputation():
                self._mark_mixed(entry.name)
                return
            call = self._new_call(entry)
            if self.takes_inputs:
                self._keep(call, "inputs", "input", tuple(args))
                self._keep(call, "kwargs", "input", dict(kwargs))
            under_way = self._open.by_module[entry.name]
            if under_way:
                del under_way[_alive(module, under_way) - 1 :]
            under_way.append(call)
            # A call that is left out is counted all the same: gradients know theirs by number.
            if self.takes_grads and call.had_graph:
                self._awaiting[entry.name, *entry.counter.moment((entry, "grad"))] = call

        return begin

    def end_hook(self, entry: HookAtSite) -> Hook:
        """Return the forward hook of one module, which keeps the call."""
        opens, scope = self.opens_calls, self.scope

        def end(module: nn.Module, args: Any, output: Any) -> None:
            # Asked here, and not by the attachment, which would not tell a call of others from none.
            if scope is not None and scope not in open_contexts():
                return
            if _torch.in_recomputation():
                return  # it was kept the first time
            call = self._opened(entry, module) if opens else self._new_call(entry)
            if call is not None:
                self._end(call, output)

        return end

    def take_grads(self, module: nn.Module, grads: Grads, *, site: Site) -> None:
        """Take the gradients of a module's output; one hook for all modules."""
        call = self._awaiting.get((site.name, site.step, site.call))
        if call is None or call.is_left_out or call.gradients is None:
            return
        by_path = dict(zip(site.outputs, grads, strict=True))
        shaped = map_tensors(call.values["output"].value, lambda path, _: by_path.get(path), lambda leaf: None)
        with suppress(NoNumbers):
            call.gradients.append(self.store.keep(shaped, "gradient", site.name))

    # -- calls -------------------------------------------------------------------------------------------

    def _new_call(self, entry: HookAtSite) -> CapturedCall:
        moment = entry.counter.moment(entry)
        call = CapturedCall(entry.name, *moment, grads=self.takes_grads, wait=self.store.wait_for_copies)
        if self._during is not ALL_PHASES:
            # What a loop says that the run is doing, or else what the model's mode and gradients tell.
            now = known_phase() or ("train" if all(entry.counter.mode()) else "eval")
            if now not in self._during:
                wanted = ", ".join(sorted(self._during))
                self._leave_out(call, f"it was called in phase {now!r} of the run, and during= asks for: {wanted}")
        return call

    def _opened(self, entry: HookAtSite, module: nn.Module) -> CapturedCall | None:
        """Return the call that ends now; None if it began before the capture."""
        under_way = self._open.by_module[entry.name]
        if len(under_way) > 1:
            del under_way[_alive(module, under_way) :]
        return under_way.pop() if under_way else None

    def _mark_mixed(self, name: str) -> None:
        """Mark the calls of a module whose gradients come to a repetition, since the first time there was no graph.

        Checkpointing with use_reentrant=True does that, and the numbers of its calls begin at 0 again.
        """
        calls = self.calls.get(name, ()) if self.takes_grads and torch.is_grad_enabled() else ()
        if not all(call.had_graph for call in calls):
            for call in calls:
                call.is_mixed = True

    def _end(self, call: CapturedCall, output: Any) -> None:
        name = call.name
        main = None if self._axes is None or call.is_left_out else main_tensor(output)
        if self._axes is not None and main is not None and (fault := self._axes.fault(name, main)):
            shape = tuple(main.shape)
            raise CaptureError(f"index= names axes, but the output of {name!r}, of shape {shape}, {fault}. {GIVE_ROWS}")
        self._keep(call, "output", "output", output)
        if call.is_left_out:
            return
        self.calls.setdefault(name, []).append(call)
        if name in self.stops_after:
            self._stop_after(name)

    def _keep(self, call: CapturedCall, key: str, side: str, value: Any) -> None:
        """Store a value, unless the call is left out."""
        if call.is_left_out:
            return
        try:
            call.values[key] = self.store.keep(value, side, call.name)
        except NoNumbers:
            self._leave_out(call, _NO_NUMBERS)

    def _leave_out(self, call: CapturedCall, why: str) -> None:
        call.is_left_out = True
        self.left_out[call.name] = why

    def _stop_after(self, name: str) -> None:
        """End the forward if this was the last module that it waits for."""
        self._seen.add(name)
        if self._seen < self.stops_after:
            return
        self._seen.clear()
        if not self.can_stop:
            raise OptionError("stop=True ends the forward by leaving a `with` block: with hl.capture(..., stop=True):")
        raise CaptureStopped(self)


def _alive(module: nn.Module, begun: list[CapturedCall]) -> int:
    """Return how many calls of a module are under way, with the one that begins or ends; a raised one is not."""
    return _torch.times_running(module) or len(begun) + 1  # compiled code shows none, and raises in none
