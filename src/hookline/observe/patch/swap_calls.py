"""Which of the recorded calls of a module is its turn, for a swap that has several.

Asked by `edits` at each call. The calls of one forward of the model are told apart by their number in it. Where the
model's own forward is not called, calls of a part begin the steps, and a module that a forward would call twice may be
called once in each of two steps: there its calls are counted on from step to step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from hookline.observe.patch.misfits import misfit, place_of

if TYPE_CHECKING:
    from hookline.sites.modules.forward_counter import ForwardCounter
    from hookline.sites.site import Site

__all__ = ["Turns"]


class _Turn(NamedTuple):
    step: int
    before: int
    """How many calls were made in the steps before that belong to it."""
    calls: int
    """How many were made in this one."""


class Turns:
    """The turns of one swap at all its sites."""

    def __init__(self) -> None:
        self.root: ForwardCounter | None = None
        """Counts the steps of the model, once the swap was put on one."""
        self._last: dict[tuple[int, str], _Turn] = {}
        """For each thread and site, the call before this one, if a part has begun its step."""

    def turn(self, site: Site, num_calls: int) -> int:
        """Return which call of its module this is, of those `num_calls` that were recorded; raise if it is none."""
        recorded = f"swap() has {num_calls} calls from the other run"
        if torch.compiler.is_compiling():
            misfit(recorded, place_of(site), "is in compiled code, which does not know its call", _ONE_CALL)
        if site.recompute:
            misfit(recorded, place_of(site), "is repeated by activation checkpointing, in another order", _ONE_CALL)
        is_by_part = self.root is not None and self.root.here.by_part
        before, is_clear = self._before(site, num_calls) if is_by_part else (0, True)
        call = before + site.call
        if call >= num_calls or not is_clear:
            which = f"comes from call {call + 1} of its module"
            if before:
                misfit(recorded, place_of(site), f"{which}, and the model's own forward is not called", _CALL_MODEL)
            misfit(recorded, place_of(site), f"{which} in this forward", _ONE_CALL)
        return call

    def _before(self, site: Site, num_calls: int) -> tuple[int, bool]:
        """Return how many calls of the steps before this one count with it, and whether that can be told."""
        key = threading.get_ident(), site.name
        last = self._last.get(key)
        before, is_clear = 0, True
        if last is not None and last.step == site.step:
            before = last.before
            is_clear = not before
        elif last is not None and (last.before or last.calls < num_calls):
            before = last.before + last.calls
            is_clear = last.calls == 1
        self._last[key] = _Turn(site.step, before, site.call + 1)
        return before, is_clear


_ONE_CALL: Final = "Give the one that is meant: hookline.edits.replace(cache[name].calls[0].output)."
_CALL_MODEL: Final = (
    "So its calls are counted on: call the model, patch anew for each run, or give the one that is meant: "
    "hookline.edits.replace(cache[name].calls[0].output)."
)
